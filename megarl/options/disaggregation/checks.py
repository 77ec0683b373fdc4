"""Checks of `rollout.disaggregation`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.engine_kinds import SGLANG, EngineCapabilities
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.disaggregation.section import disaggregation_of

FIELD = "rollout.disaggregation"
SET_BY_IT = ("disaggregation_mode", "disaggregation_transfer_backend", "disaggregation_bootstrap_port")
"""SGLang's arguments that the section sets."""
DATA_PARALLEL = ("dp_size", "attn_dp_size", "enable_dp_attention")


def check_engines(config: Config, engine: EngineCapabilities) -> None:
    """Raise ConfigError for what engines that only prefill or only decode do not go with."""
    rollout, disaggregation = config.rollout, disaggregation_of(config.rollout)
    for name in SET_BY_IT:
        if name in rollout.engine_args:
            raise ConfigError(f"rollout.engine_args.{name} is set by {FIELD}; remove it")
    if disaggregation is None:
        return
    if rollout.engines != disaggregation.engines:
        reason = f"contradicts the {disaggregation.prefill} + {disaggregation.decode} engines of {FIELD}"
        raise ConfigError.of("rollout.engines", rollout.engines, reason, allowed=f"{disaggregation.engines}")
    if config.resources.placement != "separate":
        remedy = f"set resources.placement to 'separate', or {FIELD} to null"
        raise ConfigError.needs(FIELD, "engines with devices of their own", remedy)
    why, of_dp = "", [name for name in DATA_PARALLEL if rollout.engine_args.get(name) not in (None, False, 1)]
    if engine is not SGLANG:
        why = "asks for SGLang's servers that megarl starts, and rollout.engine = "
        why += f"'{rollout.engine}' has none" if rollout.engine != "sglang" else "'sglang' here asks some that run already"
    elif rollout.lent_engines:
        why = "does not go with engines that are lent the trainer's GPUs (rollout.schedule.lent_engines)"
    elif rollout.further_engines is not None:
        why = "does not go with engines that come and go (rollout.max_engines)"
    elif getattr(config, "serve", None) is not None:
        why = "is not for `megarl serve`, whose clients ask each engine for whole responses"
    elif config.sends_adapters:
        why = "does not go with engines that add adapters themselves (policy.lora.sync = 'adapters')"
    elif rollout.drafts is not None:
        why = "does not go with drafts (rollout.speculative.algorithm)"
    elif of_dp:
        why = f"does not go with data parallelism inside an engine (rollout.engine_args.{of_dp[0]})"
    if why:
        raise ConfigError.of(FIELD, disaggregation.model_dump(mode="json"), why, allowed="null", rule=why)
