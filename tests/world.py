"""Small worlds of processes for tests: Gloo between them, megarl's platform installed, torch imported once per session.
The tests of a file share the `world` fixture (tests/conftest.py); each call gets a fresh process group and megatron state."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests import dispatchers

REPOSITORY = Path(__file__).resolve().parents[1]
if str(REPOSITORY) not in sys.path:  # workers start with this path and import tests.world by name
    sys.path.insert(0, str(REPOSITORY))
GRACE_S = 10.0
"""How long the other ranks may still answer once one has failed (they may be waiting for it in a collective)."""


class WorldFailure(Exception):
    """A rank raised, died or did not answer in time; the message holds its traceback or everybody's Python stacks."""


class World:
    """Up to `size` processes that run functions together. Started on first use, restarted after a failure left ranks stuck."""

    def __init__(self, size: int, threads: int = 1, first: str | None = None) -> None:
        """`first` is a module that each rank imports before megarl's platform is installed; ranks then start on their own."""
        self.size = size
        self._threads, self._first = threads, first
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="megarl-world-")
        self._calls = 0

    def call(self, function: Callable, *args: Any, size: int | None = None, timeout_s: float = 120.0) -> list[Any]:
        """Run `function(rank, world_size, *args)` in ranks 0..size-1 and return their values in rank order.

        Args:
            function: a module-level function of a module that the workers can import (test modules are).
            args: anything that pickles; tensors travel by value.
            size: how many ranks take part, each seeing a world of that size; all of them by default.
            timeout_s: deadline for the whole call, including the start of processes that were not running yet.

        Raises:
            WorldFailure: a rank raised (its traceback is in the message), died, or missed the deadline.
        """
        size = size or self.size
        if size > self.size:
            raise ValueError(f"size is {size}, this world has {self.size} ranks")
        while len(self._ranks) < size:
            self._ranks.append(_Rank(len(self._ranks), self._threads, self._first, Path(self._folder.name)))
        self._calls += 1
        rendezvous = str(Path(self._folder.name) / f"rendezvous-{self._calls}")
        payload = pickle.dumps((function, args))
        for rank in self._ranks[:size]:
            rank.connection.send((payload, size, rendezvous, timeout_s, sys.path))
        answers = self._collect(self._ranks[:size], time.monotonic() + timeout_s)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        if len(answers) < size:
            missing = [rank for rank in self._ranks[:size] if rank.number not in answers]
            stacks = [f"rank {rank.number} did not answer; it was in\n{rank.stacks()}" for rank in missing]
            self._kill()
            failures += stacks
        if failures:
            raise WorldFailure(f"{function.__name__} in a world of {size}:\n" + "\n".join(failures))
        return [pickle.loads(answers[rank][1]) for rank in range(size)]

    def close(self) -> None:
        """End every process of this world; call it once, at the end."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        deadline = time.monotonic() + GRACE_S
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._folder.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _collect(self, ranks: list[_Rank], deadline_s: float) -> dict[int, tuple[bool, Any]]:
        """Return rank number -> (ok, pickled value or error text) of everyone who answered in time."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {rank.connection: rank.number for rank in ranks}
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left_s):
                number = waiting.pop(connection)
                try:
                    answers[number] = connection.recv()
                except EOFError:
                    process = self._ranks[number].process
                    process.join(GRACE_S)
                    answers[number] = (False, f"the process ended without an answer (exit code {process.exitcode})")
                if not answers[number][0]:
                    deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        if any(not self._ranks[number].process.is_alive() for number in answers):
            self._kill()
        return answers

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.connection.close()
        self._ranks = []


def run_world(size: int, function: Callable, *args: Any, timeout_s: float = 120.0, threads: int = 1) -> list[Any]:
    """Run `function(rank, world_size, *args)` in a world of its own; for tests that must not share one. See `World.call`."""
    with World(size, threads) as world:
        return world.call(function, *args, timeout_s=timeout_s)


class _Rank:
    """One worker process and the parent's end of its pipe."""

    def __init__(self, number: int, threads: int, first: str | None, folder: Path) -> None:
        self.number = number
        self._stacks_path = folder / f"stacks-{number}-{time.monotonic_ns()}"
        context = _context(threads, first)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(number, theirs, str(self._stacks_path), first))
        with _environment(_rank_environment(threads)):
            self.process.start()
        theirs.close()

    def stacks(self) -> str:
        """Return the Python stacks of every thread of a process that hangs (empty if it is beyond answering)."""
        if self.process.is_alive() and self.process.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, signal.SIGUSR1)
            self._await_stacks()
        return self._stacks_path.read_text() if self._stacks_path.exists() else "(it had not started)"

    def _await_stacks(self) -> None:
        """Wait until the process has written its stacks: the file is not empty and grows no more."""
        deadline, size = time.monotonic() + GRACE_S, 0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, size = size, self._stacks_path.stat().st_size if self._stacks_path.exists() else 0
            if size == before > 0:
                return


def _rank_environment(threads: int) -> dict[str, str]:
    from megarl.platform.cpu import CpuPlatform

    return CpuPlatform().worker_env(threads) | {"PYTHONPATH": str(REPOSITORY)}


def _context(threads: int, first: str | None) -> Any:
    """How ranks start: forked from a server that has imported megatron once (ten seconds for each rank otherwise).

    That server has one thread, its imports and its environment for good, so that ranks with others start on their own.
    """
    if threads != 1 or first is not None:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.world_imports"])
    with _environment(_rank_environment(threads)):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(rank: int, connection: Connection, stacks_path: str, first: str | None) -> None:
    """The worker's main loop: receive a call, run it in a fresh process group, answer."""
    stacks_file = open(stacks_path, "w")  # noqa: SIM115  (lives as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
    if first is not None:
        importlib.import_module(first)
    from megarl import platform

    platform.install()
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if message is None:
            return
        payload, size, rendezvous, timeout_s, path = message
        sys.path.extend(entry for entry in path if entry not in sys.path)
        try:
            function, args = pickle.loads(payload)
            with _process_group(rank, size, rendezvous, timeout_s):
                answer = (True, pickle.dumps(function(rank, size, *args)))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


@contextlib.contextmanager
def _process_group(rank: int, size: int, rendezvous: str, timeout_s: float) -> Iterator[None]:
    """A default Gloo group for one call; afterwards neither torch nor megatron remembers it."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield
        torch.distributed.barrier()
    finally:
        _forget_megatron_state()
        torch.distributed.destroy_process_group()
        dispatchers.let_graphs_go()
        # Models are reference cycles that hold their groups, and each group has a thread that wakes ten times a second.
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc alone has it; other tests need the memory
            ctypes.CDLL(None).malloc_trim(0)


def _forget_megatron_state() -> None:
    """Undo what megatron keeps in module globals, where this process has imported it."""
    loaded = {name: sys.modules.get(f"megatron.core.{name}") for name in _MODULES_WITH_STATE}
    if any(module is None for module in loaded.values()):
        return
    loaded["parallel_state"].destroy_model_parallel()
    loaded["num_microbatches_calculator"].unset_num_microbatches_calculator()
    loaded["tensor_parallel.random"].get_cuda_rng_tracker().reset()
    loaded["transformer.moe.moe_utils"].get_moe_layer_wise_logging_tracker().clear()


_MODULES_WITH_STATE = (
    "parallel_state",
    "num_microbatches_calculator",
    "tensor_parallel.random",
    "transformer.moe.moe_utils",
)
