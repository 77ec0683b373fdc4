"""The plan that a run's config implies: which engines its section `rollout` starts, and what they take sliced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.config.engine_kinds import capabilities_of
from megarl.errors import ConfigError, LayoutError, describe_value
from megarl.models.adapters import AdapterSpec, adapters_of
from megarl.models.registry import load_hf_config
from megarl.models.weight_formats import engine_format
from megarl.option_list import part
from megarl.weights.communicators import check_communicators
from megarl.weights.plan import LOAD_BYTES, ReshardPlan, bucket_of_load, plan_reshard
from megarl.weights.sglang_targets import EngineTarget

if TYPE_CHECKING:
    from megarl.config import AnyConfig
    from megarl.config.rollout import RolloutConfig
    from megarl.config.schema import Config
    from megarl.weights.placement import Placement

ITEMSIZE = {"bfloat16": 2, "float32": 4}
NOT_PLANNED = {
    "dp_size": 1, "pp_size": 1, "attn_cp_size": 1, "moe_dp_size": 1, "dcp_size": 1, "moe_dense_tp_size": None,
    "moe_a2a_backend": "none", "enable_dp_lm_head": None, "ep_num_redundant_experts": None, "enable_eplb": None,
    "quantization": None,
}  # fmt: skip
"""SGLang's arguments that put weights elsewhere than `targets.py` says, or add others, and a value with which they do not."""


def plan_of_run(config: Config, platform: str = "cuda") -> ReshardPlan:
    """The plan of a run's updates, of all weights or of adapters alone, by its config and the model's `config.json`.

    `platform`: where ranks run.

    Raises:
        ConfigError: the engines take no weights, or have an argument that puts them where no plan knows.
        LayoutError: the policy's layout or the engines cannot hold the model.
        ModelError: the model's config.json cannot be read.
    """
    hf_config, engine_model = load_hf_config(config.model.path), config.rollout.servers.model_path
    format = engine_format(load_hf_config(str(engine_model))) if engine_model is not None else None
    to = target_of_run(config.rollout)
    return plan_reshard(
        hf_config,
        config.policy.layout,
        to,
        itemsize=ITEMSIZE[config.model.dtype],
        bucket_bytes=bucket_of_load(LOAD_BYTES[platform], to),
        format=format,
        predicts=config.syncs_prediction,
        lora=sent_adapters(config),
    )


def sent_adapters(config: AnyConfig) -> AdapterSpec | None:
    """The adapters that engines are sent, which keep the model's own weights; None: they are sent weights.

    Raises:
        ModelError: the model's config.json, or the adapters that training starts from, cannot be read.
    """
    return adapters_of(config.policy, load_hf_config(config.model.path), "policy.lora") if config.sends_adapters else None


def check_transport(config: Config, placement: Placement, platform: str = "cuda") -> None:
    """Refuse a way of the weights to SGLang's servers that the placement does not have.

    Raises:
        ConfigError: shared memory would have to reach a machine without a training rank, or relays are not installed; or a rank
            would be in too many groups.
    """
    if config.rollout.engine != "sglang":
        return
    if config.rollout.weight_transport == "process_group":
        check_communicators(config, plan_of_run(config, platform))
    elif config.rollout.weight_transport == "shared_memory" and len(placement.machines) > 1:
        relays = part("transports", "relay_plan", "rollout.weight_transport = 'shared_memory' on several machines")
        relays.check_relays(plan_of_run(config, platform), placement)


def target_of_run(rollout: RolloutConfig) -> EngineTarget:
    """The engines of a run. `rollout.tp` counts all ranks of one; `engine_args` may set `ep_size` and `attn_dp_size`.

    Raises:
        ConfigError, LayoutError: as `plan_of_run`.
    """
    weights = capabilities_of(rollout).weights
    if weights == "nothing":
        raise ConfigError(f"rollout.engine is '{rollout.engine}', which takes no weights; it must be 'sglang' or 'embedded'")
    if weights == "folder":
        raise ConfigError("rollout.weight_transport is 'folder', by which weights travel as a folder, without a reshard plan")
    return replace(engine_target(rollout.tp, rollout.engine_args), engines=rollout.engines + rollout.lent_engines)


def engine_target(ranks: int, engine_args: Mapping[str, Any]) -> EngineTarget:
    """One SGLang engine of `ranks` ranks, started with these arguments beside `tp_size`.

    Raises:
        ConfigError, LayoutError: as `plan_of_run`.
    """
    arguments = dict(engine_args)
    if arguments.pop("enable_dp_attention", False):
        arguments["attn_dp_size"] = arguments.pop("dp_size", 1)
    for name, harmless in NOT_PLANNED.items():
        if arguments.get(name) not in (None, False, harmless):
            raise ConfigError(
                f"rollout.engine_args.{name} is {describe_value(arguments[name])}, but where the engine's weights lie then is "
                "not known to reshard plans; leave it out"
            )
    ep, dp = (_size(arguments, name) for name in ("ep_size", "attn_dp_size"))
    if ranks % dp:
        raise LayoutError(f"rollout.engine_args.attn_dp_size is {dp}; it must divide rollout.tp={ranks}")
    return EngineTarget(tp=ranks // dp, ep=ep, dp=dp)


def _size(arguments: dict[str, Any], name: str) -> int:
    size = arguments.get(name, 1)
    if type(size) is not int or size < 1:
        raise ConfigError(f"rollout.engine_args.{name} is {describe_value(size)}; it must be a whole number above 0")
    return size
