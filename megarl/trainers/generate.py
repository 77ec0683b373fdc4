"""`megarl generate`: sampled responses with their rewards as rows of a file, also as rows to train on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from megarl.config import Config
from megarl.config.sections import DataConfig
from megarl.data.rows import find_value
from megarl.data.sample import Sample
from megarl.errors import ConfigError
from megarl.experience.eval_figures import is_right
from megarl.system.atomic_files import write_text_atomically
from megarl.system.redaction import redacted_data
from megarl.trainers.evaluate import answer

Form = Literal["samples", "sft", "pairs", "pass_rates"]


def generate(
    config: Config,
    out: str,
    form: Form,
    checkpoint: str | None,
    say: Callable[[str], None] | None = None,
    console: Console | None = None,
) -> int:
    """Sample `rollout.samples_per_prompt` responses to every row of `data.train` and write them to the new file `out`.

    `samples`: every response with its rewards. `sft`: each different response that is right, as `prompt` and `response`
    (docs/methods.md#recipes-of-several-runs). `pairs`: a right one as `chosen` beside a wrong one as `rejected`, each used
    once. `pass_rates`: each row as it is, with the share of its responses that are right as `pass_rate`.

    `say` is told in lines how far it is; a `console` that is a terminal shows a bar. Returns the number of rows written.

    Raises:
        ConfigError: `out` exists, rows to train on are asked of episodes of several turns, pass rates without functions that
            judge, or no row came about, such as no response that was right.
        MegarlError: anything else the user can mend, as one sentence.
    """
    kind = config.rollout.episode.kind
    if form in ("sft", "pairs") and kind != "single":
        raise ConfigError(
            f"--as is '{form}', but rollout.episode.kind is '{kind}', whose responses hold what tools and environments said; "
            "it must be 'samples' or 'pass_rates'"
        )
    if form == "pass_rates" and not config.rewards:
        raise ConfigError("--as is 'pass_rates', but rewards is empty, so that no function says which responses are right")
    path = Path(out)
    if path.exists():
        raise ConfigError(f"--out is '{out}', which exists already; name a new file")
    if not next(parent for parent in path.parents if parent.exists()).is_dir():
        raise ConfigError(f"--out is '{out}', but its folder is a file; name a file in a folder")
    if form == "pairs" and config.rollout.samples_per_prompt < 2:
        raise ConfigError("--as is 'pairs', but rollout.samples_per_prompt is 1; a pair is two responses to one prompt")
    samples, scores = answer(config, checkpoint, say, console)
    makers = {"samples": _all, "sft": _right, "pairs": _pairs, "pass_rates": _pass_rates}
    rows = list(makers[form](samples, scores, config.data))
    if not rows:
        raise ConfigError(f"none of {len(samples)} responses makes a row of --as {form}; sample more of them")
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = redacted_data if form == "samples" else str  # the others are rows to train on
    write_text_atomically(path, "".join(shown(json.dumps(row, default=str)) + "\n" for row in rows))
    return len(rows)


def _all(samples: Sequence[Sample], scores: Sequence[float], data: DataConfig) -> Iterator[dict[str, Any]]:
    for sample, score in zip(samples, scores, strict=True):
        yield {
            "prompt": find_value(sample.row, data.prompt_key),
            "response": sample.response_text,
            "turns": sample.turns,
            "reward": score,
            "rewards": sample.rewards,
            "finish_reason": sample.finish_reason,
            "row": sample.row,
        }


def _right(samples: Sequence[Sample], scores: Sequence[float], data: DataConfig) -> Iterator[dict[str, Any]]:
    seen: set[tuple[str, str]] = set()
    for sample in samples:
        key = (sample.group_id, sample.response_text)
        if is_right(sample) and not sample.truncated and key not in seen:
            seen.add(key)
            yield {**_asked(sample, data), "response": sample.response_text}


def _pairs(samples: Sequence[Sample], scores: Sequence[float], data: DataConfig) -> Iterator[dict[str, Any]]:
    groups: dict[str, dict[bool, dict[str, Sample]]] = {}
    for sample in samples:
        if not sample.truncated and sample.response_text:
            sides = groups.setdefault(sample.group_id or sample.row_id, {True: {}, False: {}})
            sides[bool(is_right(sample))].setdefault(sample.response_text, sample)
    for sides in groups.values():
        for right, wrong in zip(sides[True].values(), sides[False].values(), strict=False):
            yield {**_asked(right, data), "chosen": right.response_text, "rejected": wrong.response_text}


def _asked(sample: Sample, data: DataConfig) -> dict[str, Any]:
    """The prompt of a row to imitate, and the row's own system message and options of the chat template, if it has them, under
    the keys that are read by default."""
    own = {
        "system": find_value(sample.row, data.system_key) if data.system_key is not None else None,
        "template_args": sample.row.get("template_args"),
    }
    return {"prompt": find_value(sample.row, data.prompt_key)} | {key: value for key, value in own.items() if value}


def _pass_rates(samples: Sequence[Sample], scores: Sequence[float], data: DataConfig) -> Iterator[dict[str, Any]]:
    of_rows: dict[str, list[Sample]] = {}
    for sample in samples:
        of_rows.setdefault(sample.row_id, []).append(sample)
    for group in of_rows.values():
        yield {**group[0].row, "pass_rate": sum(bool(is_right(sample)) for sample in group) / len(group)}
