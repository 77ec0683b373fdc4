"""A run at a glance: its state, model, layout, hardware, results; the first part of the report page."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megarl.observe.run_record import RunRecord

QUIET_S = 300.0
"""A run that has written nothing for this long, and for three of its steps, is taken to have stopped."""
CHECKS = {
    "kl_to_reference_at_first_step": "KL at the start",
    "log_prob_max_difference_as_loaded": "log-probs as loaded",
    "log_prob_max_difference_after_sync": "log-probs after sync",
}
"""Short words for the parity figures of a run's summary."""
FILES = ("metrics.jsonl", "samples.jsonl", "trace.jsonl")


def run_status(run: RunRecord, now: float | None = None) -> dict[str, Any]:
    """State and facts of `run` at `now` (seconds since the epoch); a fact that the run did not write is None."""
    fields = run.fields()
    done = max((row["step"] for row in run.metrics), default=0)
    planned = fields.get("run.steps")
    begin, end = _wall(run.trace)
    return {
        "state": _state(run, done, planned, time.time() if now is None else now),
        "done": done,
        "planned": planned,
        "model": fields.get("model.path"),
        "algorithm": fields.get("algorithm.name"),
        "training": _layout(run),
        "engines": _engines(fields),
        "hardware": _hardware(run),
        "started": datetime.fromtimestamp(begin, UTC).strftime("%Y-%m-%d %H:%M UTC") if begin else None,
        "seconds": end - begin if begin and end else None,
        "step_seconds": run.summary.get("seconds_per_step") or _mean(list(run.curve("time/step_s").values())[-10:]),
        "tokens": _tokens(run.metrics)[-1] if run.metrics else None,
        "best": max(run.curve("reward/mean").items(), key=lambda item: item[1], default=None),
        "checks": _checks(run.summary),
        "faults": len(run.faults),
        "why": run.end.get("why"),
        "version": run.machine["versions"].get("megarl"),
        "commit": _short_commit(run.machine.get("commit")),
    }


def _checks(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parity figures: short name, value, bound and state: `passed`, `failed`, `not measured`, or `measured` where no
    bound is known."""
    checks = []
    for name, value in summary.get("gates", {}).items():
        bound = summary.get("gate_bounds", {}).get(name)
        if value is None:
            state = "not measured"
        elif bound is None:
            state = "measured"
        else:
            state = "passed" if value <= bound else "failed"  # what is no number fails
        checks.append({"name": CHECKS.get(name, name.replace("_", " ")), "value": value, "bound": bound, "state": state})
    return checks


def axes(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """By row: `tokens` so far, prompts included, in tokens; and `hours` of training so far."""
    hours = 0.0
    elapsed = []
    for row in metrics:
        hours += _number(row.get("time/step_s")) / 3600
        elapsed.append(round(hours, 6))
    return {"tokens": _tokens(metrics), "hours": elapsed}


def _tokens(metrics: Sequence[Mapping[str, Any]]) -> list[float]:
    total, sums = 0.0, []
    for row in metrics:
        total += _number(row.get("speed/tokens_per_s")) * _number(row.get("time/step_s"))
        sums.append(float(round(total)) if math.isfinite(total) else total)
    return sums


def _state(run: RunRecord, done: int, planned: Any, now: float) -> str:
    """`finished`, `running`, `interrupted` (it was told to stop), `failed`, or `stopped`: nobody wrote why it is quiet."""
    if run.end:
        return str(run.end.get("state"))
    written = [(run.folder / name).stat().st_mtime for name in FILES if (run.folder / name).is_file()]
    last = max(written, default=0.0)
    summary: Path = run.folder / "summary.json"
    if run.summary and summary.stat().st_mtime >= last - 60:  # an older one is that of a run that was continued
        return "finished" if not isinstance(planned, int) or done >= planned else "stopped"
    if run.faults and run.faults[-1].get("wait_s", 0) is None and (run.folder / "faults.jsonl").stat().st_mtime >= last:
        return "failed"  # its process was killed, and no other attempt followed
    step_s = _mean(list(run.curve("time/step_s").values())[-10:]) or 0.0
    return "running" if now - last < max(QUIET_S, 3 * step_s) else "stopped"


def _layout(run: RunRecord) -> str | None:
    layout = run.section("policy", "layout")
    sizes = [f"{name} {size}" for name in ("dp", "tp", "pp", "cp", "ep") if type(size := layout.get(name)) is int and size]
    return ", ".join(size for size in sizes if size.split()[1] != "1") or ("1 rank" if sizes else None)


def _engines(fields: Mapping[str, Any]) -> str | None:
    if not fields.get("rollout.engine"):
        return None
    count, tp = fields.get("rollout.engines") or 1, fields.get("rollout.tp") or 1
    lent = f" and {fields['rollout.schedule.lent_engines']} lent" if fields.get("rollout.schedule.lent_engines") else ""
    most = f" to {fields['rollout.max_engines']}" if fields.get("rollout.max_engines") else ""
    return f"{count}{most} × {fields['rollout.engine']}{lent}" + (f", tp {tp}" if tp != 1 else "")


def _hardware(run: RunRecord) -> str | None:
    machine, gpu, gpus = run.machine["machine"], run.machine.get("gpu"), run.machine.get("gpus")
    facts = [f"{gpus} × {gpu}" if gpus else str(gpu)] if gpu else []
    facts += [f"{run.nodes} nodes"] if run.nodes > 1 else []
    facts += [str(machine["processor"])] if machine.get("processor") else []
    facts += [f"{machine['cores']} cores"] if machine.get("cores") else []
    facts += [f"{machine['memory_bytes'] / 2**30:.1f} GiB"] if machine.get("memory_bytes") else []
    return ", ".join(facts) or None


def _short_commit(commit: str | None) -> str | None:
    """The commit's first 12 letters, and `-dirty` where files were changed."""
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "") if commit else None


def _wall(trace: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """When the driver's first phase began and its last one ended."""
    spans = [span for row in (*trace[:1], *trace[-1:]) for span in row["spans"].get("driver", ())]
    if not spans:
        return None, None
    return min(span[1] for span in spans), max(span[2] for span in spans)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
