"""`megarl report`: runs as one HTML file that needs nothing else, no network and no other file.

Everything from the runs enters the page as JSON in which no `<` is left, and the page's scripts put it there as text, never as
markup: prompts and responses are not to be trusted. Pictures are decoded here and written anew, as data URLs.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from megarl.data.final_answer import read_boxes
from megarl.data.rows import find_value
from megarl.observe.pictures import PagePictures, frames_shown, shown_media, told_media
from megarl.observe.run_record import RunRecord, differences, last_figure, repetitions, reward_of

SAMPLES = 600
"""Samples of a run in a page at most, evenly spread over its steps."""
TOKENS = 300_000
"""Response tokens of a run in a page at most; one makes about 50 bytes."""
POINTS = 1000
"""Points of a curve in a page; of a longer run every n-th step and the last one."""
EXPERT_LOADS = 200_000
"""Numbers of the heat maps of experts of a run in a page; of a longer run those of evenly spread steps and of the last one."""
SPANS = 20_000
"""Spans of a run's timeline in a page: those of its last steps."""
PARTS = ("charts.js", "experts.js", "pictures.js", "samples.js", "page.js")


def build_page(runs: Sequence[RunRecord], place: str | Path = ".") -> str:
    """The page that shows `runs`; of those that repeat each other under other seeds also the mean and the range.

    `place` is the folder that it will be in, from which it names the files of profiles.
    """
    folder = files("megarl.observe") / "page"
    script = "\n".join((folder / part).read_text() for part in PARTS)
    title = "megarl: " + ", ".join(run.name for run in runs)
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>
{(folder / "page.css").read_text()}
</style>
</head>
<body>
<header><h1></h1><nav></nav></header>
<main></main>
<script type="application/json" id="data">{as_inert_json(page_data(runs, place))}</script>
<script>
{script}
</script>
</body>
</html>
"""


def as_inert_json(value: Any) -> str:
    """JSON that means the same, but can end no script and open no comment: without `<`, `>`, `&` and line separators."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False, default=str)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page_data(runs: Sequence[RunRecord], place: str | Path = ".") -> dict[str, Any]:
    """All that the page shows."""
    pictures = PagePictures()
    return {
        "runs": [_run_data(run, pictures) | {"profiles": _links(run, Path(place))} for run in runs],
        "pictures": pictures.found,
        "pictures_left_out": pictures.left_out,
        "repetitions": repetitions(runs),
        "differences": differences(runs),
        "last": {name: [last_figure(run, name) for run in runs] for name in _all_metrics(runs)},
    }


def _run_data(run: RunRecord, pictures: PagePictures) -> dict[str, Any]:
    rows = list(run.metrics)
    every = -(-len(rows) // POINTS) if rows else 1
    kept = rows[::every] + (rows[-1:] if (len(rows) - 1) % every else [])
    curves = {name: [row.get(name) for row in kept] for name in run.metric_names}
    faults = [dict(fault) for fault in run.faults]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "seed": run.fields().get("run.seed"),
        "steps": [row["step"] for row in kept],
        "curves": curves,
        "distributions": [dict(row) for row in _thinned(run.distributions, POINTS)],
        "experts": _expert_maps(run.experts),
        "trace": _last_spans(run.trace),
        "samples": [_sample_data(sample, run, pictures) for sample in _shown_samples(run)],
        "samples_written": len(run.samples),
        "boxes_in": _boxes_in(run),
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
        "summary": {name: value for name, value in run.summary.items() if name in ("eval", "gates", "seconds_per_step")},
        "environment": {**run.summary.get("machine", {}), **run.summary.get("versions", {})},
        "phases": run.summary.get("phases", {}),
        "faults": faults,
    }


def _links(run: RunRecord, place: Path) -> list[dict[str, str]]:
    """The files of the run's profiles, and where they are from `place` as a relative URL."""
    found = [(name, os.path.relpath(run.folder / name, place)) for name in run.profiles]
    return [{"name": name, "href": quote(path)} for name, path in found]


def _boxes_in(run: RunRecord) -> str:
    """What the numbers of boxes are, by the config of the reward that compares them."""
    boxes = [reward for reward in run.config.get("rewards") or () if reward.get("name") == "boxes"]
    return str((boxes[0].get("args") or {}).get("coordinates", "pixels")) if boxes else "pixels"


def _sample_media(sample: Mapping[str, Any], run: RunRecord, pictures: PagePictures) -> dict[str, Any]:
    """The pictures of a sample by digest, and the boxes of its answer and of the gold one; nothing for a sample of text.

    Those that were told between turns have their place among the response's tokens.
    """
    shown = shown_media(sample)
    for media in shown:
        for digest in frames_shown(media):
            pictures.add(digest, run.media_folder)
    if not shown:
        return {}
    parts = [{"kind": one.kind, "shown": frames_shown(one), "frames": len(one.digests)} for one in shown]
    for number, media in told_media(sample):
        parts[number] |= {"place": media.place, "tokens": media.tokens}
    gold = read_boxes(find_value(sample.get("row", {}), run.answer_key))
    return {"media": parts, "boxes": read_boxes(sample.get("response_text", "")), "gold_boxes": gold}


def _sample_data(sample: Mapping[str, Any], run: RunRecord, pictures: PagePictures) -> dict[str, Any]:
    """Of a sample what the browser shows; engine log-probs and what the step made of it are one list each over its tokens."""
    training = sample.get("training") or {}
    names = ("log_probs", "reference_log_probs", "advantages")
    return {
        "step": sample["step"],
        "id": sample["sample_id"],
        "group": sample["group_id"],
        "prompt": sample.get("prompt_text", ""),
        "response": sample.get("response_text", ""),
        "reward": reward_of(sample),
        "rewards": sample.get("rewards", {}),
        "finish": sample.get("finish_reason", ""),
        "answer": find_value(sample.get("row", {}), run.answer_key),
        "pieces": training.get("pieces"),
        "sampled": sample.get("sampled_mask", []),
        "engine": _rounded(sample.get("rollout_log_probs", [])),
        **{name: _rounded(training[name]) for name in names if name in training},
        **_sample_media(sample, run, pictures),
    }


def _shown_samples(run: RunRecord) -> list[Mapping[str, Any]]:
    tokens = sum(len(sample.get("response_ids", ())) for sample in run.samples)
    fit = len(run.samples) * TOKENS // tokens if tokens > TOKENS else SAMPLES
    return _thinned(run.samples, max(1, min(fit, SAMPLES)))


def _last_spans(trace: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    room = SPANS
    for row in reversed(trace):
        room -= sum(map(len, row["spans"].values()))
        if room < 0 and kept:
            break
        kept.append({"step": row["step"], "spans": row["spans"]})
    return kept[::-1]


def _expert_maps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As many of the steps' maps as there is room for, evenly spread, and always the last one."""
    if not rows:
        return []
    size = sum(len(of_layer) for name, role in rows[-1].items() if name != "step" for of_layer in role["loads"])
    room = max(1, EXPERT_LOADS // max(size, 1))
    return [dict(row) for row in (_thinned(rows[:-1], room - 1) if room > 1 else [])] + [dict(rows[-1])]


def _thinned(rows: Sequence[Any], at_most: int) -> list[Any]:
    """`rows`, or that many of them, evenly spread."""
    if len(rows) <= at_most:
        return list(rows)
    return [rows[place * len(rows) // at_most] for place in range(at_most)]


def _all_metrics(runs: Sequence[RunRecord]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.metric_names))


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 8) if math.isfinite(value) else value for value in values]


def _finite(value: Any) -> Any:
    """`value` with null for each number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
