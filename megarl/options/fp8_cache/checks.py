"""Checks of `rollout.kv_cache_dtype`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.engine_kinds import EMBEDDED, SGLANG, EngineCapabilities
from megarl.config.load import AnyConfig
from megarl.config.rollout import RolloutConfig
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.models.registry import load_hf_config
from megarl.models.weight_formats import engine_format
from megarl.options.fp8_cache.section import FP8, kv_cache_dtype_of

FIELD = "rollout.kv_cache_dtype"
SET_BY_IT = ("kv_cache_dtype", "quantization_param_path")
"""SGLang's arguments of the same. SGLang 0.5.23 divides by the scales of such a file, and does not multiply by them again."""
BACKENDS = ("flashinfer", "triton")
"""SGLang's kernels that read keys and values by their scales, and leave queries as they are.

Others round queries to FP8, too, and without a scale (fa3, trtllm_mha), or know of no scales (flex_attention, wave).
"""
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` of models whose keys and values are a linear layer of a norm's output, by the names that `scales.py` reads."""


def check_engines(config: Config, engine: EngineCapabilities) -> None:
    """Raise ConfigError for what keys and values in FP8 do not go with."""
    rollout = config.rollout
    if kv_cache_dtype_of(rollout) != FP8:
        return
    arguments = rollout.engine_args
    for name in SET_BY_IT:
        if name in arguments:
            raise ConfigError(f"rollout.engine_args.{name} is set by {FIELD}; remove one of the two")
    if (backend := arguments.get("attention_backend")) not in (None, *BACKENDS):
        reason = f"rounds queries too, or knows of no scales ({FIELD} is '{FP8}')"
        raise ConfigError.of("rollout.engine_args.attention_backend", backend, reason, allowed="'flashinfer' or 'triton'")
    why = ""
    if engine is not SGLANG and engine is not EMBEDDED:
        why = f"is for engines that megarl starts, and rollout.engine = '{rollout.engine}' here has none"
    elif rollout.drafts is not None:
        why = "does not go with drafts (rollout.speculative)"
    elif getattr(rollout, "disaggregation", None) is not None:
        why = "does not go with keys and values that engines hand on (rollout.disaggregation)"
    elif getattr(rollout, "sites", None) is not None:
        why = "does not go with engines of other sites (rollout.sites)"
    elif config.sends_adapters or getattr(config, "serve", None) is not None:
        why = "does not go with adapters that engines add, whose keys and values no weights of theirs bound"
    elif "load_format" in arguments:
        why = "reads the weights that a server starts with, of which there are none under rollout.engine_args.load_format"
    if why:
        raise ConfigError.of(FIELD, FP8, why, allowed="'auto'", rule=why)


def model_refusal(config: AnyConfig, sampling: RolloutConfig) -> str | None:
    """Why the keys and values of the run's model cannot be kept in FP8; None: they can. Reads the model's config.json."""
    kind = load_hf_config(config.model.path).get("model_type")
    if kind not in FAMILIES:
        return f"the model in {config.model.path} is of the family '{kind}', and it is for {', '.join(FAMILIES)}"
    served = sampling.servers.model_path
    format = engine_format(load_hf_config(served)) if served is not None else None
    if format is not None and format.name == "mxfp8":
        return f"its scales are not read of weights in MXFP8 (rollout.servers.model_path is {served})"
    return None


def check_model(config: AnyConfig) -> None:
    """Refuse a model whose keys and values have no bound that its weights say.

    Raises:
        ConfigError: names the field.
    """
    sampling = config.sampling
    if sampling is None or kv_cache_dtype_of(sampling) != FP8:
        return
    if (why := model_refusal(config, sampling)) is not None:
        raise ConfigError.of(FIELD, FP8, f"cannot be had: {why}", allowed="'auto'")
