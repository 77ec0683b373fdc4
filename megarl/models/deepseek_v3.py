"""DeepSeek-V3, Kimi-K2, Moonlight: latent attention, sigmoid routing with a correction bias, shared experts, dense layers.

`num_nextn_predict_layers` says whether there is a layer for multi-token prediction (`prediction_layer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, moe
from megarl.models.architecture import HFConfig, SglangFacts
from megarl.models.hf_fields import refuse, refuse_biases, size
from megarl.models.packings import FP8_BLOCK, Copy
from megarl.models.prediction_layer import behind_the_decoder
from megarl.models.rope import Rope, refuse_partial
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap

LATENT_NORM_EPS = 1e-6
"""transformers norms the latents with it, whatever `rms_norm_eps` says: Moonlight's other norms have 1e-5."""

READ_BY_SGLANG = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Fields that SGLang 0.5.23 reads and transformers does not have, with the only values that there are."""


@dataclass(frozen=True)
class LatentSizes:
    """Multi-head latent attention. `q_rank` is None where queries have no latent; head dimensions are without and with rope."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @classmethod
    def from_hf(cls, hf_config: HFConfig) -> LatentSizes:
        """Read a config.

        Raises:
            ModelError: a field is missing or no positive integer.
        """
        fields = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        q_rank = None if hf_config.get("q_lora_rank") is None else size(hf_config, "q_lora_rank")
        return cls(q_rank, *(size(hf_config, field) for field in fields))


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """Arguments of MLATransformerConfig.

    Raises:
        ModelError: biases, another router than V3's, or anything that the dense decoder refuses.
    """
    experts = _experts(hf_config)
    return latent_kwargs(hf_config, sizes, experts) | router_kwargs(hf_config, experts)


def latent_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes, experts: moe.MoeSizes) -> dict[str, Any]:
    """Arguments of MLATransformerConfig but for the router's.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    latent = LatentSizes.from_hf(hf_config)
    refuse_biases(hf_config)
    refuse(hf_config, "rope_interleave", True, "megarl rotates neighbouring pairs, as the published checkpoints are laid out")
    return (
        dense.transformer_config_kwargs(hf_config, sizes)
        | moe.transformer_config_kwargs(experts, sizes.num_layers)
        | _rope_kwargs(hf_config)
        | {
            "multi_latent_attention": True,
            "num_query_groups": sizes.num_heads,
            "qk_layernorm": True,
            "q_lora_rank": latent.q_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.nope_dim,
            "qk_pos_emb_head_dim": latent.rope_dim,
            "v_head_dim": latent.v_dim,
        }
    )


def gpt_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """Vocabulary and tying; the rotary embedding belongs to the attention layers."""
    return {
        "vocab_size": sizes.vocab_size,
        "max_sequence_length": size(hf_config, "max_position_embeddings"),
        "share_embeddings_and_output_weights": sizes.tied and sizes.num_labels is None,
        "position_embedding_type": "rope",
    }


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """Latent attention, the dense first layers, and experts with their bias and the shared ones."""
    return latent_weight_map(hf_config, sizes, _experts(hf_config))


def latent_weight_map(
    hf_config: HFConfig, sizes: dense.DenseSizes, experts: moe.MoeSizes, *, expert_bias: bool = True, prediction_layers: int = 0
) -> WeightMap:
    """The same of other layers of `experts`, with a bias that picks them or without; `prediction_layers` are the family's
    default number of layers for multi-token prediction."""
    of_experts = moe.mlp_rules(experts, sizes.hidden_size, expert_bias=expert_bias)
    attention = latent_attention_rules(sizes, LatentSizes.from_hf(hf_config))
    more = behind_the_decoder(hf_config, sizes, [*attention, *of_experts], prediction_layers)
    return moe.weight_map(sizes, experts, attention, of_experts, **more)


def latent_attention_rules(sizes: dense.DenseSizes, latent: LatentSizes) -> list[Rule]:
    """Latent attention behind its norm."""
    hidden, heads, qk_dim = sizes.hidden_size, sizes.num_heads, latent.nope_dim + latent.rope_dim
    prefix, hf = dense.LAYER + "self_attention.", dense.HF_LAYER + "self_attn."

    def rule(name: str, hf_name: str, shape: tuple[int, ...], axis: int | None = None, te_name: str | None = None) -> Rule:
        return Rule(f"{prefix}{name}.weight", (f"{hf}{hf_name}.weight",), Copy(shape, axis), te_name=te_name)

    if latent.q_rank is None:
        queries = [rule("linear_q_proj", "q_proj", (heads * qk_dim, hidden), axis=0)]
    else:
        queries = [
            rule("linear_q_down_proj", "q_a_proj", (latent.q_rank, hidden)),
            rule("q_layernorm", "q_a_layernorm", (latent.q_rank,), te_name=prefix + "linear_q_up_proj.layer_norm_weight"),
            rule("linear_q_up_proj", "q_b_proj", (heads * qk_dim, latent.q_rank), axis=0),
        ]
    return [
        dense.input_norm_rule(hidden, te_name=None),
        *queries,
        rule("linear_kv_down_proj", "kv_a_proj_with_mqa", (latent.kv_rank + latent.rope_dim, hidden)),
        rule("kv_layernorm", "kv_a_layernorm", (latent.kv_rank,), te_name=prefix + "linear_kv_up_proj.layer_norm_weight"),
        rule("linear_kv_up_proj", "kv_b_proj", (heads * (latent.nope_dim + latent.v_dim), latent.kv_rank), axis=0),
        rule("linear_proj", "o_proj", (hidden, heads * latent.v_dim), axis=1),
    ]


def router_kwargs(hf_config: HFConfig, experts: moe.MoeSizes) -> dict[str, Any]:
    """The router's arguments. Raises ModelError if the config says another router than V3's."""
    refuse(hf_config, "scoring_func", "sigmoid", "DeepSeek-V3 scores experts so")
    refuse(hf_config, "topk_method", "noaux_tc", "DeepSeek-V3 picks experts so")
    return moe.sigmoid_router_kwargs(hf_config, experts)


def _rope_kwargs(hf_config: HFConfig) -> dict[str, Any]:
    rope = Rope.from_hf(hf_config, kinds=("default", "yarn"))
    refuse_partial(rope)
    if rope.kind == "default":
        return {"rope_type": "rope", "rotary_base": rope.base, "rotary_percent": 1.0}
    for name in ("attention_factor", "truncate"):
        refuse(rope.parameters, name, True if name == "truncate" else None, "megatron-core computes it from the factor")
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if bool(mscale) != bool(mscale_all_dim):
        raise ModelError(
            f"config.json: {rope.field}.mscale is {mscale:g} with mscale_all_dim={mscale_all_dim:g}, but only both or neither "
            "can be 0 or absent"
        )
    return {
        "rope_type": "yarn",
        "rotary_base": rope.base,
        "rotary_scaling_factor": rope.number("factor", least=1.0),
        "original_max_position_embeddings": int(rope.number("original_max_position_embeddings", least=1.0)),
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "mscale": mscale or 1.0,
        "mscale_all_dim": mscale_all_dim,
    }


def latent_sizes(hf_config: HFConfig) -> dense.DenseSizes:
    """The decoder's sizes. Raises ModelError as `DenseSizes.from_hf`."""
    # head_dim says here how many of a head's dimensions rotate, or is absent; num_key_value_heads means nothing.
    overrides = {"head_dim": size(hf_config, "qk_rope_head_dim"), "num_key_value_heads": None}
    return dense.DenseSizes.from_hf(hf_config | overrides)


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    refuse(hf_config, "moe_layer_freq", 1, "every layer after the dense ones has experts")
    return moe.behind_dense_layers(hf_config)


def _sglang_refusal(hf_config: HFConfig) -> str | None:
    missing = [f"{field} = {value!r}" for field, value in READ_BY_SGLANG.items() if field not in hf_config]
    if missing:
        return f"its config.json must say {', '.join(missing)}, as published checkpoints do, because SGLang has no defaults"
    if not hf_config.get("n_shared_experts"):
        return "n_shared_experts is 0, but SGLang computes shared experts in any case"
    return fp8_refusal(hf_config)


def fp8_refusal(hf_config: HFConfig) -> str | None:
    """Why SGLang cannot hold the latents' projections of a model in FP8; None: it can, or it is not in FP8."""
    q_rank = hf_config.get("q_lora_rank")
    in_fp8 = (hf_config.get("quantization_config") or {}).get("quant_method") == "fp8"
    if in_fp8 and q_rank is not None and q_rank % FP8_BLOCK:
        return f"it fuses q_a_proj with kv_a_proj in FP8, so q_lora_rank = {q_rank} must be a multiple of {FP8_BLOCK}"
    return None


ARCHITECTURE = text_family(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    gpt_kwargs,
    sizes_of=latent_sizes,
    sglang=SglangFacts(replicates_attention=True, refusal=_sglang_refusal, arguments={"disable_shared_experts_fusion": True}),
    other_types=("kimi_k2",),
)
