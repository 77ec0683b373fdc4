"""Samples stay in their file: what is new is read on, and a file that was exchanged is read anew."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import DataError
from megarl.observe import growing_file, sample_file
from megarl.observe.sample_file import SampleFile


def lines(numbers: range) -> str:
    return "".join(json.dumps(sample(number)) + "\n" for number in numbers)


def sample(step: int) -> dict[str, Any]:
    return {"step": step, "sample_id": "a", "group_id": "b", "response_ids": list(range(200))}


def steps(samples: SampleFile) -> list[int]:
    return [sample["step"] for sample in samples]


def test_what_is_new_is_read_on_and_a_line_that_is_being_written_later(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    samples = SampleFile(file)
    assert (len(samples), steps(samples)) == (0, [])
    whole = lines(range(3, 4))
    file.write_text(lines(range(3)) + whole[:20])
    samples.read_on()
    assert steps(samples) == [0, 1, 2]
    with file.open("a") as more:
        more.write(whole[20:] + lines(range(4, 6)))
    assert steps(samples) == [0, 1, 2]
    samples.read_on()
    assert steps(samples) == [0, 1, 2, 3, 4, 5]
    assert [one["step"] for one in samples[4:]] == [4, 5]
    assert (samples[-1]["step"], samples[1]["step"], samples[9:]) == (5, 1, [])
    with pytest.raises(IndexError):
        samples[6]


def test_a_file_that_was_put_back_is_read_anew(tmp_path: Path) -> None:
    """As a run does that begins again at its checkpoint: another file of the same name, which may be longer."""
    file, other = tmp_path / "samples.jsonl", tmp_path / "other.jsonl"
    file.write_text(lines(range(3)))
    samples = SampleFile(file)
    other.write_text(lines(range(10, 15)))
    other.replace(file)
    samples.read_on()
    assert steps(samples) == [10, 11, 12, 13, 14]
    file.write_text(lines(range(20, 22)))
    with pytest.raises(DataError, match="has changed while it was read"):
        list(samples)
    samples.read_on()
    assert steps(samples) == [20, 21]


def test_samples_take_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(lines(range(1000)))
    tracemalloc.start()
    try:
        samples = SampleFile(file)
        # other threads of this process allocate too
        readers = [tracemalloc.Filter(True, file.__file__) for file in (growing_file, sample_file)]
        of_readers = tracemalloc.take_snapshot().filter_traces(readers)
    finally:
        tracemalloc.stop()
    held = sum(trace.size for trace in of_readers.traces)
    assert len(samples) == 1000
    assert held < 0.05 * file.stat().st_size
