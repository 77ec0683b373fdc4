"""Kimi-Linear: Kimi's delta attention, latent attention without positions in the other layers, and DeepSeek's mixture.

Folders on the hub spell the config otherwise than transformers does, and have one tensor for each convolution and expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megarl.errors import ModelError
from megarl.models import deepseek_v3, dense, moe
from megarl.models.architecture import HFConfig, HubNames, SglangFacts
from megarl.models.fused_rows import FusedRows
from megarl.models.hf_fields import refuse, size, with_defaults
from megarl.models.packings import Copy
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap
from megarl.options.linear_attention import delta_net
from megarl.options.linear_attention.delta_net import BLOCK, CHUNK, FULL, LINEAR, DeltaSizes

SPELLINGS = {
    "max_position_embeddings": ("model_max_length",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_shared_experts": ("num_shared_experts",),
}
"""Other names that configs give fields of DeepSeek-V3."""
DEFAULTS = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "first_k_dense_replace": 1,
}
"""transformers' for fields that are missing."""
OF_LINEAR = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads", "linear_conv_kernel_dim": "short_conv_kernel_size"}
"""Fields of `linear_attn_config`, which count more, by what transformers calls them."""
LISTS = {"kda_layers": LINEAR, "full_attn_layers": FULL}
"""Lists of layers, counted from 1, in `linear_attn_config`."""
UNKNOWN = (
    "gate_lower_bound", "use_full_rank_gate", "attn_res_block_size", "latent_moe_use_norm", "mla_use_output_gate",
    "routed_expert_hidden_size",
)  # fmt: skip
"""Fields of Kimi K3's layers, which differ."""
ONLY = {"moe_router_activation_func": "sigmoid", "mla_use_nope": True, "num_nextn_predict_layers": 0, "moe_layer_freq": 1}
BLOCK_NAMES = tuple((f".mlp.{part}.", f".block_sparse_moe.{part}.") for part in ("experts", "gate", "shared_experts"))


@dataclass(frozen=True)
class KimiSizes(DeltaSizes):
    """Kimi's delta attention, whose keys and values have as many heads of one width, and decays their channels."""

    by_channel: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, hf_config: HFConfig) -> KimiSizes:
        """Read a config with its defaults.

        Raises:
            ModelError: a field is missing, no positive integer, or contradicts another.
        """
        heads, dim = size(hf_config, "linear_num_heads"), size(hf_config, "linear_head_dim")
        layers = frozenset(number for number, kind in enumerate(hf_config["layer_types"]) if kind == LINEAR)
        return cls(layers, heads, heads, dim, dim, size(hf_config, "linear_conv_kernel_dim"))

    def exchanged(self, tp: int, cp: int) -> int:
        """The convolution's inputs, write strengths and decays, and what is read."""
        return self.channels + self.values + 2 * self.values_width

    def products(self, hidden: int) -> int:
        """Multiply-adds per token of one layer: as `DeltaSizes.products`, with the two pairs of projections of gates."""
        gates = 2 * self.key_dim * (hidden + self.values_width)
        states = 3 * self.values * self.key_dim * self.value_dim
        return hidden * (self.channels + self.values + self.values_width) + gates + self.channels * self.width + states

    def kept_bytes(self, tp: int, itemsize: int, operand: int, mean_length: float, *, plain: bool) -> float:
        """As `DeltaSizes.kept_bytes`, with decays by channel, which the plain rule keeps for pairs of tokens of a block and to
        each block's start, and the narrow projections of the gates."""
        width = self.values_width / tp
        total = super().kept_bytes(tp, itemsize, operand, mean_length, plain=plain) + 2 * operand * self.key_dim
        if not plain:
            return total + (4 + itemsize) * width
        chunk = min(CHUNK, mean_length)
        return total + 4 * width * (2 * min(BLOCK, chunk) + 2 * chunk / BLOCK + 8)


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config as DeepSeek-V3 spells it, with transformers' fields of linear attention, and its defaults of what is missing.

    Raises:
        ModelError: a field has two values, the lists of layers contradict themselves, or something is not known.
    """
    of_linear = hf_config.get("linear_attn_config") or {}
    for field in UNKNOWN:
        for fields in (hf_config, of_linear):
            refuse(fields, field, False, "Kimi-Linear's layers, which are built here, do without")
    for field, only in ONLY.items():
        refuse(hf_config, field, only, "transformers computes nothing else for this family")
    found = dict(hf_config)
    for field, others in SPELLINGS.items():
        given = {name: hf_config[name] for name in (field, *others) if hf_config.get(name) is not None}
        if len(set(given.values())) > 1:
            raise ModelError(f"config.json: {' and '.join(given)} say the same, but are {given}; they must be equal")
        found |= dict.fromkeys([field] if given else [], next(iter(given.values()), None))
    found |= {field: of_linear[name] for field, name in OF_LINEAR.items() if of_linear.get(name) is not None}
    found = with_defaults(found, DEFAULTS) | {"rope_parameters": None, "rope_scaling": None, "rope_theta": None}
    layers = size(found, "num_hidden_layers")
    return found | {"layer_types": _layer_types(found, of_linear), "mlp_layer_types": _mlp_types(found, layers)}


def _layer_types(hf_config: HFConfig, of_linear: HFConfig) -> list[str]:
    layers = size(hf_config, "num_hidden_layers")
    if hf_config.get("layer_types"):
        return delta_net.layer_types(hf_config)
    if not all(of_linear.get(name) for name in LISTS):
        return [FULL if number and number % 4 == 0 else LINEAR for number in range(layers)]
    kinds = {number: kind for name, kind in LISTS.items() for number in of_linear[name]}
    if sorted(number for name in LISTS for number in of_linear[name]) != [*range(1, layers + 1)]:
        raise ModelError(
            "config.json: linear_attn_config.kda_layers and full_attn_layers must together have each number from 1 to "
            f"num_hidden_layers={layers} once"
        )
    return [kinds[number] for number in range(1, layers + 1)]


def _mlp_types(hf_config: HFConfig, layers: int) -> list[str]:
    dense_layers = size(hf_config, "first_k_dense_replace", least=0)
    kinds = hf_config.get("mlp_layer_types") or ["dense" if number < dense_layers else "sparse" for number in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise ModelError(f"config.json: mlp_layer_types is {kinds!r:.80}; it must be 'dense' or 'sparse' for {layers} layers")
    return list(kinds)


def _experts(hf_config: HFConfig) -> moe.MoeSizes:
    layers = (number for number, kind in enumerate(hf_config["mlp_layer_types"]) if kind == "sparse")
    shared = size(hf_config, "n_shared_experts", least=1)
    return moe.MoeSizes.from_hf(
        hf_config, layers, experts_fields=("n_routed_experts",), ffn_field="moe_intermediate_size", shared_experts=shared
    )


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """DeepSeek-V3's arguments, with linear attention in some layers and no positions in the others.

    Raises:
        ModelError: biases, or anything that DeepSeek-V3's decoder refuses.
    """
    of_deepseek = {**hf_config, "layer_types": None, "first_k_dense_replace": 0}
    return (
        deepseek_v3.transformer_config_kwargs(of_deepseek, sizes)
        | moe.transformer_config_kwargs(_experts(hf_config), sizes.num_layers)
        | delta_net.linear_kwargs(KimiSizes.from_hf(hf_config), sizes.num_layers)
        | {"no_rope_freq": [1] * sizes.num_layers}
    )


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The rules of both kinds of attention, the dense layers and the experts."""
    delta, experts = KimiSizes.from_hf(hf_config), _experts(hf_config)
    latent = deepseek_v3.latent_attention_rules(sizes, deepseek_v3.LatentSizes.from_hf(hf_config))
    norms = [rule for rule in latent if rule.megatron_name.endswith(".input_layernorm.weight")]
    full = frozenset(range(sizes.num_layers)) - delta.layers
    of_full = [replace(rule, layers=full) for rule in latent if rule not in norms]
    of_experts = moe.mlp_rules(
        experts,
        sizes.hidden_size,
        hf_block="block_sparse_moe.",
        hf_expert=HUB.expert,
        hf_shared_parts=("gate_proj", "up_proj", "down_proj"),
        expert_bias=True,
    )
    return moe.weight_map(sizes, experts, [*norms, *of_full, *_linear_rules(sizes, delta)], of_experts)


def _linear_rules(sizes: dense.DenseSizes, delta: KimiSizes) -> list[Rule]:
    prefix, hf, hidden = dense.LAYER + "self_attention.", dense.HF_LAYER + "self_attn.", sizes.hidden_size
    rows = delta_net.channel_rows(delta)
    projection = delta_net.each_by_itself(delta, rows | {"beta": delta.values}, hidden)
    convolutions = delta_net.each_by_itself(delta, rows, 1, delta.width)
    of_gates = {
        f"linear_{gate}_{half}.weight": (f"{gate}_{name}_proj.weight", packing)
        for gate in "fg"
        for half, name, packing in (
            ("down", "a", Copy((delta.key_dim, hidden))),
            ("up", "b", Copy((delta.values_width, delta.key_dim), axis=0)),
        )
    }
    of_gates |= {"dt_bias": ("dt_bias", Copy((delta.values_width,), axis=0)), "A_log": ("A_log", Copy((1, 1, delta.keys, 1)))}
    return [
        *delta_net.linear_rules(
            sizes,
            delta,
            (("q_proj", "k_proj", "v_proj", "b_proj"), projection),
            block="self_attn.",
            convolutions=(delta_net.CONVOLUTIONS, convolutions),
            norm="o_norm",
            output="o_proj",
        ),
        *(Rule(prefix + name, (hf + of_hub,), packing, layers=delta.layers) for name, (of_hub, packing) in of_gates.items()),
    ]


def _in_transformers(hf_config: HFConfig) -> FusedRows:
    rows = delta_net.channel_rows(KimiSizes.from_hf(text_config(hf_config))).values()
    parts = tuple((f"self_attn.{name}.weight", count) for name, count in zip(delta_net.CONVOLUTIONS, rows, strict=True))
    return FusedRows({"self_attn.conv1d.weight": parts}, columns=1)


HUB = HubNames(("w1", "w3", "w2"), renamed=((".forget_gate.", "."), *BLOCK_NAMES))
_NOT_PROVEN = "its kernels of Kimi's delta attention need a GPU, where no update of such a model was compared with training yet"

ARCHITECTURE = text_family(
    "kimi_linear",
    ("KimiLinearForCausalLM", "KimiLinearForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    deepseek_v3.gpt_kwargs,
    text_config=text_config,
    sizes_of=deepseek_v3.latent_sizes,
    sglang=SglangFacts(refusal=lambda hf_config: _NOT_PROVEN),
    hub=HUB,
    in_transformers=_in_transformers,
    linear=lambda hf_config: KimiSizes.from_hf(text_config(hf_config)),
)
