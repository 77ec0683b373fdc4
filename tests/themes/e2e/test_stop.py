"""A warned run saves and leaves in time, with an exit code of its own, and goes on from there as if nothing had been."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megarl.config import Config
from megarl.observe import read_metrics
from megarl.runs.stop import StopRequest
from tests.themes.e2e.processes import start_megarl, wait_for_step
from tests.warm_workers import WarmWorkers


def steps_of(folder: Path) -> list[int]:
    metrics = folder / "metrics.jsonl"
    return [int(row["step"]) for row in read_metrics(metrics)] if metrics.exists() else []


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [(signal.SIGUSR1, "SIGUSR1", 75), pytest.param(signal.SIGINT, "Ctrl-C", 130, marks=pytest.mark.exhaustive)],
)
def test_a_warned_run_saves_leaves_and_is_continued(
    tiny_config: Callable[..., Config],
    warm_workers: WarmWorkers,
    tmp_path: Path,
    number: signal.Signals,
    name: str,
    code: int,
) -> None:
    config = tiny_config(**{"run.steps": 1000, "run.name": "warned", "data.eval": None})
    folder = Path(config.run_folder)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    arguments = ["train", str(tmp_path / "run.yaml")]
    run = start_megarl(*arguments, environment=warm_workers.environment)
    try:
        wait_for_step(run, folder, 2)
        run.send_signal(number)
        _, said = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            run.kill()
    last = steps_of(folder)[-1]
    assert run.returncode == code, said
    assert "Task was destroyed" not in said
    assert f"megarl: stopped by {name} after step {last} of 1000; run.resume=auto continues from" in said
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{last:06d}"]
    resumed = start_megarl(*arguments, "run.resume=auto", f"run.steps={last + 1}", environment=warm_workers.environment)
    _, said = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, said
    assert steps_of(folder) == list(range(1, last + 2))


@pytest.mark.exhaustive
def test_a_second_ctrl_c_leaves_at_once_and_quietly(
    tiny_config: Callable[..., Config], warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    reward = tmp_path / "slow.py"
    reward.write_text("import time\n\n\ndef slow(samples):\n    time.sleep(5)\n    return [0.0] * len(samples)\n")
    rewards = [{"name": f"{reward}:slow"}]
    config = tiny_config(**{"run.steps": 1000, "run.name": "left", "data.eval": None, "rewards": rewards})
    folder = Path(config.run_folder)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    run = start_megarl("train", str(tmp_path / "run.yaml"), environment=warm_workers.environment)
    try:
        wait_for_step(run, folder, 1)
        time.sleep(1)  # the second step waits for its rewards
        run.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            run.kill()
    assert run.returncode == 130, said
    lines = said.splitlines()
    assert lines[-1].startswith("megarl: interrupted after step 1 of 1000; there is no checkpoint in "), said
    assert "Task was destroyed" not in said
    assert "Traceback" not in said


@pytest.mark.exhaustive
def test_a_run_whose_terminal_is_closed_saves_and_leaves(
    tiny_config: Callable[..., Config], warm_workers: WarmWorkers, tmp_path: Path
) -> None:
    config = tiny_config(**{"run.steps": 1000, "run.name": "closed", "data.eval": None})
    folder = Path(config.run_folder)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    ours, terminal = os.openpty()
    run = start_megarl("train", str(tmp_path / "run.yaml"), environment=warm_workers.environment, terminal=terminal)
    os.close(terminal)
    reading = threading.Thread(target=read_to_the_end, args=(ours,), daemon=True)
    reading.start()
    try:
        wait_for_step(run, folder, 2)
        os.close(ours)  # the kernel sends SIGHUP
        assert run.wait(timeout=120) == 75
    finally:
        if run.poll() is None:
            run.kill()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step_{steps_of(folder)[-1]:06d}"]
    assert not (folder / "faults.jsonl").exists()


def read_to_the_end(terminal: int) -> None:
    """Read what is shown, so that nobody waits for room."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def test_what_nohup_starts_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.received is None
        signal.signal(signal.SIGHUP, lambda *_: None)
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.received == "SIGHUP"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_signal_interrupts_and_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest() as stop:
        assert stop.received is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_first_ctrl_c_is_noted_once_there_is_a_step_to_lose_and_told_once() -> None:
    told = threading.Event()
    with StopRequest() as stop:
        stop.tell = told.set
        with pytest.raises(KeyboardInterrupt):  # while processes start there is nothing to save
            signal.raise_signal(signal.SIGINT)
        assert stop.received is None
        assert not told.is_set()
        stop.has_steps = True
        signal.raise_signal(signal.SIGINT)
        assert stop.received == "Ctrl-C"
        assert told.wait(timeout=10)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_run_in_another_thread_than_the_main_one_needs_no_signals() -> None:
    entered = []

    def enter() -> None:
        with StopRequest() as stop:
            entered.append(stop.received)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [None]
