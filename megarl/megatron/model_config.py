"""megatron-core's TransformerConfig of a role, from the model's Hugging Face config and the role's options."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.config.fp8 import device_problem
from megarl.errors import ConfigError
from megarl.megatron.options import ModelOptions
from megarl.models.registry import architecture_for

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ACTIVATIONS = {"silu": torch.nn.functional.silu}


def transformer_config(options: ModelOptions, hf_config: dict[str, Any]) -> TransformerConfig:
    """megatron-core's config for a Hugging Face config under `options`.

    Raises:
        ConfigError: the GPU that this process has cannot run the FP8 recipe.
    """
    architecture = architecture_for(hf_config)
    layout = options.layout
    kwargs = dict(architecture.transformer_config_kwargs(hf_config))
    kwargs["activation_func"] = ACTIVATIONS[kwargs.pop("activation")]
    if options.recompute != "none":
        kwargs["recompute_granularity"] = options.recompute
    if options.recompute == "full":
        kwargs |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if options.fp8 != "none":
        kwargs |= _fp8_kwargs(options)
    on_cuda = options.layer_spec == "transformer_engine"
    config_class = MLATransformerConfig if kwargs.get("multi_latent_attention") else TransformerConfig
    return config_class(
        **kwargs,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=DTYPES[options.dtype],
        pipeline_dtype=DTYPES[options.dtype],
        bf16=options.dtype == "bfloat16",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=not on_cuda,
        perform_initialization=False,
        deterministic_mode=options.deterministic,
        variable_seq_lengths=True,
        # With two stages the next stage is also the one before: batched, their messages would be mistaken for each other.
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        # Losses arrive already divided by their global denominator: sums everywhere, no rescaling by megatron-core.
        calculate_per_token_loss=True,
        bias_dropout_fusion=on_cuda,
        bias_activation_fusion=on_cuda,
        masked_softmax_fusion=on_cuda,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=on_cuda and "num_moe_experts" in kwargs,
    )


def ddp_config(options: ModelOptions) -> DistributedDataParallelConfig:
    """How megatron-core lays gradients into buffers and shards the optimizer over data parallelism."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        check_for_nan_in_grad=False,
        fp8_param_gather=options.fp8_param,
        reuse_grad_buf_for_mxfp8_param_ag=gathers_through_gradients(options),
    )


def gathers_through_gradients(options: ModelOptions) -> bool:
    """Whether updated weights travel in the gradients' buffer: megatron-core has no other way for MXFP8 weights."""
    return options.fp8_param and options.fp8_recipe == "mxfp8"


def _fp8_kwargs(options: ModelOptions) -> dict[str, Any]:
    if torch.cuda.is_available():
        problem = device_problem(options.fp8_recipe, torch.cuda.get_device_capability(), torch.version.cuda)
        if problem is not None:
            raise ConfigError(f"{problem}; set model.fp8 to 'none'")
    first, last = options.fp8_bf16_layers
    return {
        "fp8": options.fp8,
        "fp8_recipe": options.fp8_recipe,
        "fp8_param": options.fp8_param,
        "first_last_layers_bf16": bool(first or last),
        "num_layers_at_start_in_bf16": first,
        "num_layers_at_end_in_bf16": last,
    }
