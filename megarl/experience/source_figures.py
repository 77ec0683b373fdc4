"""Metrics of a training step by the data source of its rows: the value under `data.source_key`, or the part of a mixture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.data.rows import value_of
from megarl.data.sample import Prompt, Sample
from megarl.errors import DataError
from megarl.experience.eval_figures import evaluation

MOST_SOURCES = 64
"""Each is four curves: a key with more values names rows, not sources."""


@dataclass(frozen=True)
class DataSources:
    """By row id, the name of its source as it stands in metrics; empty where rows have none."""

    names: dict[str, str]

    @classmethod
    def of(cls, parts: Sequence[Sequence[Prompt]], key: str | None) -> DataSources:
        """The sources of the training prompts, by part of a mixture.

        Args:
            parts: prompts.
            key: `data.source_key`; None: each part of a mixture is a source, called `part_<number>`, and a single source none.

        Raises:
            DataError: a row has no such key, there are more than `MOST_SOURCES` values, or two of them have one name.
        """
        if key is None:
            numbered = enumerate(parts) if len(parts) > 1 else ()
            return cls({prompt.row_id: f"part_{number}" for number, part in numbered for prompt in part})
        values = {
            prompt.row_id: str(value_of(prompt.row, key, "data.source_key", f"row {prompt.row_id}"))
            for part in parts
            for prompt in part
        }
        named: dict[str, str] = {}
        for value in values.values():
            other = named.setdefault(metric_name(value), value)
            if other != value:
                raise DataError(
                    f"rows have '{other}' and '{value}' under '{key}' (data.source_key), which both are "
                    f"'{metric_name(value)}' in metrics; the sources' names must differ in letters, digits, '.' or '-'"
                )
            if len(named) > MOST_SOURCES:
                raise DataError(
                    f"rows have more than {MOST_SOURCES} different values under '{key}' (data.source_key), such as '{value}'; "
                    "it must be a key that names the data source"
                )
        return cls({row_id: metric_name(value) for row_id, value in values.items()})

    def figures(self, samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, float]:
        """Figures of a step's samples with their rewards before shaping, by source.

        `source/<name>/reward` (mean), `source/<name>/accuracy` (share of right responses, as in evaluations; not where only
        a reward model judges), `source/<name>/tokens_mean` (response length) and `source/<name>/samples` (number).
        """
        rows: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            if (name := self.names.get(sample.row_id)) is not None:
                rows.setdefault(name, []).append(row)
        metrics: dict[str, float] = {}
        for name, places in rows.items():
            chosen = [samples[index] for index in places]
            source_figures = evaluation(chosen, [rewards[index] for index in places])
            source_figures |= {"samples": source_figures.pop("prompts")}
            source_figures["tokens_mean"] = sum(sample.response_length for sample in chosen) / len(chosen)
            metrics |= {f"source/{name}/{figure}": value for figure, value in source_figures.items()}
        return metrics


def metric_name(value: str) -> str:
    """The name of a source in metrics: `openai/gsm8k` is `openai_gsm8k`."""
    return re.sub(r"[^\w.-]+", "_", value)
