"""Adapters that SGLang's servers (0.5.23) add themselves: which they can, exactly, and the arguments that make room for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.errors import ConfigError, EngineError, describe_value
from megarl.models.registry import architecture_for, load_hf_config
from megarl.options.lora.section import OUTPUT
from megarl.options.lora.weight_map import Lora, layer_shapes

SERVED = ("llama", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe")
"""Families whose servers were compared with the reference. Others have other layers, or widths that SGLang's memory for
adapters does not know (lora/utils.py, get_hidden_dim)."""
_LAYER = re.compile(rf"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)|{OUTPUT}")
ROOM = 2
"""Places for adapters in a server: the policy's, and one that stays empty, which SGLang wants for requests without adapters."""
_OWN = ("enable_lora", "max_lora_rank", "lora_target_modules", "lora_paths", "max_loras_per_batch", "max_loaded_loras")
_REFUSED = {
    "enable_lora_overlap_loading": "loads adapters beside the requests that need them",
    "experts_shared_outer_loras": "is of adapters of experts",
    "lora_use_virtual_experts": "is of adapters of experts",
    "uno_lora_path": "is another way of serving adapters",
    "enable_dp_attention": "has servers load adapters in each replica by itself",
    "quantization": "changes the weights that adapters are added to",
}


def check_adapters(config: Config, lora: Lora, platform: str) -> None:
    """Refuse adapters that SGLang's servers would not add, or not exactly.

    Raises:
        ConfigError: names the field, and that `policy.lora.sync` may be 'merged'.
    """
    arguments = config.rollout.engine_args
    for name in _OWN:
        if name in arguments:
            raise ConfigError(f"rollout.engine_args.{name} is set by policy.lora; remove it")
    for name, reason in _REFUSED.items():
        if arguments.get(name):
            raise _refused(f"rollout.engine_args.{name} = {describe_value(arguments[name])}, which {reason}")
    backend = arguments.get("lora_backend")
    if platform == "cpu" and backend not in (None, "torch_native"):
        raise ConfigError.of("rollout.engine_args.lora_backend", backend, "needs a GPU", allowed="'torch_native'")
    if config.rollout.drafts is not None:
        raise _refused("rollout.speculative.algorithm other than 'none', whose drafts are made without adapters")
    if (why := refusal(config.model.path, lora)) is not None:
        raise _refused(why)


def refusal(model_path: str | Path, lora: Lora) -> str | None:
    """Why SGLang's servers cannot add these adapters to the model exactly; None: they can."""
    config = load_hf_config(model_path)
    architecture = architecture_for(config)
    if architecture.name not in SERVED:
        return f"a model of the family '{architecture.name}' (they add adapters to {', '.join(SERVED)})"
    for layer in filter(lora.has_adapter, layer_shapes(architecture.weight_map(config), architecture.rows_together(config))):
        if not _LAYER.fullmatch(layer):
            return f"adapters of '{layer}' (policy.lora.targets; they add them to attention, dense MLPs and the output layer)"
    return None


def _refused(what: str) -> ConfigError:
    return ConfigError(f"policy.lora.sync is 'adapters', which SGLang's servers do not do with {what}; it may be 'merged'")


def adapter_arguments(lora: Lora, model_path: str | Path, device: str) -> Mapping[str, Any]:
    """SGLang's arguments by which a server has room for adapters of this rank beside these layers.

    Raises:
        EngineError: the server would not add them exactly.
    """
    if (why := refusal(model_path, lora)) is not None:
        raise EngineError(str(_refused(why)))
    weight_map = architecture_for(config := load_hf_config(model_path)).weight_map(config)
    modules = {layer.rsplit(".", 1)[-1] for layer in filter(lora.has_adapter, layer_shapes(weight_map, None))}
    chosen = {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": sorted(modules),
        "max_loras_per_batch": ROOM,
    }
    return chosen | ({"lora_backend": "torch_native"} if device == "cpu" else {"enable_weights_cpu_backup": True})
