"""`samples.jsonl`: what the policy said, one JSON object per sample with its step; also what `engine: replay` reads.

Beside the sample's own fields there is `training`: what the step made of it, token by token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.data.batch import Batch
from megarl.data.columns import of_responses
from megarl.observe.kept_lines import keep_lines
from megarl.runs.update_metrics import LogProbs
from megarl.system.redaction import redacted_data

COLUMNS = {"old_log_probs": "log_probs", "reference_log_probs": "reference_log_probs", "advantages": "advantages"}
"""Columns of a batch that are written, and their names in the file."""


class SamplesFile:
    """Appends the first `per_step` samples of each step. A resumed run first drops the lines of later steps."""

    def __init__(self, path: Path, per_step: int, resume_after_step: int | None, tokenizer: Any) -> None:
        self.path, self.per_step, self._tokenizer = path, per_step, tokenizer
        keep_lines(path, resume_after_step)

    def write(self, step: int, batch: Batch, rewards: Sequence[float], log_probs: LogProbs) -> None:
        """Append the samples of `step`: `rewards` has one per row, `log_probs` the trainer's `[L]` where `batch` has none."""
        self.add(step, self._records(batch, rewards, log_probs))

    def add(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append samples of `step` as they are to stand in the file."""
        with self.path.open("a") as file:
            file.writelines(_line({"step": step, **record}) for record in records)

    def _records(self, batch: Batch, rewards: Sequence[float], log_probs: LogProbs) -> Iterator[dict[str, Any]]:
        for row, sample in enumerate(sample.loaded() for sample in batch.samples[: self.per_step]):
            columns = {name: batch.values(column, row) for column, name in COLUMNS.items() if column in batch.columns}
            if "kept_log_probability" in batch.columns:  # over all tokens, as the engine's are
                columns["log_probs"] = columns["log_probs"] + batch.values("kept_log_probability", row)
            if "log_probs" not in columns and row in log_probs:
                columns["log_probs"] = torch.tensor(log_probs[row])
            training = {"reward": rewards[row], "pieces": pieces(sample.response_ids, self._tokenizer)}
            training |= {name: [round(value, 8) for value in column.tolist()] for name, column in columns.items()}
            record = replace(sample, extra=of_responses(sample.extra)).to_dict()  # columns of tokens are more than the rest
            yield {**record, "training": training}


def _line(record: Mapping[str, Any]) -> str:
    """`record` as a line of JSON without keys of services and the like; tokens stay, as `engine: replay` needs them."""
    line = json.dumps(record)
    shown = redacted_data(line)
    if shown != line and "pieces" in record.get("training", {}):  # no token has a whole key in it
        texts = record["training"]["pieces"]
        whole = redacted_data("".join(texts))
        hidden = [whole, *[""] * (len(texts) - 1)] if whole != "".join(texts) else texts
        shown = redacted_data(json.dumps({**record, "training": {**record["training"], "pieces": hidden}}))
    return f"{shown}\n"


def pieces(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each token adds; a character made of several tokens comes with its last one."""
    texts: list[str] = []
    context = read = 0  # decoded beside the tokens before it, since a first token may lose its space
    for end in range(1, len(token_ids) + 1):
        before, text = (tokenizer.decode(token_ids[context:until]) for until in (read, end))
        if text.endswith("\ufffd") and end < len(token_ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        context, read = read, end
    return texts
