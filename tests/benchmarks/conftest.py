"""Runs a benchmark in this process at a size that a test has time for, and looks at the JSON that it writes."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measured_code import MEASURES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def read_strictly(path: Path) -> Any:
    """The JSON in `path`; NaN and infinities, which are none, are an error."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{path.name} has {name} in it")

    return json.loads(path.read_text(), parse_constant=refuse)


def at(found: Any, path: str) -> Any:
    """The value at a path of keys and numbers, such as `runs:0:step_s`."""
    for key in path.split(":"):
        found = found[int(key) if isinstance(found, list) else key]
    return found


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Benchmarks set torch's threads and seed for their process."""
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(random)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`measured("step", "--steps", "1", PROMPTS=2)`: what the benchmark writes, with other constants."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def run(name: str, *arguments: str, out: str = "--out", numbers: tuple[str, ...] = (), **constants: Any) -> Any:
        module, file = importlib.import_module(name), tmp_path / f"{name}.json"
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *arguments, out, str(file)])
        assert not module.main()
        found = read_strictly(file)
        if name in MEASURES:
            assert found["code"].keys() == {f"benchmarks/{name}.py", *MEASURES[name]}
        for path in numbers:
            assert math.isfinite(at(found, path)), path
        return found

    return run
