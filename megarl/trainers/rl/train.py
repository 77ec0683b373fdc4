"""A run of reinforcement learning from its config: what the loop in `core` is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.core import loop
from megarl.core.protocols import Placed, Processes
from megarl.core.steps import RlRun
from megarl.experience.inputs import RlInputs
from megarl.option_list import functions
from megarl.runs.owner import owned
from megarl.runs.resuming import refuse_changes
from megarl.runs.training_side import POLICY
from megarl.supervise.child_run import is_restart
from megarl.trainers.inputs import read_inputs
from megarl.trainers.start import cluster_ahead, open_cluster, open_roles
from megarl.weights.run_plan import check_transport
from megarl.workers.cluster import Cluster
from megarl.workers.roles import group_requests
from megarl.workers.rollouts import Rollouts


def train(config: Config) -> dict[str, Any]:
    """Run `config` to its last step and return the summary that is also in the run folder's `summary.json`.

    Raises:
        MegarlError: anything the user can mend, as one sentence.
    """
    with owned(config), ExitStack() as stack:  # what a checkpoint refuses once rows are read is refused before Ray, too
        is_told_to_resume = refuse_changes(config) is not None and not is_restart()
        return loop.train(open_run(config, None if is_told_to_resume else cluster_ahead(config, stack)))


def open_run(config: Config, cluster: Cluster | None = None) -> RlRun:
    """A run of `config` whose rows are read; entering it starts its processes. `cluster`: one that was begun before."""
    return RlRun(config, read_inputs, partial(start_processes, begun=cluster))


def start_processes(
    config: Config,
    inputs: RlInputs,
    stack: ExitStack,
    logs: str | Path,
    *,
    doing: Callable[[str], None],
    say: Callable[[str], None] | None,
    placed: Callable[[Placed], None],
    begun: Cluster | None = None,
) -> Processes:
    """Start Ray, unless the cluster was `begun`, engines and roles, as `StartProcesses` says; they load at the same time."""
    doing("Ray")
    cluster = stack.enter_context(begun or open_cluster(config, group_requests(config), logs))
    placed(cluster.placement)
    if cluster.wanted is cluster.asked:  # a run that goes on with less had all of it before
        check_transport(config, cluster.placement, cluster.platform.name)
    judge_ahead = partial(inputs.rewards.begin, by_branch=config.rewards_by_branch)
    rollouts = Rollouts(config, cluster, inputs.tokenizer, inputs.episodes, say, judge_ahead)
    stack.callback(rollouts.close)
    doing("ranks")
    starting = rollouts.begin_start()
    recovery = next(filter(None, (start(config, cluster, say) for start in functions("recovery", "start_spares"))), None)
    coming = next(filter(None, (start(config, cluster, rollouts, say, stack) for start in functions("members", "start"))), None)
    roles = open_roles(config, cluster.start_groups(config.run.seed))
    if rollouts.takes_turns:  # engines size their caches by what is free, and sleep before anything is loaded
        doing("engines")
        rollouts.finish_start(starting, roles)
    doing(POLICY)
    roles.load(POLICY)
    for role in config.roles[1:]:
        doing(role.name)
        roles.load(role.name)
    if not rollouts.takes_turns:
        doing("engines")
        rollouts.finish_start(starting, roles)
    if coming is not None:
        coming.wait_for_first()
    return Processes(roles, rollouts, cluster.platform.name, recovery and recovery(roles, rollouts))
