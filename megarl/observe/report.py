"""`megarl report`: runs as one HTML file that needs nothing else, no network and no other file.

Everything from the runs enters the page as JSON in which no `<` is left, and the page's scripts put it there as text, never as
markup: prompts and responses are not to be trusted. Pictures are decoded here and written anew, as data URLs.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

import yaml

from megarl.observe.page_samples import listed_samples, packed_samples
from megarl.observe.run_record import RunRecord, differences, figure_of, last_figure, metric_names, repetitions
from megarl.observe.run_status import axes, run_status
from megarl.observe.sample_media import PagePictures

POINTS = 1000
"""Points of a curve in a page; of a longer run every n-th step and the last one."""
EXPERT_LOADS = 200_000
"""Numbers of the heat maps of experts of a run in a page; of a longer run those of evenly spread steps and of the last one."""
SPANS = 20_000
"""Spans of a run's timeline in a page: those of its last steps."""
PARTS = (
    *("charts.js", "curves.js", "phases.js", "overview.js", "experts.js", "pictures.js"),
    *("sample_store.js", "samples.js", "live.js", "page.js"),
)


def build_page(runs: Sequence[RunRecord], place: str | Path = ".", *, is_live: bool = False) -> str:
    """The page that shows `runs`; of those that repeat each other under other seeds also the mean and the range.

    `place` is the folder that it will be in, from which it names the files of profiles. A live page asks the server that it
    came from for new rows; any other loads nothing.
    """
    folder = files("megarl.observe") / "page"
    library = folder / "vendor"
    title = "megarl: " + ", ".join(run.name for run in runs)
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    policy += "; connect-src 'self'" if is_live else ""
    data = page_data(runs, place, packed_samples) | {"live": is_live}
    elements = [_move_samples(run, number) for number, run in enumerate(data["runs"])]
    return Template((folder / "page.html").read_text()).substitute(
        policy=policy,
        title=html.escape(title),
        library_style=(library / "uplot.css").read_text(),
        style=(folder / "page.css").read_text(),
        data=as_inert_json(data),
        samples="".join(elements),
        license=(library / "uplot.LICENSE").read_text(),
        library=(library / "uplot.js").read_text(),
        script="\n".join((folder / part).read_text() for part in PARTS),
    )


def _move_samples(run: dict[str, Any], number: int) -> str:
    """Leave of the packed samples in `run` the columns alone; the elements that hold their prompts and texts."""
    run["samples"], prompts, chunks = run["samples"]
    parts = {"prompts": prompts, **{str(index): chunk for index, chunk in enumerate(chunks)}}
    element = '<script type="application/octet-stream" id="samples-{}-{}">{}</script>\n'
    return "".join(element.format(number, name, part) for name, part in parts.items())


def as_inert_json(value: Any) -> str:
    """JSON that means the same, but can end no script and open no comment: without `<`, `>`, `&` and line separators."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False, default=str)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page_data(
    runs: Sequence[RunRecord], place: str | Path = ".", take: Callable[[RunRecord, PagePictures], Any] = listed_samples
) -> dict[str, Any]:
    """All that the page shows; of each run's samples what `take` makes."""
    pictures = PagePictures()
    return {
        "runs": [_run_data(run) | {"samples": take(run, pictures), "profiles": _links(run, Path(place))} for run in runs],
        "pictures": pictures.found,
        "pictures_left_out": pictures.left_out,
        "repetitions": repetitions(runs),
        "differences": differences(runs),
        "last": {name: [last_figure(run, name) for run in runs] for name in metric_names(runs)},
    }


def _run_data(run: RunRecord) -> dict[str, Any]:
    rows = list(run.metrics)
    every = -(-len(rows) // POINTS) if rows else 1

    def thin(values: list[Any]) -> list[Any]:
        return values[::every] + (values[-1:] if (len(values) - 1) % every else [])

    thinned = thin(rows)
    curves = {name: [figure_of(row, name) for row in thinned] for name in run.metric_names}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "seed": run.fields().get("run.seed"),
        "status": run_status(run),
        "steps": [row["step"] for row in thinned],
        "axes": {name: thin(values) for name, values in axes(rows).items()},
        "rows_written": len(rows),
        "curves": curves,
        "distributions": [dict(row) for row in _thinned(run.distributions, POINTS)],
        "experts": _expert_maps(run.experts),
        "trace": _last_spans(run.trace),
        "samples_written": len(run.samples),
        "boxes_in": _boxes_in(run),
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
        "summary": {name: value for name, value in run.summary.items() if name == "eval"},
        "environment": {**run.machine["machine"], **run.machine["versions"]},
        "phases": run.summary.get("phases", {}),
        "faults": [dict(fault) for fault in run.faults],
        "damage": list(run.damage),
        "reward_errors": _reward_errors(run.reward_errors),
        "slow_ranks": [dict(row) for row in run.slow_ranks],
    }


def _reward_errors(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By source of reward that failed: how often, in which steps, and the first error with its traceback."""
    by_reward: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_reward.setdefault(str(row["reward"]), []).append(row)
    return [
        {
            "reward": reward,
            "errors": sum(row["errors"] for row in of_reward),
            "steps": len({row["step"] for row in of_reward}),
            "first step": of_reward[0]["step"],
            "last step": of_reward[-1]["step"],
            "on_error": ", ".join(dict.fromkeys(row["on_error"] for row in of_reward)),
            "error": of_reward[0]["error"],
            "traceback": next((row["traceback"] for row in of_reward if "traceback" in row), ""),
        }
        for reward, of_reward in by_reward.items()
    ]


def _links(run: RunRecord, place: Path) -> list[dict[str, str]]:
    """The files of the run's profiles, and where they are from `place` as a relative URL."""
    paths = [(name, os.path.relpath(run.folder / name, place)) for name in run.profiles]
    return [{"name": name, "href": quote(os.fsencode(path))} for name, path in paths]


def _boxes_in(run: RunRecord) -> str:
    """The coordinates of boxes, by the config of the reward that compares them."""
    rewards = run.config.get("rewards")
    named = [reward for reward in (rewards if isinstance(rewards, list) else ()) if isinstance(reward, Mapping)]
    args = [reward.get("args") for reward in named if reward.get("name") == "boxes"]
    return str(args[0].get("coordinates", "pixels")) if args and isinstance(args[0], Mapping) else "pixels"


def _last_spans(trace: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    last_steps: list[dict[str, Any]] = []
    room = SPANS
    for row in reversed(trace):
        room -= sum(map(len, row["spans"].values()))
        if room < 0 and last_steps:
            break
        last_steps.append({"step": row["step"], "spans": row["spans"]})
    return last_steps[::-1]


def _expert_maps(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Choose as many of the steps' maps as there is room for, evenly spread, and always the last one."""
    if not rows:
        return []
    size = sum(len(of_layer) for name, role in rows[-1].items() if name != "step" for of_layer in role["loads"])
    room = max(1, EXPERT_LOADS // max(size, 1))
    return [dict(row) for row in (_thinned(rows[:-1], room - 1) if room > 1 else [])] + [dict(rows[-1])]


def _thinned(rows: Sequence[Any], at_most: int) -> list[Any]:
    """`rows`, or that many of them, evenly spread."""
    if len(rows) <= at_most:
        return list(rows)
    return [rows[index * len(rows) // at_most] for index in range(at_most)]


def _finite(value: Any) -> Any:
    """`value` with null for each number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
