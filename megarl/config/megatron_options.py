"""The sections `megatron` of the roles: which of megatron-core's options they may set, and which megarl sets itself.

Checked whenever a config is read, against the installed megatron-core; importable without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megarl.config.megatron_fields import ConfigClass, megatron_fields
from megarl.config.reference import in_words
from megarl.config.schema import Config
from megarl.config.sections import TrainedRole
from megarl.config.supervised import SupervisedConfig
from megarl.errors import ConfigError, nearest

_REASONS = {
    "megarl takes from the model's config.json": """
        num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size layernorm_epsilon
        normalization gated_linear_unit activation_func add_bias_linear add_qkv_bias qk_layernorm
        layernorm_zero_centered_gamma rotary_interleaved window_size window_attn_skip_freq multi_latent_attention
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent
        rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim num_moe_experts
        moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_router_topk
        moe_router_pre_softmax moe_router_score_function moe_router_num_groups moe_router_group_topk
        moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_dtype moe_router_topk_limited_devices
        softmax_scale softmax_type no_rope_freq qk_l2_norm activation_func_clamp_value glu_linear_offset
        attention_output_gate experimental_attention_variant linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads is_hybrid_model
        heterogeneous_block_specs hetereogenous_dist_checkpoint moe_latent_size
        apply_residual_connection_post_layernorm
    """,
    "megarl sets from the role's layout": """
        tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split overlap_p2p_comm batch_p2p_comm
        hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank moe_extended_tp
        tensor_parallel_num_weight_shards gtp_weight_remat_size expert_tensor_parallel_num_weight_shards
        expert_gtp_weight_remat_size num_distributed_optimizer_instances
    """,
    "megarl sets from model.dtype": """
        params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype loss_scale initial_loss_scale
        min_loss_scale loss_scale_window hysteresis
    """,
    "megarl sets from the fp8 fields of model": """
        fp8 fp8_recipe fp8_param first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag fp8_quantizer_factory fp4 fp4_recipe fp4_param
        fp4_param_gather fp4_quantizer_factory
    """,
    "megarl sets from the role's optimizer": """
        lr min_lr decoupled_lr decoupled_min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad optimizer
        decoupled_weight_decay use_distributed_optimizer optimizer_cpu_offload optimizer_offload_fraction
    """,
    "megarl sets from model.layer_spec, by which weights have their names": """
        transformer_impl moe_grouped_gemm moe_use_legacy_grouped_gemm moe_single_grouped_weight moe_single_grouped_bias
        use_transformer_engine_op_fuser use_kitchen use_kitchen_attention use_inference_optimized_layers
    """,
    "arranges a layer's weights otherwise than megarl loads and exports them": """
        moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size use_grouped_gemm_for_shared_expert
        use_grouped_gemm_for_dense_mlp mla_down_proj_fusion
    """,
    "megarl sets from model.recompute": "recompute_granularity moe_layer_recompute",
    "megarl sets from run.deterministic": "deterministic_mode",
    "megarl sets from policy.routing": "moe_enable_routing_replay",
    "megarl sets from policy.mtp": """
        mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_hybrid_override_pattern mtp_detach_heads
    """,
    "would be wrong: megarl's losses are sums that carry their denominators, and megatron-core's own terms are not": """
        calculate_per_token_loss average_in_collective dsa_indexer_loss_coeff
    """,
    "megarl has in the role's section experts: megatron-core's depend on how a batch is cut into micro-batches": """
        moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_bias_update_rate
    """,
    "would drop tokens, or fill places of experts with others, behind what megarl counts of their loads": """
        moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity
    """,
    "would make log-probs of two passes differ": """
        attention_dropout hidden_dropout moe_input_jitter_eps moe_router_force_load_balancing
    """,
    "needs micro-batches of one length, and megarl's vary": """
        variable_seq_lengths tp_comm_overlap cuda_graph_impl enable_cuda_graph external_cuda_graph cuda_graph_scope
        cuda_graph_modules
    """,
    "megarl's checkpoints cannot hold": """
        use_precision_aware_optimizer use_layer_wise_distributed_optimizer optimizer_cuda_graph
    """,
    "belongs to megatron-core's FSDP, which megarl's checkpoints and weight updates cannot read": """
        use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy
    """,
    "megarl leaves false: engines, checkpoints and other passes read the weights right after an update": """
        overlap_param_gather align_param_gather overlap_param_gather_with_optimizer_step
    """,
    "needs another schedule than megarl's": """
        overlap_moe_expert_parallel_comm delay_wgrad_compute defer_embedding_wgrad_compute
    """,
    "has no effect: weights are loaded": """
        use_cpu_initialization perform_initialization init_method_std embedding_init_method_std
        init_model_with_meta_device
    """,
}
OWNED: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Fields that no config may set, with the reason in words that follow "which"."""

_ROLES = {"policy": True, "critic": True, "reference": False}
"""Core sections that may have a section `megatron`, and whether their models are trained."""


def check_megatron_sections(config: Config | SupervisedConfig) -> None:
    """Refuse what the section `megatron` of a role cannot set; raises ConfigError as `check_megatron` does."""
    for role, is_trained in _ROLES.items():
        section = getattr(config, role, None)  # a run on given responses has two of them
        if section is not None:
            check_megatron(f"{role}.megatron", section.megatron or {}, is_trained=is_trained)
    _check_shared_attention(config)
    for entry in config.roles:
        if entry.trained is not None:
            for name in ("balance_coef", "bias_update_rate"):
                if getattr(entry.trained.experts, name) > 0:
                    keep_all_choices(entry.name, entry.trained, f"{entry.name}.experts.{name}")


def keep_all_choices(role: str, trained: TrainedRole, needed: str) -> None:
    """Refuse to drop choices of experts where `needed`, which a field is set to, is computed from all of them."""
    if (capacity := trained.megatron.get("moe_expert_capacity_factor")) is not None:
        reason = f"drops choices of experts, and {needed} needs all of them"
        raise ConfigError.of(f"{role}.megatron.moe_expert_capacity_factor", capacity, reason, allowed="left out")


def _check_shared_attention(config: Config | SupervisedConfig) -> None:
    """Refuse two attention backends in the same processes: Transformer Engine reads its choice from their environment."""
    of_policy = megatron_of(config, "policy").get("attention_backend", "auto")
    for role in config.roles:
        chosen = megatron_of(config, role.name).get("attention_backend", "auto")
        if role.layout is None and chosen != of_policy:
            section = role.section or role.name
            reason = f"the policy's '{of_policy}' rules out: both models are computed by the same processes, which choose once"
            allowed = f"'{of_policy}' unless {section}.layout is set"
            raise ConfigError.of(f"{section}.megatron.attention_backend", chosen, reason, allowed=allowed)


def megatron_of(config: Config | SupervisedConfig, role: str) -> dict[str, Any]:
    """Fields that a role's section `megatron` sets; a role that only answers and has none is computed as the policy is."""
    if role in _ROLES:
        section: dict[str, Any] | None = getattr(config, role).megatron
    else:
        section = next(entry.megatron for entry in config.roles if entry.name == role)
    return given_to("model", config.policy.megatron) if section is None else section


def check_megatron(section: str, given: Mapping[str, Any], *, is_trained: bool) -> None:
    """Refuse what `section` (such as `policy.megatron`) cannot set. Where megatron-core is not installed, as on a login node
    that only plans, names and types are left to the nodes that train.

    Raises:
        ConfigError: a name that the installed megatron-core does not have or megarl sets itself, or a value of another type.
    """
    for name, value in given.items():
        fields, path = megatron_fields(), f"{section}.{name}"
        if name in OWNED:
            raise ConfigError.of(path, value, OWNED[name], allowed="left out")
        if not fields:
            continue
        if name not in fields:
            allowed = (known for known, field in fields.items() if known not in OWNED and field.annotation is not None)
            raise ConfigError(f"{path} is not a field of megatron-core's configs{nearest(name, allowed)}; it must be left out")
        field = fields[name]
        if field.annotation is None:
            raise ConfigError.of(path, value, "is a field of a type that YAML cannot give", allowed="left out")
        if not is_trained and "model" not in field.kinds:
            raise ConfigError.of(path, value, "only a model that is trained uses", allowed="left out")
        try:
            TypeAdapter(field.annotation).validate_python(value, strict=True)
        except ValidationError:
            raise ConfigError.of(path, value, allowed=in_words(field.annotation)) from None


def given_to(kind: ConfigClass, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a section `megatron` that megatron-core's class of this kind has; all of them where it is not installed."""
    fields = megatron_fields()
    return {name: value for name, value in given.items() if not fields or kind in fields[name].kinds}
