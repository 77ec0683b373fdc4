"""Readers of run folders as functions of bytes: the first byte says which file of a small run has the rest as its content."""

from __future__ import annotations

import argparse
import functools
import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.errors import MegarlError, written_out
from megarl.runs.owner import this_process
from megarl.system.terminal import SafeStream
from tests.observe.recorded import write_run

FILES = {
    b"m": "metrics.jsonl", b"s": "samples.jsonl", b"t": "trace.jsonl", b"d": "distributions.jsonl", b"e": "experts.jsonl",
    b"f": "faults.jsonl", b"r": "reward_errors.jsonl", b"v": "evaluations.jsonl", b"S": "summary.json", b"M": "machine.json",
    b"l": "slow_ranks.jsonl", b"E": "end.json", b"P": "placement.json", b"c": "config.yaml",
    b"O": "owner.json", b"N": "engines.json",
}  # fmt: skip
EXPERTS = {"step": 1, "policy": {"layers": [0], "loads": [[1.0, 1.0]], "entropy": [0.5]}}
REWARD_ERROR = {"step": 1, "reward": "r", "errors": 2, "on_error": "zero", "error": "ValueError", "traceback": "x"}
TIMES = {
    "time/step_s": 2.0,
    "time/generate_s": 1.0,
    "rollout/samples": 4,
    "response/tokens_mean": 3.0,
    "speed/tokens_per_s": 9.0,
}


def reader(read: Callable[[Path], None], room: Callable[[], Path]) -> Callable[[bytes], None]:
    """`read` of a run's folder in `room`, in which one file is what the bytes say."""

    def run(data: bytes) -> None:
        folder = whole_run(room())
        name = FILES.get(data[:1], "samples.jsonl")
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        try:
            (folder / name).write_bytes(data[1:])
            read(folder)
        finally:
            if before is None:
                (folder / name).unlink(missing_ok=True)
            else:
                (folder / name).write_bytes(before)

    return run


def whole_run(room: Path) -> Path:
    """A small run in `room`, made if it is not there."""
    folder = room / "run"
    if not (folder / "metrics.jsonl").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_run(folder, steps=2)
        rows = [{"step": step, "reward/mean": 0.5, **TIMES} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "experts.jsonl").write_text(json.dumps(EXPERTS) + "\n")
        (folder / "reward_errors.jsonl").write_text(json.dumps(REWARD_ERROR) + "\n")
        machine = {"machine": {"cores": 2, "memory_bytes": 2**30}, "versions": {"megarl": "1"}, "gpus": 1, "gpu": "H"}
        (folder / "machine.json").write_text(json.dumps(machine))
        (folder / "placement.json").write_text('{"nodes": [1, 2]}')
        (folder / "owner.json").write_text(json.dumps(asdict(this_process())))
        engine = {"number": 0, "node": "a", "node_id": "b", "stage": "up"}
        (folder / "engines.json").write_text(json.dumps({"nodes": {"b": "a"}, "engines": [engine]}))
    return folder


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from megarl.cli.commands import build_parser

    return build_parser()


def said(arguments: list[str]) -> None:
    """Give the command line these arguments; it must end with 0 or 2 and print nothing that steers a terminal."""
    from megarl.cli.commands import reported

    output = io.StringIO()
    with redirect_stdout(SafeStream(output)), redirect_stderr(SafeStream(output)):  # type: ignore[type-var]
        parsed = _parser().parse_args(arguments)
        code = reported(lambda: int(parsed.run(parsed)))
    assert code in (0, 2)
    text = output.getvalue()
    assert written_out(text) == text
    text.encode()


def report(folder: Path) -> None:
    """`megarl report --trace`."""
    out = folder.parent / "page.html"
    said(["report", str(folder), "--out", str(out), "--trace", str(folder.parent / "trace.json")])


def compare(folder: Path) -> None:
    """`megarl compare` with the same run, undamaged."""
    other = folder.parent / "other"
    if not other.exists():
        write_run(other, steps=2, lr=1.0)
    said(["compare", str(folder), str(other)])


def samples(folder: Path) -> None:
    """`megarl samples`, in every order and by role."""
    said(["samples", str(folder), "--count", "9"])
    said(["samples", str(folder), "--best", "--grep", "a"])
    said(["samples", str(folder), "--worst", "--role", "assistant", "--turn", "1"])


def status(folder: Path) -> None:
    """What is told of a run at a glance, and of its restarts; by `--against` and `--calibrate`, too."""
    from megarl.config import Config
    from megarl.observe.run_record import read_run
    from megarl.observe.run_state import RunState
    from megarl.observe.run_status import axes, run_status
    from megarl.planning.calibration import read_run as read_times
    from megarl.planning.measured import read_measured

    run = read_run(folder)
    json.dumps(run_status(run, now=1e9))
    axes(run.metrics)
    settings: Any = SimpleNamespace(run_folder=folder, run=SimpleNamespace(steps=3, name="a"), trainer="rl")
    assert RunState(settings).restarts >= 0
    config: Any = object.__new__(Config)
    with suppress(MegarlError):
        read_times(folder)
    with suppress(MegarlError):
        read_measured(folder, config)


def watch(folder: Path) -> None:
    """`megarl report --watch`: rows that were written since, and files that are exchanged."""
    from megarl.observe.live import RunFollower, new_rows
    from megarl.observe.report import as_inert_json

    follower = RunFollower([folder])
    as_inert_json(new_rows(follower.runs(), [(0, 0)]))
    with (folder / "samples.jsonl").open("a") as more:
        more.write("\n{}\n")
    as_inert_json(new_rows(follower.runs(), [(1, 1)]))


def resume(folder: Path) -> None:
    """What a run does with its own files when it goes on: afterwards every line is whole, and none is of a later step."""
    from megarl.experience.samples_file import SamplesFile
    from megarl.observe.kept_lines import APPENDED, cut_torn_end, mend_ends
    from megarl.observe.metrics import MetricsFile, read_metrics

    copy = folder.parent / "resumed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    mend_ends(copy, (*APPENDED, "evaluations"))
    cut_torn_end(copy / "faults.jsonl")
    for name in APPENDED:
        if name == "samples":
            SamplesFile(copy / "samples.jsonl", 1, 1, None).add(2, [{"sample_id": "a", "group_id": "b"}])
        else:
            file = MetricsFile(copy / f"{name}.jsonl", resume_after_step=1)
            file.log(2, {"a": 1.0})
            file.close()
        content = (copy / f"{name}.jsonl").read_bytes()
        assert content.endswith(b"\n")
        assert json.loads(content.splitlines()[-1])["step"] == 2
        rows = read_metrics(copy / f"{name}.jsonl") if name == "metrics" else []
        assert [row["step"] for row in rows if row["step"] > 1] in ([], [2])
    assert mend_ends(copy) == []


def begin(folder: Path) -> None:
    """What reads the small files of a run that was there before: its owner, its summary if it is finished, its engines."""
    from megarl.observe import read_summary
    from megarl.options.elastic_engines.requests import ask_to_leave
    from megarl.runs.owner import owner_in

    with suppress(ValueError):
        owner = owner_in((folder / "owner.json").read_bytes())
        assert (folder / f".owner.json.after-{owner.token}").parent == folder
        assert owner.fate(this_process()) in (True, False, None)
        str(owner).encode()
    with suppress(MegarlError):
        json.dumps(read_summary(folder / "summary.json"))
    with suppress(MegarlError):
        ask_to_leave(folder, "a", 0.0)


READERS = {
    "report": report, "compare": compare, "samples": samples, "status": status, "watch": watch, "resume": resume,
    "begin": begin,
}  # fmt: skip
WORDS = (
    *(
        b'"step"',
        b'"sample_id"',
        b'"group_id"',
        b'"training"',
        b'"rewards"',
        b'"reward"',
        b'"log_probs"',
        b'"turns"',
        b'"media"',
    ),
    *(
        b'"spans"',
        b'"driver"',
        b'"policy 0"',
        b'"counts"',
        b'"loads"',
        b'"served"',
        b'"row"',
        b'"wait_s"',
        b'"eval"',
        b'"gates"',
    ),
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"1e308", b"9" * 400, b"-1", b"true", b"null", b"[]", b"{}", b'""', b"\n"),
    *(b'{"step": 1, ', b"[" * 300, b'"\\ud800"', b"\\u0000", b"\\u001b]0;x\\u0007", b"\\u202e", b"\xff\xfe", b"\0" * 9),
    *(
        b"policy: ",
        b"layout: ",
        b"data: ",
        b"media_folder: ",
        b"answer_key: ",
        b"rewards: ",
        b"2020-01-01",
        b"!!binary ",
        b": ",
    ),
)


def seeds(room: Path) -> tuple[bytes, ...]:
    """The files of a small run, each behind the byte that names it."""
    folder = whole_run(room)
    return tuple(kind + (folder / name).read_bytes()[:3000] for kind, name in FILES.items() if (folder / name).exists())
