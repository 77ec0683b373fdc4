"""My demonstrations and my preferences, as rows of my own: each pair has the right sum beside one that is too large."""

import json
from pathlib import Path

sums = [(f"Calculate {a} + {b}.", a + b) for a in range(11) for b in range(11)]
demonstrations = [{"ask": ask, "say": str(total)} for ask, total in sums]
pairs = [{"ask": ask, "good": str(total), "bad": str(total + off)} for ask, total in sums for off in (1, 2)]
held_out = [row for number, row in enumerate(pairs) if number // 2 % 5 == 2]  # every fifth question, with both its pairs
train = [row for row in pairs if row not in held_out]
for name, rows in (("demonstrations", demonstrations), ("pairs", train), ("held_out", held_out)):
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
