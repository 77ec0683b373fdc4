"""The ranks of a torchrun world as a group: every rank runs the same driver and answers its own calls.

The driver's decisions follow from the config and the data alone, so all ranks make the same calls in the same order;
results are gathered, and a rank's exception is raised on every rank.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple

from megarl.config.layout import Layout
from megarl.errors import ConfigError, MegarlError, WorkerError
from megarl.observe.run_state import RankCondition
from megarl.workers.rank_actor import start_rank
from megarl.workers.rank_calls import RankCalls

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SpmdGroup:
    """This process's rank, called as `WorkerGroup` calls Ray actors. Deadlines are those of torch.distributed."""

    def __init__(self, name: str, layout: Layout, threads: int | None, *, seed: int, deadline_s: float) -> None:
        """Join the world that torchrun started.

        Raises:
            ConfigError: the layout has another number of ranks than torchrun started.
        """
        self.name, self.layout = name, layout
        world_size, self.rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        if world_size != layout.world_size:
            raise ConfigError(
                f"policy.layout has {layout.world_size} ranks, but torchrun started {world_size} processes; "
                "the two must be the same number"
            )
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._worker = start_rank(name, self.rank, layout, threads or max(1, cores), int(os.environ.get("LOCAL_RANK", "0")))
        self.platform = self._worker.platform.name
        self._worker.connect(None, seed, deadline_s)

    def call(self, method: Callable[[RankCalls, *Ts], T], *arguments: *Ts, phase: str, deadline_s: float) -> list[T]:
        """Call `method` on this rank and gather every rank's result (see `WorkerGroup.call` for what is raised)."""
        return self.wait(self._outcome(method.__name__, arguments), phase=phase, deadline_s=deadline_s)

    def submit(self, method: Callable[[RankCalls, *Ts], object], per_rank: Sequence[tuple[*Ts]]) -> list[Any]:
        """Call `method` on this rank, at once; what it returned or raised is gathered by `wait`."""
        return self._outcome(method.__name__, per_rank[self.rank])

    def _outcome(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        try:
            return [getattr(self._worker, method)(*arguments), None]
        except MegarlError as error:
            return [None, error]
        except Exception:  # noqa: BLE001 - raised again on every rank by wait
            return [None, WorkerError(f"rank {self.rank} of {self.name} failed in '{method}':\n{traceback.format_exc()}")]

    def wait(self, submitted: Sequence[Any], *, phase: str, deadline_s: float) -> list[Any]:
        """Every rank's result in rank order; raises what the first failing rank raised."""
        import torch

        outcomes: list[Any] = [None] * self.layout.world_size
        torch.distributed.all_gather_object(outcomes, list(submitted))
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]

    def per_rank(self, replicas: Sequence[Any]) -> list[Any]:
        """For every rank its data-parallel replica's value."""
        return [replicas[self.layout.coords(rank).dp] for rank in range(self.layout.world_size)]

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank; every rank must ask."""
        import torch

        flags: list[bool | None] = [None] * self.layout.world_size
        torch.distributed.all_gather_object(flags, flag)
        return any(flags)

    def progress(self) -> tuple[int, int]:
        """See `RankGroup.progress`; of this rank."""
        return self._worker.progress()

    def states(self) -> list[RankCondition]:
        """None: torchrun watches the others."""
        return []

    def leave(self) -> None:
        """Leave torch.distributed's world."""
        import torch

        torch.distributed.destroy_process_group()
