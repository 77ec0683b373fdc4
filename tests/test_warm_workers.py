"""Ray's workers in tests are forked from one process, and yet differ in what must differ."""

from __future__ import annotations

import os
from typing import Any

import ray


def test_forked_workers_have_random_numbers_of_their_own(local_ray: None) -> None:
    class Worker:
        def pid_and_name(self) -> tuple[int, str]:
            return os.getpid(), ray.ObjectRef.from_random().hex()  # as objects of a worker are named

    actor: Any = ray.remote(num_cpus=0)(Worker)
    workers: list[Any] = [actor.remote() for _ in range(3)]
    pids, names = zip(*ray.get([worker.pid_and_name.remote() for worker in workers]), strict=True)
    for worker in workers:
        ray.kill(worker)
    assert len(set(pids)) == len(set(names)) == 3
