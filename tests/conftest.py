"""Fixtures that every room shares. The world of processes is started by the first test that asks for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from megarl.option_list import OPTIONS

# Before torch is imported. Tests' models are tiny: a second thread computes nothing sooner, and where cores are busy every
# operator waits for it (tests/options/lora/test_peft_folder.py beside two others on two cores: 34 s, with two threads 313 s).
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from tests.warm_workers import WarmWorkers  # noqa: E402
from tests.world import World  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--parity-report docs/evidence/parity.md` writes what tests/themes/parallel measured into that document."""
    parser.addoption("--parity-report", type=Path, default=None, help="document that gets the parity matrix's table")


REASON_CHARACTERS = 3000
"""Characters of a failure that is told though the test passed later, of its end."""
STARTED_PROCESSES = {"world", "parity_world", "warm_workers", "sglang_engine"}
"""Fixtures that start other processes: who asks for one is slow, and need not be marked as such."""


@cache
def _imports(file: Path) -> tuple[frozenset[str], frozenset[Path]]:
    """The options that a file of tests imports, and the modules of `tests` that it imports."""
    text = file.read_text()
    options, files = re.findall(r"\bmegarl\.options\.(\w+)", text), set[Path]()
    for module, imported in re.findall(r"^\s*from (tests(?:\.\w+)*) import ([\w, ]+)", text, re.MULTILINE):
        for name in [module, *(f"{module}.{one.strip()}" for one in imported.split(","))]:
            files.add(Path(__file__).parent.parent / f"{name.replace('.', '/')}.py")
    return frozenset(options), frozenset(path for path in files if path.is_file())


def imported_options(file: Path) -> set[str]:
    """The options that a file of tests imports, itself or by modules of `tests`."""
    options, seen, waiting = set[str](), {file}, [file]
    while waiting:
        of_file, modules = _imports(waiting.pop())
        options |= of_file
        waiting += modules - seen
        seen |= modules
    return options


def pytest_report_header() -> str:
    return f"megatron-core {version('megatron-core')}, torch {version('torch')}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files that import an option which this installation does not have."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_test and imported_options(collection_path) - {*OPTIONS} else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that was told that it asks for an option which is not there, in an installation without one."""
    try:
        yield
    except Exception as error:
        sentence = re.search(r"[\w.`, ]+ needs the option (\w+), which this installation does not have", str(error))
        if sentence is None or sentence[1] in OPTIONS:
            raise
        pytest.skip(sentence[0])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need an option which this installation does not have."""
    needed = {name for marker in item.iter_markers("needs_option") for name in marker.args}
    if missing := needed - {*OPTIONS}:
        pytest.skip(f"needs the option {min(missing)}, which this installation does not have")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Complete the marks that `make test-quick` and `make test` choose by (pyproject.toml says what they mean)."""
    for item in items:
        if STARTED_PROCESSES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell why a test failed that passed when it was run again: it is to be mended all the same."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("_", f"run again: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext[-REASON_CHARACTERS:])


@pytest.fixture(autouse=True)
def _no_given_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of pytest-xdist finds a width of 80 in its environment, which no test asked for."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Four processes under Gloo that the distributed tests of a file share; use `world.call(..., size=2)` for fewer.

    They are forked in 0.2 s. Held from file to file they would keep what those left in them: together some gigabytes.
    """
    with World(4) as shared:
        yield shared


@pytest.fixture(scope="session")
def warm_workers() -> Iterator[WarmWorkers]:
    """What Ray's workers are forked from; runs that a test starts as processes use it by its `environment`."""
    with WarmWorkers() as shared:
        yield shared


@pytest.fixture(scope="session")
def _shared_ray(warm_workers: WarmWorkers) -> Iterator[ExitStack]:
    with ExitStack() as ray_until_the_end:
        yield ray_until_the_end


@pytest.fixture
def local_ray(_shared_ray: ExitStack, warm_workers: WarmWorkers) -> None:
    """Ray that every run of the session joins instead of starting its own; begun anew where a test has ended it."""
    import ray

    if ray.is_initialized():
        return
    # as for a Ray that a run starts itself: idle workers that no actor of a run could take, and reports that nobody reads
    os.environ |= {"RAY_prestart_worker_first_driver": "0", "RAY_task_events_report_interval_ms": "0"}
    settings = {"include_dashboard": False, "object_store_memory": 512 * 2**20, "log_to_driver": False}
    with pytest.MonkeyPatch.context() as patched:  # an absolute path, which Ray appends to a folder of its own
        patched.setattr(ray._private.ray_constants, "SETUP_WORKER_FILENAME", str(Path(__file__).with_name("warm_setup.py")))
        ray.init(address="local", num_cpus=8, runtime_env={"py_executable": warm_workers.python}, **settings)
    _shared_ray.callback(ray.shutdown)
