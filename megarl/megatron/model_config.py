"""megatron-core's TransformerConfig of a role, from the model's Hugging Face config and the role's options."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.options import ModelOptions
from megarl.models.registry import architecture_for

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ACTIVATIONS = {"silu": torch.nn.functional.silu}


def transformer_config(options: ModelOptions, hf_config: dict[str, Any]) -> TransformerConfig:
    """megatron-core's config for a Hugging Face config under `options`."""
    architecture = architecture_for(hf_config)
    layout = options.layout
    kwargs = dict(architecture.transformer_config_kwargs(hf_config))
    kwargs["activation_func"] = ACTIVATIONS[kwargs.pop("activation")]
    if options.recompute != "none":
        kwargs["recompute_granularity"] = options.recompute
    if options.recompute == "full":
        kwargs |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    on_cuda = options.layer_spec == "transformer_engine"
    return TransformerConfig(
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
        variable_seq_lengths=True,
        # Losses arrive already divided by their global denominator: sums everywhere, no rescaling by megatron-core.
        calculate_per_token_loss=True,
        bias_dropout_fusion=on_cuda,
        bias_activation_fusion=on_cuda,
        masked_softmax_fusion=on_cuda,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        moe_token_dispatcher_type="alltoall",
    )
