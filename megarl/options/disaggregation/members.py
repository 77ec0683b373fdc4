"""Engines that prefill and engines that decode, brought together when they start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from megarl.config import Config
from megarl.options.disaggregation.pairing import Pairing
from megarl.options.disaggregation.section import disaggregation_of
from megarl.workers.cluster import Cluster
from megarl.workers.rollouts import Rollouts


def start(config: Config, cluster: Cluster, rollouts: Rollouts, say: Callable[[str], None] | None, stack: ExitStack) -> None:
    """Pair the engines of a run that is disaggregated, until `stack` is left; all of them start as in any other run."""
    disaggregation = disaggregation_of(config.rollout)
    if disaggregation is not None:
        stack.callback(Pairing(rollouts.scheduler, disaggregation.prefill).close)
