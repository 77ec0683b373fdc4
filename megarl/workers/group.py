"""A group of training workers that share one torch.distributed world, called as one, with a deadline on every call."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import ray

from megarl.config.layout import Layout
from megarl.errors import DeadlineError, MegarlError, WorkerError


class RankGroup(Protocol):
    """The ranks of one layout as the driver calls them. `arguments` is one tuple for all ranks, or one tuple per rank."""

    name: str
    layout: Layout

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]] | tuple[Any, ...], *, phase: str, deadline_s: float
    ) -> list[Any]:
        """Results of `method` in rank order."""
        ...

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | tuple[Any, ...]) -> list[Any]:
        """Start `method` on every rank; give the answer to `wait`."""
        ...

    def wait(self, submitted: Sequence[Any], *, phase: str, deadline_s: float) -> list[Any]:
        """Results of what was submitted, in rank order."""
        ...

    def share(self, replicas: Sequence[Any]) -> list[Any]:
        """For every rank its data-parallel replica's value, as an argument of `call` and `submit`."""
        ...

    def agree(self, flag: bool) -> bool:
        """Whether `flag` is true in any process that drives this group."""
        ...


class WorkerGroup:
    """The Ray actors of one layout, in rank order."""

    def __init__(self, name: str, layout: Layout, actors: Sequence[Any], stack_folder: str) -> None:
        self.name, self.layout, self.actors, self.stack_folder = name, layout, list(actors), stack_folder

    def connect(self, *, seed: int, deadline_s: float) -> list[int]:
        """Bring up the world; returns the ranks' process ids."""
        address = wait_for([self.actors[0].address.remote()], phase=f"start of {self.name}", deadline_s=deadline_s, group=self)[
            0
        ]
        return self.call(
            "connect",
            (address, seed, deadline_s),
            phase=f"start of {self.name}",
            deadline_s=deadline_s,
        )

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]] | tuple[Any, ...], *, phase: str, deadline_s: float
    ) -> list[Any]:
        """Call `method` on every rank and wait for all of them.

        `arguments` is one tuple for all ranks, or a list with one tuple per rank. Returns results in rank order.

        Raises:
            MegarlError: a rank raised it: the user's mistake, passed on.
            WorkerError: a rank raised anything else or died; carries the rank's traceback.
            DeadlineError: a rank had not answered after `deadline_s`; names the ranks.
        """
        return self.wait(self.submit(method, arguments), phase=phase, deadline_s=deadline_s)

    def wait(self, submitted: Sequence[Any], *, phase: str, deadline_s: float) -> list[Any]:
        """Results of what was submitted, in rank order; raises as `call` does."""
        return wait_for(submitted, phase=phase, deadline_s=deadline_s, group=self)

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | tuple[Any, ...]) -> list[Any]:
        """Start `method` on every rank without waiting; give the references to `wait_for`."""
        per_rank = [arguments] * len(self.actors) if isinstance(arguments, tuple) else arguments
        return [getattr(actor, method).remote(*args) for actor, args in zip(self.actors, per_rank, strict=True)]

    def share(self, replicas: Sequence[Any]) -> list[Any]:
        """For every rank a reference to its data-parallel replica's value, each put once into the object store."""
        references = [ray.put(value) for value in replicas]
        return [references[self.layout.coords(rank).dp] for rank in range(self.layout.world_size)]

    def agree(self, flag: bool) -> bool:
        """`flag`: there is one driver."""
        return flag

    def dump_stacks(self) -> None:
        """Ask every rank for its Python stacks, even one that is stuck in a call; gives up after a few seconds."""
        os.makedirs(self.stack_folder, exist_ok=True)
        ray.wait([a.dump_stacks.remote(self.stack_folder) for a in self.actors], num_returns=len(self.actors), timeout=10)

    def kill(self) -> None:
        """End the group's processes, and no others."""
        for actor in self.actors:
            ray.kill(actor, no_restart=True)


def wait_for(references: Sequence[Any], *, phase: str, deadline_s: float, group: WorkerGroup | None = None) -> list[Any]:
    """Results of Ray references in order; the first failure ends the wait (see `WorkerGroup.call` for what it raises)."""
    rank = {reference: place for place, reference in enumerate(references)}
    pending, ends_at = list(references), time.monotonic() + deadline_s
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, ends_at - time.monotonic()))
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                raise _as_our_error(error, phase, group, rank[reference]) from error
        if not done:
            missing = sorted(rank[reference] for reference in pending)
            where = ""
            if group is not None:
                group.dump_stacks()
                where = f"; the Python stacks of its ranks are in {group.stack_folder}"
            name = f"ranks of {group.name}" if group is not None else "workers"
            raise DeadlineError(
                f"phase '{phase}' was not done after {deadline_s:.0f} s: {name} {missing} had not answered{where}"
            )
    return ray.get(list(references))


def _as_our_error(error: Exception, phase: str, group: WorkerGroup | None, rank: int) -> MegarlError:
    cause = getattr(error, "cause", None)
    if isinstance(cause, MegarlError):
        return cause
    name = f"rank {rank} of {group.name}" if group is not None else f"worker {rank}"
    return WorkerError(f"{name} failed in phase '{phase}':\n{error}")
