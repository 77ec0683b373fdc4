"""The process groups of a run whose weights travel over them: how many each training rank is in, and whether that is too many.

Each engine has one, of all ranks that send to it and its own; under Gloo there are two of it (`weights/engine_group.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config.schema import Config
    from megarl.weights.plan import ReshardPlan

MOST = 64
"""Groups that a rank may be in. Under NCCL each is a communicator, made one after the other before the first update, with
buffers on the GPU; how much they take has not been measured, so this only keeps plans from having hundreds."""


@dataclass(frozen=True)
class Communicators:
    """Process groups of a training rank (least, most), which rank is in most, and the members of the largest group.

    A rank of an engine is in one.
    """

    of_a_rank: tuple[int, int]
    busiest: int
    members: int

    @classmethod
    def of(cls, plan: ReshardPlan) -> Communicators:
        """The communicators of a plan's updates over process groups."""
        groups, largest = np.zeros(plan.layout.world_size, np.int64), 0
        for engine in range(plan.target.engines):
            senders = plan.senders(engine)
            groups[senders] += 1
            largest = max(largest, len(senders))
        return cls((int(groups.min()), int(groups.max())), int(groups.argmax()), largest + plan.target.ranks)


def check_communicators(config: Config, plan: ReshardPlan) -> None:
    """Refuse a run in which a rank would be in too many process groups.

    Raises:
        ConfigError: as said.
    """
    if config.rollout.weight_transport != "process_group":
        return
    communicators = Communicators.of(plan)
    if (most := communicators.of_a_rank[1]) > MOST:
        reason = (
            f"would make rank {communicators.busiest} of the policy a member of {most} process groups, one for each engine "
            f"that it sends to, more than {MOST}; fewer and larger engines (rollout.engines, rollout.tp) or more replicas "
            "(policy.layout.dp) make it fewer"
        )
        raise ConfigError.of("rollout.weight_transport", "process_group", reason, allowed="'shared_memory'")
