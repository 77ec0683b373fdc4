"""LongCat-Flash: in each layer two latent attentions and two MLPs, and experts beside the first MLP, added behind the second.

A softmax scores experts, and zero experts, which give a token as it is; a correction bias helps to choose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.models import deepseek_v3, dense, moe
from megarl.models.architecture import DecoderTraits, HFConfig, SglangFacts
from megarl.models.dense import HF_LAYER, LAYER
from megarl.models.hf_fields import positive, refuse, size, with_defaults
from megarl.models.packings import Copy
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap
from megarl.options.shortcut_experts.sizes import DENSE, SECOND, ShortcutLayers

DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64, "ffn_hidden_size": 12288,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64,
    "v_head_dim": 128, "moe_topk": 12, "n_routed_experts": 512, "zero_expert_num": 256, "expert_ffn_hidden_size": 2048,
    "routed_scaling_factor": 6.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e7,
}  # fmt: skip
"""transformers' defaults for fields that are missing."""
OTHER_NAMES = {
    "intermediate_size": "ffn_hidden_size", "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk", "num_local_experts": "n_routed_experts",
}  # fmt: skip
"""Names of other families, which transformers takes for the same field."""
OF_PUBLISHED: dict[str, Any] = {
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity", "router_bias": False,
    "norm_topk_prob": False, "attention_method": "MLA", "ngram_vocab_size_ratio": None, "oe_vocab_size_ratio": None,
}  # fmt: skip
"""Fields that transformers does not read, or must have so, with the only values that it computes."""
NOT_SERVED = "megarl has not compared its servers of this family with training; rollout.engine 'embedded' serves it"


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with transformers' defaults, in the names of other families; a layer has two attentions.

    Raises:
        ModelError: two names of a field say different things.
    """
    named = {name: hf_config[other] for other, name in OTHER_NAMES.items() if hf_config.get(other) is not None}
    if hf_config.get("num_hidden_layers") is not None:
        named["num_layers"] = size(hf_config, "num_hidden_layers") // 2
    filled = with_defaults(hf_config, DEFAULTS | named)
    layers = size(filled, "num_layers")
    refuse(filled, "num_hidden_layers", 2 * layers, "transformers counts attentions by it, two in each of num_layers")
    for other, name in OTHER_NAMES.items():
        refuse(filled, other, size(filled, name), f"it is another name of {name}")
        filled[other] = filled[name]
    return filled | {"num_hidden_layers": layers}


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """DeepSeek-V3's latent attention, experts in every layer, and a softmax of all as their weights.

    Raises:
        ModelError: biases, queries without a latent, another router, or anything that DeepSeek-V3 or the dense decoder refuses.
    """
    size(hf_config, "q_lora_rank")
    refuse(hf_config, "head_dim", size(hf_config, "qk_rope_head_dim"), "so many dimensions of a head rotate: qk_rope_head_dim")
    refuse(hf_config, "num_key_value_heads", sizes.num_heads, "all heads have keys and values of their own")
    both = size(hf_config, "qk_nope_head_dim") + size(hf_config, "qk_rope_head_dim")
    refuse(hf_config, "qk_head_dim", both, "it is the sum of qk_nope_head_dim and qk_rope_head_dim")
    for field, value in OF_PUBLISHED.items():
        refuse(hf_config, field, value, "so is what transformers computes")
    experts = _experts(hf_config)
    return (
        deepseek_v3.latent_kwargs(hf_config, sizes, experts)
        | moe.softmax_router_kwargs(experts, normalised=False)
        | {
            "moe_router_dtype": "fp32",
            "moe_router_topk_scaling_factor": positive(hf_config, "routed_scaling_factor"),
        }
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """Both halves of the layers, and the experts with their bias; layers for multi-token prediction are carried as they are."""
    experts = _experts(hf_config)
    attention = deepseek_v3.latent_attention_rules(sizes, deepseek_v3.LatentSizes.from_hf(hf_config))
    halves = [_of_half(rule, half) for half in (0, 1) for rule in (*attention, *dense.mlp_rules(sizes))]
    scored = experts.num_experts + _zero_experts(hf_config)
    of_router = {
        f"{LAYER}mlp.router.weight": Copy((scored, sizes.hidden_size)),
        f"{LAYER}mlp.router.expert_bias": Copy((scored,)),
    }
    names: dict[str, Any] = {"hf_router": "router.classifier", "hf_expert_bias": "router.e_score_correction_bias"}
    mixture = [
        replace(rule, packing=of_router.get(rule.megatron_name, rule.packing))
        for rule in moe.mlp_rules(experts, sizes.hidden_size, expert_bias=True, **names)
        if not rule.megatron_name.endswith("pre_mlp_layernorm.weight")
    ]
    return dense.weight_map(sizes, halves, mixture, num_experts=experts.num_experts, left_out=("model.mtp.",))


def _of_half(rule: Rule, half: int) -> Rule:
    """A rule of a layer of attention and an MLP as that of the first half of a layer, or of the second."""
    name = rule.megatron_name.removeprefix(LAYER)
    name = SECOND + name if half else name.replace("mlp.", DENSE) if name.startswith("mlp.") else name

    def of_hub(hf_name: str) -> str:
        module, _, rest = hf_name.removeprefix(HF_LAYER).partition(".")
        return f"{HF_LAYER}{'mlps' if module == 'mlp' else module}.{half}.{rest}"

    te_name = rule.te_name.replace(LAYER, LAYER + SECOND) if rule.te_name and half else rule.te_name
    te_name = None if rule.te_name and ".mlp." in rule.te_name else te_name
    return replace(rule, megatron_name=LAYER + name, te_name=te_name, hf_names=tuple(map(of_hub, rule.hf_names)))


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    layers, fields = range(size(hf_config, "num_hidden_layers")), ("n_routed_experts",)
    return moe.MoeSizes.from_hf(hf_config, layers, experts_fields=fields, ffn_field="moe_intermediate_size")


def _zero_experts(hf_config: HFConfig) -> int:
    return size(hf_config, "zero_expert_num", least=0)


def traits(hf_config: HFConfig) -> DecoderTraits:
    """Two halves of each layer, and the layers' own."""
    filled = text_config(hf_config)
    hidden = size(filled, "hidden_size")
    scales = ((hidden / size(filled, field)) ** 0.5 for field in ("q_lora_rank", "kv_lora_rank"))
    return DecoderTraits(sublayers=2, own_layers=ShortcutLayers(_zero_experts(filled), *scales))


ARCHITECTURE = text_family(
    "longcat_flash",
    ("LongcatFlashForCausalLM", "LongcatFlashForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    deepseek_v3.gpt_kwargs,
    text_config=text_config,
    sizes_of=deepseek_v3.latent_sizes,
    sglang=SglangFacts(refusal=lambda hf_config: NOT_SERVED),
    traits=traits,
    module="megarl.options.shortcut_experts.longcat_flash_module",
)
