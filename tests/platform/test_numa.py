"""A rank stays on the cores beside its GPU, and never takes cores that it was not given; on made-up machines."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.platform import cuda, numa
from megarl.platform.cpu import CpuPlatform
from megarl.platform.cuda import CudaPlatform
from megarl.platform.numa import bind_to, cores_near, cores_of
from tests.world import World

GPU = "0000:3b:00.0"
OF_NODE = {0: "0-3,8-11\n", 1: "4-7,12-15\n"}


def machine(root: Path, numa_node: str | None) -> Path:
    """sysfs of two NUMA nodes, and a GPU at one of them."""
    for node, cores in OF_NODE.items():
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
        (root / f"devices/system/node/node{node}/cpulist").write_text(cores)
    (root / "bus/pci/devices" / GPU).mkdir(parents=True)
    if numa_node is not None:
        (root / "bus/pci/devices" / GPU / "numa_node").write_text(numa_node + "\n")
    return root


@pytest.mark.parametrize(
    ("numa_node", "cores"),
    [
        ("0", {0, 1, 2, 3, 8, 9, 10, 11}),
        ("1", {4, 5, 6, 7, 12, 13, 14, 15}),
        ("-1", set()),
        ("2", set()),
        ("", set()),
        (None, set()),
    ],
)
def test_cores_near_a_gpu_are_those_of_its_node(tmp_path: Path, numa_node: str | None, cores: set[int]) -> None:
    assert cores_near(GPU, machine(tmp_path, numa_node)) == cores
    assert cores_near("0000:ff:00.0", tmp_path) == frozenset()


def test_lists_of_cores() -> None:
    assert cores_of("0-2,7,9-10\n") == {0, 1, 2, 7, 9, 10}
    assert cores_of("\n") == frozenset()


class Threads:
    """The affinities of a process's threads, in the place of the kernel's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, of_thread: dict[int, set[int]]) -> None:
        self.of_thread, self.folder = {0: next(iter(of_thread.values())), **of_thread}, folder
        for thread in of_thread:
            (folder / str(thread)).mkdir()
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(self.of_thread[thread]))
        monkeypatch.setattr(os, "sched_setaffinity", self.set)

    def set(self, thread: int, cores: set[int]) -> None:
        if thread not in self.of_thread:
            raise ProcessLookupError
        self.of_thread[thread] = set(cores)


def test_every_thread_is_bound_to_near_cores_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(tmp_path, monkeypatch, {11: {0, 1, 4, 5}, 12: {0, 1, 4, 5}, 13: {5}, 14: {1}})
    assert bind_to(frozenset({4, 5, 6, 7}), tmp_path) == {4, 5}
    assert {thread: threads.of_thread[thread] for thread in (11, 12, 13, 14)} == {11: {4, 5}, 12: {4, 5}, 13: {5}, 14: {1}}


@pytest.mark.parametrize("near", [{6, 7}, set(), {0, 1, 2, 3}, {0, 1}])
def test_a_process_with_no_near_cores_or_only_these_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: set[int]
) -> None:
    threads = Threads(tmp_path, monkeypatch, {11: {0, 1}, 12: {1}})
    assert bind_to(near, tmp_path) == frozenset()
    assert threads.of_thread == {0: {0, 1}, 11: {0, 1}, 12: {1}}


def test_a_real_process_can_be_bound_and_its_threads_inherit_it() -> None:
    given = os.sched_getaffinity(0)
    if len(given) < 2:
        pytest.skip("one core only")
    before = {int(task.name): os.sched_getaffinity(int(task.name)) for task in numa.TASKS.iterdir()}
    try:
        assert bind_to({min(given)}) == {min(given)}
        assert os.sched_getaffinity(0) == {min(given)}
    finally:
        for thread, cores in before.items():
            os.sched_setaffinity(thread, cores)


def test_a_gpu_is_found_by_its_place_on_the_bus_and_a_cpu_binds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: place if gpu == 3 else None)
    monkeypatch.setattr(cuda, "cores_near", lambda address: asked.append(address) or frozenset({1, 2}))
    monkeypatch.setattr(cuda, "bind_to", lambda near: near)
    assert CudaPlatform().bind_to_device(3) == {1, 2}
    assert asked == [GPU]
    assert CpuPlatform().bind_to_device(3) == frozenset()


def threads_beside(rank: int, world_size: int, near: set[int]) -> tuple[int, str]:
    """Threads of a rank that had two, and what it says, if these are the cores beside its GPU."""
    from megarl.workers.rank import Rank

    place: Any = SimpleNamespace(bind_to_device=lambda gpu: near if gpu == 3 else None)
    own: Any = SimpleNamespace(platform=place, gpu=3, rank=2, name="policy")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            Rank._stay_near_the_gpu(own)
        return torch.get_num_threads(), said.getvalue()
    finally:
        torch.set_num_threads(before)


def test_a_rank_has_no_more_threads_than_cores_beside_its_gpu_and_says_so(world: World) -> None:
    [(threads, said)] = world.call(threads_beside, {5}, size=1)
    assert (threads, said) == (1, "rank 2 of policy is bound to the 1 cores of its GPU's NUMA node, with 1 threads\n")
    assert world.call(threads_beside, set(), size=1) == [(2, "")]
