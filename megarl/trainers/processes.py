"""Starting what a run consists of: the cluster that its config describes, and the roles on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from megarl import platform
from megarl.config import Config, SupervisedConfig
from megarl.data.plan import FlopsModel
from megarl.errors import ModelError
from megarl.megatron.options import choose_layer_spec
from megarl.models.registry import architecture_for, load_hf_config
from megarl.trainers.roles import POLICY, REFERENCE, Roles, RoleSpec, role_specs
from megarl.workers.cluster import Cluster, GroupRequest
from megarl.workers.group import RankGroup
from megarl.workers.spmd import SpmdGroup
from megarl.workers.torchrun import is_torchrun


def check_architectures(config: Config | SupervisedConfig) -> None:
    """Refuse a model folder of an architecture that megarl has no weight map for, before anything is started.

    Raises:
        ModelError: names the field, the architecture and the known ones.
    """
    folders = {"model.path": config.model.path, "reference.path": config.reference.path}
    if isinstance(config, Config):
        folders["critic.init_from"] = config.critic.init_from if config.uses_critic else None
        folders["reward_model.path"] = config.reward_model.path
    for field, folder in folders.items():
        if folder is not None:
            try:
                hf_config = load_hf_config(folder)
                architecture_for(hf_config)
                if hf_config.get("model_type") is None:  # the weight map does without, engines do not
                    raise ModelError("config.json has no model_type")
            except ModelError as error:
                raise ModelError(f"{field} is '{folder}': {error}") from None


def open_cluster(config: Config, requests: Sequence[GroupRequest], log_folder: str | Path) -> Cluster:
    """The cluster that `config` describes, for these groups of ranks."""
    return Cluster(
        requests,
        engines=config.rollout.engines,
        engine_tp=config.rollout.places // config.rollout.engines,
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
        choose_layer_spec(config.model.layer_spec, cluster.platform.name, config.model.fp8),
        FlopsModel.from_hf_config(load_hf_config(config.model.path)),
        temperature=config.rollout.temperature,
        updates=config.run.steps * algorithm.mini_batches * algorithm.epochs,
    )


def open_supervised_roles(config: SupervisedConfig, stack: ExitStack, log_folder: Path) -> Roles:
    """The ranks of a run without engines: under torchrun this process is one of them, else Ray starts them.

    `stack` ends what is started here.
    """
    groups: Mapping[str, RankGroup]
    if is_torchrun():
        platform_name = platform.detect().name
        group = SpmdGroup(
            POLICY,
            config.policy.layout,
            config.policy.threads_per_rank,
            seed=config.run.seed,
            deadline_s=config.resources.deadlines.start_s,
        )
        stack.callback(group.leave)
        groups = {POLICY: group}
    else:
        requests = [GroupRequest(POLICY, config.policy.layout, config.policy.threads_per_rank)]
        if config.uses_reference and config.reference.layout is not None:
            requests.append(GroupRequest(REFERENCE, config.reference.layout, None))
        cluster = Cluster(
            requests,
            engines=0,
            engine_tp=1,
            colocated=config.resources.placement == "colocated",
            ray_address=config.resources.ray_address,
            log_folder=str(log_folder),
            start_deadline_s=config.resources.deadlines.start_s,
        )
        stack.enter_context(cluster)
        groups, platform_name = cluster.start_groups(config.run.seed), cluster.platform.name
    specs = {
        POLICY: RoleSpec(config.model.path, "value" if config.has_value_head else "log_probs", config.policy),
        REFERENCE: RoleSpec(config.reference.path or config.model.path, "log_probs"),
    }
    return Roles(
        config,
        specs,
        groups,
        choose_layer_spec(config.model.layer_spec, platform_name, config.model.fp8),
        FlopsModel.from_hf_config(load_hf_config(config.model.path)),
        temperature=1.0,
        updates=config.run.steps,
    )
