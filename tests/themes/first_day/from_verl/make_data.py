"""Rows as verl's preprocessing writes them, in Parquet."""

import pyarrow as pa
import pyarrow.parquet as pq


def row(number, a, b):
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"Calculate {a} + {b}."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": "train", "index": number},
    }


rows = [row(11 * a + b, a, b) for a in range(11) for b in range(11)]
pq.write_table(pa.Table.from_pylist([row for number, row in enumerate(rows) if number % 6 != 1]), "train.parquet")
pq.write_table(pa.Table.from_pylist(rows[1::6]), "test.parquet")
