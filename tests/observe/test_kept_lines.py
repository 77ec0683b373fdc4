"""A run goes on with its files after a crash at any byte: a torn end is cut off and told, and every other line is there."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.experience.samples_file import SamplesFile
from megarl.observe import MetricsFile, read_metrics
from megarl.observe.kept_lines import APPENDED, cut_torn_end, mend_ends
from megarl.observe.run_record import read_run
from tests.observe.recorded import write_run

CUTS = 25
ROUTING = {"policy": {"layers": [0], "loads": [[1.0, 1.0]], "entropy": [0.5]}}
ERROR = {"reward": "r", "errors": 1, "on_error": "zero", "error": "ValueError: a"}
ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "metrics": lambda step: {"reward/mean": step / 7, "time/step_s": float("nan")},
    "distributions": lambda step: {"reward": {"low": 0.0, "high": step, "counts": [1, 2]}},
    "experts": lambda step: ROUTING,
    "trace": lambda step: {"spans": {"driver": [["update", step, step + 1.5]]}},
    "reward_errors": lambda step: ERROR,
    "slow_ranks": lambda step: {"role": "policy", "rank": 3, "behind": 0.25, "state": "slow"},
    "evaluations": lambda step: {"accuracy": step / 7},
}


def written(path: Path, steps: int) -> list[bytes]:
    """The lines of a file as a run of so many steps writes it."""
    file = MetricsFile(path)
    for step in range(1, steps + 1):
        file.log(step, ROWS[path.stem](step))
    file.close()
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("name", ROWS)
def test_a_file_of_steps_that_is_cut_at_any_byte_goes_on_from_its_last_whole_line(name: str, tmp_path: Path) -> None:
    draw = random.Random(name)
    path = tmp_path / f"{name}.jsonl"
    whole = written(path, 6)
    content = b"".join(whole)
    for _ in range(CUTS):
        end = draw.randrange(len(content) + 1)
        path.write_bytes(content[:end])
        kept = content[:end].count(b"\n")
        nbytes = end - len(b"".join(whole[:kept]))
        told = mend_ends(tmp_path, [name])
        assert path.read_bytes().splitlines(keepends=True) == whole[:kept]
        assert [f"({nbytes:,} byte" in line and f"{name}.jsonl" in line for line in told] == [True] * (nbytes > 0)
        checkpoint = draw.randrange(7)
        resumed = MetricsFile(path, resume_after_step=checkpoint)
        resumed.log(checkpoint + 1, ROWS[name](checkpoint + 1))
        resumed.close()
        steps = [row["step"] for row in read_metrics(path)]
        assert steps == [*range(1, min(kept, checkpoint) + 1), checkpoint + 1]
        assert path.read_bytes().splitlines(keepends=True)[:-1] == whole[: min(kept, checkpoint)], "byte for byte"


def test_samples_that_are_cut_at_any_byte_go_on(tmp_path: Path) -> None:
    draw = random.Random(1)
    run = write_run(tmp_path / "r", steps=3)
    path = run / "samples.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    content = b"".join(whole)
    added = json.loads(whole[0]) | {"response_text": "new"}
    for _ in range(CUTS):
        end = draw.randrange(len(content) + 1)
        path.write_bytes(content[:end])
        mend_ends(run)
        SamplesFile(path, 4, 2, None).add(3, [{name: value for name, value in added.items() if name != "step"}])
        record = read_run(run)
        kept = min(content[:end].count(b"\n"), 8)
        assert path.read_bytes().splitlines(keepends=True)[:-1] == whole[:kept]
        assert [sample["step"] for sample in record.samples] == [*([1] * 4 + [2] * 4)[:kept], 3]
        assert record.samples[-1]["response_text"] == "new"
        assert record.damage == []


@pytest.mark.parametrize(
    "rest",
    [b'{"step": 4, "a"', b'{"step": 4, "a"\n', bytes(5000), bytes(5000) + b"\n", b'{"step": 4}', b"[]\n", b"\xff", b'"\n{"\n'],
)
def test_what_a_lost_block_or_half_a_write_left_is_cut_off(rest: bytes, tmp_path: Path) -> None:
    """A last line without an end that is JSON, too: nobody knows whether it goes on."""
    path = tmp_path / "metrics.jsonl"
    content = b"".join(written(path, 3))
    path.write_bytes(content + rest)
    [told] = mend_ends(tmp_path)
    nbytes = f"{len(rest):,} byte{'s' * (len(rest) != 1)}"
    assert told == f"removed, because an earlier attempt was cut off while it wrote them: the ends of metrics.jsonl ({nbytes})"
    assert path.read_bytes() == content
    assert mend_ends(tmp_path) == []


def test_files_that_are_whole_or_not_there_are_left_as_they_are(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in run.iterdir()}
    assert mend_ends(run) == []
    assert mend_ends(tmp_path / "nothing") == []
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in run.iterdir()} == before
    assert {file.stem for file in run.glob("*.jsonl")} - {"faults"} <= {*APPENDED}


def test_a_damaged_line_in_the_midst_stays_where_it_is_and_is_told_by_readers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", steps=4)
    path = run / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:5], b"half of a line\n", *lines[5:14], b"another\n", *lines[14:]])
    path.write_bytes(damaged)
    assert mend_ends(run) == []
    SamplesFile(path, 4, 2, None)
    assert path.read_bytes() == b"".join([*lines[:5], b"half of a line\n", *lines[5:8]])
    assert "line 6 is damaged" in str(read_run(run).samples.damage)


def test_a_line_longer_than_a_block_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    line = json.dumps({"step": 1, "text": "x" * 300_000}).encode() + b"\n"
    path.write_bytes(line + line + line[:-9])
    assert cut_torn_end(path) == len(line) - 9
    assert path.read_bytes() == line + line
    SamplesFile(path, 1, 1, None)
    assert path.read_bytes() == line + line
