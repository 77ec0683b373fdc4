"""The optimizer of a role: megatron-core's distributed Adam and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer import Adam, CPUAdam, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl import platform
from megarl.errors import ConfigError
from megarl.megatron.chosen_parameters import group_overrides
from megarl.megatron.global_names import global_tensors
from megarl.megatron.model_config import DTYPES, fields_for, gathers_through_gradients
from megarl.megatron.muon import add_muon, is_matrix
from megarl.megatron.optimizer_state import BY_MUON, adams, parts_of
from megarl.megatron.options import ModelOptions, OptimizerOptions, has_transformer_engine
from megarl.megatron.weights import is_value_head
from megarl.models.weight_map import WeightMap
from megarl.platform.gloo import LARGE_BYTES
from megarl.platform.peer_memory import open_to_peers


def build_optimizer(
    chunks: Sequence[torch.nn.Module], options: OptimizerOptions, model: ModelOptions, weight_map: WeightMap
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer over DDP-wrapped `chunks` of `model` and its scheduler, whose unit is one update."""
    # Without gradients, shards of float32 weights are leaves: the offloading optimizer takes nothing else.
    with torch.no_grad():
        config = optimizer_config(on_this_platform(options), model)
        overrides = group_overrides(chunks, options, model, weight_map, config)
        optimizer = get_megatron_optimizer(config, list(chunks), overrides, use_gloo_process_groups=False)
    if not platform.cuda_present():
        for adam in adams(optimizer):  # one pass over weights and moments in place of ten: a third of the time
            for group in adam.param_groups:
                group["fused"] = True
        _open_buffers_to_peers(chunks)
    if options.name == "muon":
        named = ((tensor, name) for name, tensor in global_tensors(chunks) if not is_value_head(name, model))
        rules = {tensor: weight_map.rule_for(name) for tensor, name in named}
        matrices = {tensor: rule for tensor, rule in rules.items() if is_matrix(rule)}  # frozen ones are in no buffer
        for tensor in matrices:
            setattr(tensor, BY_MUON, True)
        add_muon(parts_of(optimizer), matrices, options)
    scheduler = schedule_of(optimizer, options)
    return optimizer, scheduler


def schedule_of(optimizer: Any, options: OptimizerOptions) -> OptimizerParamScheduler:
    """The learning rate of every update, the first of which is number 1; `optimizer` has `param_groups`.

    It rises to `lr`, which update `warmup_steps` has (or the first one), and would be `min_lr` one update behind the last:
    no update of a run that decays to 0 is lost.
    """
    peak = max(options.warmup_steps, 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr if options.schedule != "constant" else options.lr,
        lr_warmup_steps=peak,
        lr_decay_steps=max(options.total_steps, peak) + 1,
        lr_decay_style=options.schedule,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def place_in_schedule(scheduler: OptimizerParamScheduler, updates_per_step: int) -> dict[str, int]:
    """State of the schedule for a checkpoint: the updates so far, and how many of them make a step of the run."""
    return {"num_steps": scheduler.num_steps, "updates_per_step": updates_per_step}


def continue_schedule(scheduler: OptimizerParamScheduler, saved: Mapping[str, int], updates_per_step: int) -> None:
    """Go to the place that `place_in_schedule` gave, in the schedule of the config in force.

    Where steps have another number of updates now, that is the place of the same step.
    """
    scheduler.num_steps = round(saved["num_steps"] * updates_per_step / saved.get("updates_per_step", updates_per_step))
    scheduler.step(0)


def _open_buffers_to_peers(chunks: Sequence[torch.nn.Module]) -> None:
    """Let the ranks that sum gradients and gather weights read each other's."""
    for chunk in chunks:
        ddp: Any = chunk
        for buffer in ddp.buffers + ddp.expert_parallel_buffers:
            group = buffer.data_parallel_group
            if buffer.data_parallel_world_size > 1:
                for data in (buffer.grad_data, buffer.param_data):
                    if data is not None and data.nbytes >= LARGE_BYTES:
                        open_to_peers(data, group, buffer)


def optimizer_config(options: OptimizerOptions, model: ModelOptions) -> OptimizerConfig:
    """megatron-core's config of the optimizer that `options` describe, for a model built from `model`."""
    offloads = options.offload_fraction > 0
    defaults = {
        "lr": options.lr,
        "min_lr": options.min_lr,
        "weight_decay": options.weight_decay,
        "adam_beta1": options.betas[0],
        "adam_beta2": options.betas[1],
        "adam_eps": options.eps,
        "clip_grad": options.clip_grad,
        "bf16": model.dtype == "bfloat16",
        "params_dtype": DTYPES[model.dtype],
        "use_distributed_optimizer": True,
        "fp8_recipe": model.fp8_recipe if model.fp8 != "none" else None,
        "reuse_grad_buf_for_mxfp8_param_ag": gathers_through_gradients(model),
        "optimizer_cpu_offload": offloads,
        "optimizer_offload_fraction": options.offload_fraction,
        # Offloading takes this code path for its gradients; all state stays in float32.
        "use_precision_aware_optimizer": offloads,
    }
    return OptimizerConfig(**defaults | fields_for(OptimizerConfig, model, kind="optimizer"))


def on_this_platform(options: OptimizerOptions) -> OptimizerOptions:
    """`options` without offloading where there is no GPU: all state is in main memory there.

    Raises:
        ConfigError: there is a GPU, but not the Transformer Engine without which megatron-core does not offload.
    """
    if not platform.cuda_present():
        return replace(options, offload_fraction=0.0)
    if options.offload_fraction and not has_transformer_engine():
        raise ConfigError(
            f"optimizer.offload_fraction is {options.offload_fraction}, but megatron-core offloads only with "
            "transformer_engine, which cannot be imported here; it must be 0"
        )
    return options


def describe_optimizer(options: OptimizerOptions) -> str:
    """Name the Adam that computes the updates, as megatron-core finds it: Transformer Engine's, apex's or torch's, in
    this order."""
    if options.name == "muon":
        return f"Muon for the matrices of layers, {_full_name(Adam)} for the rest"
    share = on_this_platform(options).offload_fraction
    if not share:
        return _full_name(Adam)
    on_cpu = f"{_full_name(CPUAdam)} in main memory for {share:.0%} of the weights"
    return on_cpu if share == 1 else f"{on_cpu}, {_full_name(Adam)} for the rest"


def _full_name(adam: type) -> str:
    return f"{adam.__module__}.{adam.__name__}"
