"""How fast conversations become samples: rows a second of `SupervisedBuilder`, beside transformers' own functions.

    python benchmarks/tokenising.py --out benchmarks/results/tokenising.json

One process, no model but its tokenizer. Every round makes the samples and then calls `apply_chat_template` and the tokenizer
once for each conversation, so that both see the same machine; the figures are medians. transformers' part knows nothing of what
is trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measured_code import code_of
from workload import machine

from megarl.data.supervised import SupervisedBuilder, SupervisedSettings
from megarl.data.tokenize import load_tokenizer

TURNS, WORDS = 10, (5, 60)
"""Messages of a conversation, and words of one: 40 tokens of SmolLM2 on average, with its ends."""
TEXT = """
the of and to in is that it for was on are as with they be at one have this from by hot word but what some we can out
other were all there when up use your how said an each she which do their time if will way about many then them write
would like so these her long make thing see him two has look more day could go come did number sound no most people my
over know water than call first who may down side been now find any new work part take get place made live where after
back little only round man year came show every good me give our under name very through just form sentence great think
say help low line
"""


def conversations(count: int) -> list[dict[str, Any]]:
    """Rows of user and assistant in turn, in common words."""
    draw, vocabulary = random.Random(0), TEXT.split()
    return [
        {
            "messages": [
                {"role": ("user", "assistant")[turn % 2], "content": " ".join(draw.choices(vocabulary, k=draw.randint(*WORDS)))}
                for turn in range(TURNS)
            ]
        }
        for _ in range(count)
    ]


def build(tokenizer: Any, rows: list[dict[str, Any]]) -> int:
    """The samples of `rows` as a run makes them; returns their tokens."""
    builder = SupervisedBuilder(tokenizer, "sft", SupervisedSettings(max_tokens=1 << 20))
    return sum(len(sample.prompt_ids) + len(sample.response_ids) for sample in builder.build(rows, prefix="train"))


def render(tokenizer: Any, rows: list[dict[str, Any]]) -> int:
    """Each conversation rendered and tokenised once by transformers; returns the tokens."""
    texts = (tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows)
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="folder with a tokenizer and its chat template")
    parser.add_argument("--rows", type=int, default=2000, help="conversations (default: 2000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--out", required=True, help="JSON file to write")
    arguments = parser.parse_args()
    tokenizer, rows = load_tokenizer(arguments.model), conversations(arguments.rows)
    seconds: dict[str, list[float]] = {"megarl": [], "transformers": []}
    tokens: dict[str, int] = {}
    for _ in range(arguments.rounds):
        for name, work in (("megarl", build), ("transformers", render)):
            began = time.perf_counter()
            tokens[name] = work(tokenizer, rows)
            seconds[name].append(time.perf_counter() - began)
    rows_per_s = {name: len(rows) / statistics.median(times) for name, times in seconds.items()}
    figures = {
        "machine": machine(),
        "code": code_of("tokenising"),
        "versions": {name: version(name) for name in ("transformers", "tokenizers", "jinja2")},
        "setup": {"model": Path(arguments.model).name, "rows": len(rows), "turns": TURNS, "rounds": arguments.rounds},
        "tokens": tokens,
        "rows_per_s": rows_per_s,
        "over_transformers": rows_per_s["transformers"] / rows_per_s["megarl"],
    }
    Path(arguments.out).write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
