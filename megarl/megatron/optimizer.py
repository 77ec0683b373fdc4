"""The optimizer of a role: megatron-core's distributed Adam and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.megatron.model_config import DTYPES
from megarl.megatron.options import OptimizerOptions


def build_optimizer(
    chunks: Sequence[torch.nn.Module], options: OptimizerOptions, dtype: str
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer over DDP-wrapped `chunks` and its scheduler, whose unit is one update."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            clip_grad=options.clip_grad,
            bf16=dtype == "bfloat16",
            params_dtype=DTYPES[dtype],
            use_distributed_optimizer=True,
        ),
        list(chunks),
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr if options.schedule != "constant" else options.lr,
        lr_warmup_steps=options.warmup_steps,
        lr_decay_steps=max(options.total_steps, options.warmup_steps + 1),
        lr_decay_style=options.schedule,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
