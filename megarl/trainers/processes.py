"""Starting what a run consists of: the cluster that its config describes, and the roles on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.config import Config
from megarl.data.plan import FlopsModel
from megarl.errors import ModelError
from megarl.megatron.options import choose_layer_spec
from megarl.models.registry import architecture_for, load_hf_config
from megarl.trainers.roles import Roles, role_specs
from megarl.workers.cluster import Cluster, GroupRequest


def check_architectures(config: Config) -> None:
    """Refuse a model folder of an architecture that megarl has no weight map for, before anything is started.

    Raises:
        ModelError: names the field, the architecture and the known ones.
    """
    critic = config.critic.init_from if config.uses_critic else None
    folders = {"model.path": config.model.path, "critic.init_from": critic, "reference.path": config.reference.path}
    for field, folder in folders.items():
        if folder is not None:
            try:
                architecture_for(load_hf_config(folder))
            except ModelError as error:
                raise ModelError(f"{field} is '{folder}': {error}") from None


def open_cluster(config: Config, requests: Sequence[GroupRequest], log_folder: str | Path) -> Cluster:
    """The cluster that `config` describes, for these groups of ranks."""
    return Cluster(
        requests,
        engines=config.rollout.engines,
        engine_tp=config.rollout.tp,
        colocated=config.resources.placement == "colocated",
        ray_address=config.resources.ray_address,
        log_folder=str(log_folder),
        start_deadline_s=config.resources.deadlines.start_s,
    )


def open_roles(config: Config, cluster: Cluster) -> Roles:
    """Start the cluster's groups of ranks; their roles are loaded one by one."""
    groups = dict(cluster.start_groups(config.run.seed))
    algorithm = config.algorithm
    return Roles(
        config,
        role_specs(config),
        groups,
        choose_layer_spec(config.model.layer_spec, cluster.platform.name),
        FlopsModel.from_hf_config(load_hf_config(config.model.path)),
        temperature=config.rollout.temperature,
        updates=config.run.steps * algorithm.mini_batches * algorithm.epochs,
    )
