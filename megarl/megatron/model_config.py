"""megatron-core's TransformerConfig of a role, from the model's Hugging Face config and the role's options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.activations import squared_relu as fused_squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu as fused_quick_gelu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.config.fp8 import device_problem
from megarl.config.megatron_fields import ConfigClass
from megarl.config.megatron_options import given_to
from megarl.errors import ConfigError
from megarl.megatron.options import ModelOptions
from megarl.models.registry import architecture_for
from megarl.models.rope import rotary_scale
from megarl.platform import cuda_present

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def quick_gelu(gate: torch.Tensor) -> torch.Tensor:
    """megatron-core's, which it compiles: no machine without Triton can."""
    return gate * torch.sigmoid(1.702 * gate)


def gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    """GELU's approximation by tanh."""
    return torch.nn.functional.gelu(gate, approximate="tanh")


def squared_relu(hidden: torch.Tensor) -> torch.Tensor:
    """megatron-core's, which it compiles."""
    return torch.nn.functional.relu(hidden).square()


def _activation(name: str, *, fast: bool, kernel: bool) -> Any:
    """megatron-core picks its `kernel` by the function itself; torch's GELU names that of the approximation by tanh."""
    functions = {
        "silu": torch.nn.functional.silu,
        "quick_gelu": fused_quick_gelu if fast else quick_gelu,
        "gelu_tanh": torch.nn.functional.gelu if kernel else gelu_tanh,
        "squared_relu": fused_squared_relu if fast else squared_relu,
    }
    return functions[name]


def transformer_config(options: ModelOptions, hf_config: dict[str, Any]) -> TransformerConfig:
    """megatron-core's config for a Hugging Face config under `options`.

    Raises:
        ConfigError: the GPU that this process has cannot run the FP8 recipe, or a field of `options.megatron` does not go with
            this model or layer spec.
    """
    architecture = architecture_for(hf_config)
    layout = options.layout
    kwargs = {**architecture.transformer_config_kwargs(hf_config), **options.variant}
    fast, model_overrides = _is_fast(options), given_to("model", options.megatron)
    kernel = bool(model_overrides.get("bias_activation_fusion", fast) or model_overrides.get("use_te_activation_func"))
    kwargs["activation_func"] = _activation(kwargs.pop("activation"), fast=fast, kernel=kernel)
    if options.recompute != "none":
        kwargs["recompute_granularity"] = options.recompute
    if options.recompute == "full":
        kwargs |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if options.fp8 != "none":
        kwargs |= _fp8_kwargs(options)
    config_class = MLATransformerConfig if kwargs.get("multi_latent_attention") else TransformerConfig
    kwargs |= {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": DTYPES[options.dtype],
        "pipeline_dtype": DTYPES[options.dtype],
        "bf16": options.dtype == "bfloat16",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": not _is_fast(options),
        "perform_initialization": False,
        "deterministic_mode": options.deterministic,
        "variable_seq_lengths": options.padded_tokens is None,
        # With two stages the next stage is also the one before: batched, their messages would be mistaken for each other.
        "overlap_p2p_comm": layout.vpp is not None,
        "batch_p2p_comm": layout.vpp is None,
        # Losses arrive already divided by their global denominator: sums everywhere, no rescaling by megatron-core.
        "calculate_per_token_loss": True,
        **_defaults(options, has_experts="num_moe_experts" in kwargs, is_latent=config_class is MLATransformerConfig),
    }
    if "num_moe_experts" in kwargs and kwargs["add_bias_linear"]:
        kwargs["bias_dropout_fusion"] = False  # megatron-core adds the biases of experts inside them
    overrides = fields_for(config_class, options, kind="model")
    scale = 1.0
    if config_class is TransformerConfig:  # latent attention scales what it rotates by itself
        scale = rotary_scale(architecture.text_config(hf_config), kwargs["kv_channels"])
    sees = architecture.vision(hf_config) is not None
    kwargs |= _without_rotary_kernels(options, overrides, sees=sees, pairs=bool(kwargs.get("rotary_interleaved")), scale=scale)
    if options.replays_routes and overrides.get("moe_router_fusion"):
        reason = "would leave out policy.routing.replay: its kernel chooses the experts itself"
        raise ConfigError.of(f"{options.section}.moe_router_fusion", True, reason, allowed="false")
    for name in BESIDE_AUTOGRAD & {name for name, value in overrides.items() if value} if options.int4_experts else ():
        reason = "would go round the rounding of model.int4_experts: it reads weights, or adds gradients, outside autograd"
        raise ConfigError.of(f"{options.section}.{name}", overrides[name], reason, allowed="false")
    # Transformer Engine's layers are told when they are built (`build.fuse_gradient_accumulation`).
    overrides.pop("gradient_accumulation_fusion", None)
    if "experimental_attention_variant" in kwargs:  # megarl's own layers; megatron-core 0.16 asks what its own can do
        kwargs["context_parallel_size"] = 1
    try:
        config = config_class(**kwargs | overrides)
    except (ValueError, AssertionError, RuntimeError) as error:
        if not overrides:
            raise
        raise refused(options, overrides, error) from error
    config.context_parallel_size = layout.cp
    if scale != 1.0:
        scale_rotary(config, scale)
    config.windows_are_chunks = architecture.traits(hf_config).chunks
    return config


def _without_rotary_kernels(
    options: ModelOptions, overrides: Mapping[str, Any], *, sees: bool, pairs: bool, scale: float
) -> dict[str, bool]:
    """The arguments that turn kernels of rotary embeddings off, where the model is one that they would compute wrongly.

    Raises:
        ConfigError: an override asks for one of them.
    """
    reasons = []
    if sees:
        reasons.append("would give the tokens of pictures wrong angles: its kernel counts one position for each token")
    if pairs:
        reasons.append("would rotate the halves of a head against each other, but the pairs of this model are neighbours")
    if scale != 1.0:
        reasons.append(f"has no attention factor, but this model's is {scale:g}")
    if not reasons:
        return {}
    for name in ROTARY_KERNELS & {name for name, value in overrides.items() if value is True}:
        raise ConfigError.of(f"{options.section}.{name}", True, reasons[0], allowed="false")
    return dict.fromkeys(ROTARY_KERNELS, False)


def scale_rotary(config: Any, scale: float) -> None:
    """Have attention multiply cosines and sines by `scale`.

    megarl gives the rotary embedding its frequencies; the factor megatron-core's attention computes itself, from these
    attributes as 0.1 * mscale * log(factor) + 1, over the same of mscale_all_dim.
    """
    config.yarn_rotary_scaling_factor, config.yarn_mscale, config.yarn_mscale_all_dim = math.e, 10 * (scale - 1), 0.0


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Return whether a layer (global, zero-based) has experts."""
    frequency = config.moe_layer_freq
    chosen = frequency[layer] if isinstance(frequency, list) else layer % frequency == 0
    return config.num_moe_experts is not None and bool(chosen)


def refused(options: ModelOptions, given: Iterable[str], error: Exception) -> ConfigError:
    """The sentence for the user where megatron-core does not take the fields `given` of `options.megatron`."""
    why = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"{options.section} sets {', '.join(given)}, which megatron-core refuses: {why}")


def _is_fast(options: ModelOptions) -> bool:
    """Return whether layers are Transformer Engine's, which only GPUs run."""
    return options.layer_spec == "transformer_engine"


def _defaults(options: ModelOptions, *, has_experts: bool, is_latent: bool) -> dict[str, Any]:
    """Defaults that a config may change: with Transformer Engine everything fused that it has a kernel for, else nothing."""
    fast = _is_fast(options)
    defaults: dict[str, Any] = {
        "bias_dropout_fusion": fast,
        "bias_activation_fusion": fast,
        "masked_softmax_fusion": fast,
        # For latent attention megatron-core calls its kernels experimental.
        "apply_rope_fusion": fast and not is_latent,
        # It synchronises the device after every message between stages, for versions of torch that are no longer supported.
        "batch_p2p_sync": not fast,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": fast and has_experts,
        "moe_permute_fusion": fast and has_experts,
        "moe_router_fusion": fast and has_experts and not options.replays_routes,
    }
    if fast and options.recompute == "selective":
        defaults["recompute_modules"] = recompute_modules(options, has_experts=has_experts, is_latent=is_latent)
    return defaults


def recompute_modules(options: ModelOptions, *, has_experts: bool, is_latent: bool) -> list[str]:
    """Modules that Transformer Engine's layers compute anew: their attention keeps little, megatron-core's default
    recomputes it."""
    modules = ["mlp"]
    if options.fp8 == "none" or options.fp8_recipe != "delayed":  # whose scales megatron-core would learn twice
        modules += ["layernorm", *(["moe_act"] if has_experts else [])]
    return modules + (["mla_up_proj"] if is_latent else [])


NEEDS_TRANSFORMER_ENGINE = frozenset(
    {
        "apply_rope_fusion", "fused_single_qkv_rope", "gradient_accumulation_fusion", "moe_permute_fusion", "moe_router_fusion",
        "use_te_activation_func", "use_te_rng_tracker", "cpu_offloading", "fine_grained_activation_offloading",
        "fp8_dot_product_attention", "fp8_multi_head_attention",
    }
)  # fmt: skip
ROTARY_KERNELS = frozenset({"apply_rope_fusion", "fused_single_qkv_rope"})
"""Fields whose kernels of Transformer Engine know no positions on three axes, no attention factor and, in some versions, no
neighbouring pairs."""
BESIDE_AUTOGRAD = frozenset(
    {"gradient_accumulation_fusion", "delay_wgrad_compute", "use_transformer_engine_op_fuser", "moe_use_legacy_grouped_gemm"}
)
"""Fields with which layers' weights are not taken from the layer, or their gradients not given back to it."""
ENUMS = {"attention_backend": AttnBackend}


def fields_for(config_class: type, options: ModelOptions, *, kind: ConfigClass) -> dict[str, Any]:
    """The fields of `options.megatron` that `config_class` has, as megatron-core's values.

    Raises:
        ConfigError: a field needs Transformer Engine's layers, or latent attention, and this model has other ones.
    """
    known = {entry.name for entry in dataclasses.fields(config_class)}
    overrides = given_to(kind, options.megatron)
    for name, value in overrides.items():
        key = f"{options.section}.{name}"
        if name not in known:
            raise ConfigError.of(key, value, "only a model with latent attention has", allowed="left out")
        if value is True and name in NEEDS_TRANSFORMER_ENGINE and not _is_fast(options):
            reason = f"only Transformer Engine's layers have, and model.layer_spec is '{options.layer_spec}' here"
            raise ConfigError.of(key, value, reason, allowed="false")
    return {name: ENUMS[name][value] if name in ENUMS else value for name, value in overrides.items()}


def fuses_gradient_accumulation(options: ModelOptions) -> bool:
    """Return whether layers add weight gradients to the float32 buffers themselves, without a copy in between:
    Transformer Engine's,
    and on a CPU megatron-core's."""
    default = (_is_fast(options) or not cuda_present()) and not options.int4_experts
    return options.trainable and bool(options.megatron.get("gradient_accumulation_fusion", default))


def ddp_config(options: ModelOptions) -> DistributedDataParallelConfig:
    """The config by which megatron-core lays gradients into buffers and shards the optimizer over data parallelism."""
    defaults = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": _is_fast(options),
        "check_for_nan_in_grad": False,
        "fp8_param_gather": options.fp8_param,
        "reuse_grad_buf_for_mxfp8_param_ag": gathers_through_gradients(options),
    }
    return DistributedDataParallelConfig(**defaults | fields_for(DistributedDataParallelConfig, options, kind="ddp"))


def gathers_through_gradients(options: ModelOptions) -> bool:
    """Return whether updated weights travel in the gradients' buffer: megatron-core has no other way for MXFP8 weights."""
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
