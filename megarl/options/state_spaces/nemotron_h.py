"""Nemotron-H and Nemotron 3: one mixer per layer, a Mamba-2 layer, attention without positions, an MLP or a mixture of experts.

MLPs and experts are a squared ReLU without a gate; experts may work in a narrower latent. A folder may have layers for
multi-token prediction, which are not trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, moe
from megarl.models.architecture import DecoderTraits, HFConfig
from megarl.models.dense import HF_LAYER, LAYER
from megarl.models.hf_fields import refuse, size, with_defaults
from megarl.models.packings import Copy
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap
from megarl.options.state_spaces import mamba
from megarl.options.state_spaces.mamba import ATTENTION, MAMBA, MambaSizes
from megarl.options.state_spaces.sglang_refusal import NOT_IN_SGLANG

MLP, MOE = "mlp", "moe"
LETTERS = {"M": MAMBA, "E": MOE, "*": ATTENTION, "-": MLP}
"""Kinds of layers by their letter in `hybrid_override_pattern`."""
DEFAULTS = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "max_position_embeddings": 4096,
    "vocab_size": 131072,
    "layer_norm_epsilon": 1e-5,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
"""transformers' defaults."""
OLD_FIELDS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "num_local_experts": "n_routed_experts",
    "layer_types": "layers_block_type",
}
"""Fields of earlier versions, and what transformers 5 calls them."""
ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
"""Fields of configs that nothing reads, because nothing rotates."""
HUB = {
    dense.HF_EMBEDDING: "backbone.embeddings.weight",
    "model.norm.weight": "backbone.norm_f.weight",
    HF_LAYER + "input_layernorm.": "backbone.layers.{layer}.norm.",
    HF_LAYER + "self_attn.": "backbone.layers.{layer}.mixer.",
}
"""Beginnings of names of Llama's tensors, and of the same here."""
NORM, MIXER = "backbone.layers.{layer}.norm.weight", "backbone.layers.{layer}.mixer."


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing, and the kinds of layers by `layers_block_type`."""
    named = {OLD_FIELDS.get(field, field): value for field, value in hf_config.items() if field not in ROTARY}
    filled = with_defaults(named, DEFAULTS)
    filled["layers_block_type"] = kinds = _kinds(filled)
    return filled | {"num_hidden_layers": len(kinds), "rms_norm_eps": filled["layer_norm_epsilon"]}


def _kinds(hf_config: HFConfig) -> list[str]:
    """Each layer's kind.

    Raises:
        ModelError: a kind or a letter is unknown, or there are more or fewer of them than layers.
    """
    field, pattern = "layers_block_type", hf_config.get("hybrid_override_pattern")
    if hf_config.get(field) is not None:
        kinds = mamba.layer_kinds(hf_config, field, (MAMBA, ATTENTION, MLP, MOE))
    elif pattern is None:
        kinds = [MAMBA, MOE, ATTENTION, MLP]
    else:
        field, kinds = "hybrid_override_pattern", _of_pattern(pattern)
    layers = size(hf_config, "num_hidden_layers", default=len(kinds))
    if len(kinds) != layers:
        raise ModelError(f"config.json: {field} has {len(kinds)} layers; it must have num_hidden_layers={layers} of them")
    return kinds


def _of_pattern(pattern: Any) -> list[str]:
    if not isinstance(pattern, str) or not pattern:
        raise ModelError(f"config.json: hybrid_override_pattern is {pattern!r}; it must be a text with a letter for each layer")
    for place, letter in enumerate(pattern):
        if letter not in LETTERS:
            raise ModelError(
                f"config.json: hybrid_override_pattern has {letter!r} in place {place}; its letters must be M (Mamba-2), "
                "* (attention), - (MLP) or E (experts)"
            )
    return [LETTERS[letter] for letter in pattern]


@dataclass(frozen=True)
class MixerLayers:
    """The layers of each kind."""

    mamba: frozenset[int]
    attention: frozenset[int]
    mlp: frozenset[int]
    moe: frozenset[int]

    @classmethod
    def of(cls, hf_config: HFConfig) -> MixerLayers:
        """Read a config with its defaults."""
        kinds = hf_config["layers_block_type"]

        def layers(kind: str) -> frozenset[int]:
            return frozenset(number for number, found in enumerate(kinds) if found == kind)

        return cls(layers(MAMBA), layers(ATTENTION), layers(MLP), layers(MOE))


def state_spaces(hf_config: HFConfig) -> MambaSizes:
    """The sizes of a config with its defaults. Raises ModelError if a field is no positive integer, or contradicts another."""
    heads, groups = size(hf_config, "mamba_num_heads"), size(hf_config, "n_groups")
    least = hf_config["time_step_min"]  # transformers 5.19 reads no other limit
    return MambaSizes(
        layers=MixerLayers.of(hf_config).mamba,
        num_heads=heads,
        head_dim=size(hf_config, "mamba_head_dim"),
        groups=groups,
        state=size(hf_config, "ssm_state_size"),
        width=size(hf_config, "conv_kernel"),
        conv_bias=bool(hf_config["use_conv_bias"]),
        norm_groups=groups,
        steps=mamba.step_limits([least, math.inf], "time_step_min"),
    )


def experts_of(hf_config: HFConfig) -> moe.MoeSizes | None:
    """The experts of the layers that have some; None: there are none."""
    layers = MixerLayers.of(hf_config).moe
    if not layers:
        return None
    found = moe.MoeSizes.from_hf(hf_config, layers, experts_fields=("n_routed_experts",), ffn_field="moe_intermediate_size")
    return replace(found, shared_ffn_size=size(hf_config, "moe_shared_expert_intermediate_size"))


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder's arguments without positions and gates, with state spaces and experts in some layers.

    Raises:
        ModelError: biases, tied embeddings, a window, another activation, or anything that the dense decoder refuses.
    """
    for field in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"):
        refuse(hf_config, field, False, "megarl's layers of this family have no biases but the convolution's")
    refuse(hf_config, "tie_word_embeddings", False, "transformers does not tie this family's embeddings")
    refuse(hf_config, "mlp_hidden_act", "relu2", "MLPs and experts of this family are a squared ReLU")
    refuse(hf_config, "mamba_hidden_act", "silu", "the convolution of a Mamba-2 layer is followed by SiLU")
    refuse(hf_config, "residual_in_fp32", False, "the residual stream has the model's dtype")
    refuse(hf_config, "n_shared_experts", 1, "transformers computes one shared expert, whatever their number")
    if hf_config.get("sliding_window") is not None:
        raise ModelError(
            f"config.json: sliding_window is {hf_config['sliding_window']!r}; it must be null: transformers has no windows here"
        )
    kwargs = dense.transformer_config_kwargs(hf_config, sizes)
    kwargs |= mamba.transformer_config_kwargs(state_spaces(hf_config), sizes.num_layers)
    kwargs |= {"gated_linear_unit": False, "activation": "squared_relu", "no_rope_freq": [1] * sizes.num_layers}
    if (experts := experts_of(hf_config)) is not None:
        kwargs |= moe.transformer_config_kwargs(experts, sizes.num_layers) | moe.sigmoid_router_kwargs(hf_config, experts)
        kwargs["moe_latent_size"] = _latent(hf_config)
    return kwargs


def _latent(hf_config: HFConfig) -> int | None:
    return size(hf_config, "moe_latent_size") if hf_config.get("moe_latent_size") is not None else None


def traits(hf_config: HFConfig) -> DecoderTraits:
    """The half of a layer that each layer is."""
    layers = MixerLayers.of(text_config(hf_config))
    return DecoderTraits(mlp_alone=layers.mlp | layers.moe, attention_alone=layers.mamba | layers.attention)


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The rules of every kind of layer."""
    layers, experts = MixerLayers.of(hf_config), experts_of(hf_config)
    mixers = [
        *mamba.mamba_rules(sizes.hidden_size, state_spaces(hf_config), MIXER, NORM),
        *(_renamed(dense.attention_rules(sizes, layers=layers.attention)) if layers.attention else ()),
    ]
    mlps = [*_mlp_rules(sizes, layers.mlp)] if layers.mlp else []
    mlps += _expert_rules(experts, sizes.hidden_size, _latent(hf_config)) if experts is not None else []
    found = dense.weight_map(sizes, mixers, mlps, num_experts=experts.num_experts if experts else 0, left_out=("mtp.",))
    return replace(found, rules=tuple(_renamed(found.rules)))


def _renamed(rules: Iterable[Rule]) -> list[Rule]:
    def of(name: str) -> str:
        return next((hub + name.removeprefix(llama) for llama, hub in HUB.items() if name.startswith(llama)), name)

    return [replace(rule, hf_names=tuple(map(of, rule.hf_names))) for rule in rules]


def _mlp_rules(sizes: dense.DenseSizes, layers: frozenset[int]) -> list[Rule]:
    hidden, mlp = sizes.hidden_size, LAYER + "mlp."
    norm_te = mlp + "linear_fc1.layer_norm_weight"
    return [
        Rule(LAYER + "pre_mlp_layernorm.weight", (NORM,), Copy((hidden,)), layers=layers, te_name=norm_te),
        *_up_and_down(mlp, MIXER, sizes.ffn_size, hidden, layers),
    ]


def _up_and_down(
    name: str, hf: str, ffn: int, width: int, layers: frozenset[int], te_names: tuple[str | None, str | None] = (None, None)
) -> list[Rule]:
    """An MLP without a gate, from `width` to `ffn` and back."""
    up, down = Copy((ffn, width), axis=0), Copy((width, ffn), axis=1)
    return [
        Rule(name + "linear_fc1.weight", (hf + "up_proj.weight",), up, layers=layers, te_name=te_names[0]),
        Rule(name + "linear_fc2.weight", (hf + "down_proj.weight",), down, layers=layers, te_name=te_names[1]),
    ]


def _expert_rules(experts: moe.MoeSizes, hidden: int, latent: int | None) -> list[Rule]:
    """Norm, router, experts, the shared one, and the projections to the experts' latent and back, if there is one."""
    block, layers = LAYER + "mlp.", experts.layers

    def rule(name: str, hf_name: str, packing: Copy, **more: Any) -> Rule:
        return Rule(block + name, (MIXER + hf_name,), packing, layers=layers, **more)

    grouped = (block + "experts.linear_fc1.weight{expert}", block + "experts.linear_fc2.weight{expert}")
    of_expert = (block + "experts.local_experts.{expert}.", MIXER + "experts.{expert}.", experts.expert_ffn_size)
    of_shared = (block + "shared_experts.", MIXER + "shared_experts.", experts.shared_ffn_size)
    bias, number = "gate.e_score_correction_bias", experts.num_experts
    found = [
        Rule(LAYER + "pre_mlp_layernorm.weight", (NORM,), Copy((hidden,)), layers=layers),
        rule("router.weight", "gate.weight", Copy((number, hidden))),
        rule("router.expert_bias", bias, Copy((number,)), dtype="float32"),
        *_up_and_down(*of_expert, latent or hidden, layers, grouped),
        *_up_and_down(*of_shared, hidden, layers),
    ]
    for name, shape in (("fc1", (latent, hidden)), ("fc2", (hidden, latent))) if latent else ():
        found.append(rule(f"{name}_latent_proj.weight", f"{name}_latent_proj.weight", Copy(shape)))  # type: ignore[arg-type]
    return found


ARCHITECTURE = text_family(
    "nemotron_h",
    ("NemotronHForCausalLM", "NemotronHForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=text_config,
    sglang=NOT_IN_SGLANG,
    traits=traits,
    linear=lambda hf_config: state_spaces(text_config(hf_config)),
    other_names=(("model.", "backbone."),),
)
