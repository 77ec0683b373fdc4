"""Starting what a run consists of: the cluster that its config describes, and the roles on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from megarl.config import AnyConfig
from megarl.config.engine_kinds import capabilities_of
from megarl.errors import ModelError
from megarl.megatron.options import choose_layer_spec
from megarl.models.flops import FlopsModel
from megarl.models.registry import architecture_for, load_hf_config, use_architecture
from megarl.option_list import functions
from megarl.planning.roles import role_shape
from megarl.runs.training_side import POLICY
from megarl.supervise.child_run import is_watched
from megarl.system.hub import CachedModel
from megarl.system.torchrun import is_torchrun
from megarl.system.user_code import absolute_name
from megarl.weights.placement import Placement
from megarl.workers.cluster import Cluster, GroupRequest
from megarl.workers.group import RankGroup
from megarl.workers.role_specs import role_specs
from megarl.workers.roles import Roles, group_requests
from megarl.workers.spmd import SpmdGroup


def check_architectures(config: AnyConfig) -> None:
    """Refuse a model folder of an architecture that megarl has no weight map for, before anything is started.

    Raises:
        ModelError: names the field, the architecture and the known ones.
    """
    use_architecture(config.model.architecture)
    for field, folder in config.model_folders.items():
        try:
            hf_config = load_hf_config(folder)
            architecture_for(hf_config)
            if hf_config.get("model_type") is None:  # the weight map does without, engines do not
                raise ModelError("config.json has no model_type")
        except ModelError as error:
            raise ModelError(f"{field} is '{folder}': {error}") from None


def own_architecture(config: AnyConfig) -> str | None:
    """The import path of the user's own architecture, as any process can import it."""
    return absolute_name(config.model.architecture) if config.model.architecture is not None else None


def open_cluster(config: AnyConfig, requests: Sequence[GroupRequest], log_folder: str | Path) -> Cluster:
    """The cluster that `config` describes, for these groups of ranks."""
    rollout = config.sampling
    come = rollout is not None and rollout.further_engines is not None  # engines, when there is room for them
    folders = {*config.model_folders.values()}
    if rollout is not None and rollout.servers.model_path is not None:
        folders.add(rollout.servers.model_path)
    return Cluster(
        requests,
        engines=rollout.engines if rollout is not None and not come else 0,
        engine_tp=rollout.places // rollout.engines if rollout is not None else 1,
        room=rollout.places if rollout is not None and come else 0,
        colocated=config.resources.placement == "colocated",
        lent=rollout.lent_engines if rollout is not None else 0,
        over_nodes=rollout is not None and capabilities_of(rollout).over_nodes,
        ray_address=config.resources.ray_address,
        log_folder=str(log_folder),
        start_deadline_s=config.resources.deadlines.start_s,
        architecture=own_architecture(config),
        models=[model for folder in folders if (model := CachedModel.at(folder)) is not None],
        fewer=next(filter(None, (of_run(config) for of_run in functions("recovery", "placed_fewer"))), None),
    )


def cluster_ahead(config: AnyConfig, stack: ExitStack) -> Cluster | None:
    """The run's cluster, whose Ray comes up while rows are read: each takes about 5 s. `stack` ends it.

    Only in a process that is watched over, as the command starts it; and not for a run that is finished.
    """
    folder = Path(config.run_folder)
    if not is_watched() or (folder / "summary.json").exists():
        return None
    cluster = open_cluster(config, group_requests(config), folder / "logs")
    stack.callback(cluster.shutdown)
    cluster.begin()
    return cluster


def open_groups(
    config: AnyConfig, stack: ExitStack, log_folder: Path, tell: Callable[[Placement], None]
) -> Mapping[str, RankGroup]:
    """The ranks of a run without engines: under torchrun this process is one of them, else Ray starts them.

    `stack` ends what is started here; `tell` is told where Ray has room for it.
    """
    if not is_torchrun():
        cluster = stack.enter_context(open_cluster(config, group_requests(config), log_folder))
        tell(cluster.placement)
        return cluster.start_groups(config.run.seed)
    group = SpmdGroup(
        POLICY,
        config.policy.layout,
        config.policy.threads_per_rank,
        seed=config.run.seed,
        deadline_s=config.resources.deadlines.start_s,
    )
    stack.callback(group.leave)
    return {POLICY: group}


def open_roles(config: AnyConfig, groups: Mapping[str, RankGroup]) -> Roles:
    """The roles of a run on ranks that have started; they are loaded one by one."""
    return Roles(
        config,
        role_specs(config),
        groups,
        choose_layer_spec(config.model.layer_spec, groups[POLICY].platform, config.model.fp8, config.model.dtype),
        FlopsModel.of(role_shape(config.roles[0])),
        sampling=config.sampling,
        updates=config.run.steps * config.optimizer_steps_per_step,
    )
