"""Parameters of a role that are not trained, or updated otherwise than the rest, by patterns of the config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, ParamGroupOverride, ParamKey, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamPredicate
from torch import Tensor

from megarl.megatron.global_names import global_tensors
from megarl.megatron.options import ModelOptions, OptimizerOptions
from megarl.megatron.weights import is_value_head
from megarl.models.parameter_patterns import ParameterPatterns
from megarl.models.weight_map import WeightMap

_GROUP = "optimizer_group"
"""The attribute of a parameter with its place among `OptimizerOptions.groups`."""


def freeze(chunk: Any, options: ModelOptions, weight_map: WeightMap) -> None:
    """Leave what `options.freeze` chooses without gradients; a value head is never chosen."""
    patterns = ParameterPatterns(options.freeze)
    for name, tensor in global_tensors([chunk]):
        is_own = not isinstance(tensor, torch.nn.Parameter) or is_value_head(name, options)
        if not is_own and patterns.choose(weight_map.rule_for(name)):
            tensor.requires_grad_(False)
    embedding = getattr(chunk, "embedding", None)
    if (options.freeze or options.lora is not None) and options.recompute != "none" and embedding is not None:
        embedding.register_forward_hook(_with_gradient)


def _with_gradient(module: torch.nn.Module, inputs: Any, hidden: Tensor) -> None:
    """Layers that are computed anew get no gradients at all where none of their inputs has one."""
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden.requires_grad_(True)


def group_overrides(
    chunks: Sequence[Any], options: OptimizerOptions, model: ModelOptions, weight_map: WeightMap, config: OptimizerConfig
) -> dict[ParamKey, ParamGroupOverride]:
    """Overrides of megatron-core's optimizer for some parameters: those of the groups, beside its own (norms, biases).

    A parameter is in the first group that chooses it.
    """
    chosen = [ParameterPatterns(group.match) for group in options.groups]
    for name, tensor in global_tensors(chunks):
        if chosen and not is_value_head(name, model):
            rule = weight_map.rule_for(name)
            group_number = next((group_number for group_number, patterns in enumerate(chosen) if patterns.choose(rule)), None)
            setattr(tensor, _GROUP, group_number)
    overrides = dict(get_standard_config_overrides(config))
    for group_number, group in enumerate(options.groups):
        override: dict[str, float] = {"max_lr": options.lr * group.lr_factor, "min_lr": options.min_lr * group.lr_factor}
        if group.weight_decay is not None:
            override |= {"start_wd": group.weight_decay, "end_wd": group.weight_decay}
        overrides[ParamKey(predicate=ParamPredicate(f"group {group_number}", _member(group_number)))] = override  # type: ignore[assignment]
    return overrides


def _member(place: int) -> Any:
    return lambda parameter: getattr(parameter, _GROUP, None) == place
