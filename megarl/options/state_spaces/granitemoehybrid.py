"""Granite 4 hybrid: Mamba-2 in most layers and attention, mostly without positions, in the others; a shared MLP beside experts.

The shared MLP is the only one in models without experts. Embeddings, attention scores, branches and logits have multipliers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, granite, moe
from megarl.models.architecture import HFConfig, HubNames
from megarl.models.dense import HF_LAYER, LAYER
from megarl.models.fused_rows import FusedRows
from megarl.models.hf_fields import refuse, size, with_defaults
from megarl.models.packings import Copy, GateUp
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap
from megarl.options.state_spaces import mamba
from megarl.options.state_spaces.mamba import ATTENTION, MAMBA, MambaSizes
from megarl.options.state_spaces.sglang_refusal import NOT_IN_SGLANG

DEFAULTS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
"""transformers' defaults."""
BLOCK = "block_sparse_moe."
POSITIONS = (None, "nope", "rope")


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing."""
    kinds = {"layer_types": hf_config["layers_block_type"]} if hf_config.get("layers_block_type") else {}
    filled = with_defaults(kinds | hf_config, DEFAULTS)
    return {"layer_types": [MAMBA] * size(filled, "num_hidden_layers"), **filled}


def state_spaces(hf_config: HFConfig) -> MambaSizes:
    """The sizes of a config with its defaults.

    Raises:
        ModelError: a field is missing, no positive integer, or contradicts another.
    """
    heads, wide = size(hf_config, "mamba_n_heads"), size(hf_config, "mamba_expand") * size(hf_config, "hidden_size")
    auto = hf_config["mamba_d_head"] == "auto"
    head_dim = wide // heads if auto else size(hf_config, "mamba_d_head")
    if heads * head_dim != wide:
        raise ModelError(
            f"config.json: mamba_n_heads is {heads} and mamba_d_head {hf_config['mamba_d_head']!r}; their product must be "
            f"mamba_expand * hidden_size = {wide}"
        )
    kinds = mamba.layer_kinds(hf_config, "layer_types", (MAMBA, ATTENTION))
    if len(kinds) != (layers := size(hf_config, "num_hidden_layers")):
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries; it must have num_hidden_layers={layers} of them")
    return MambaSizes(
        layers=frozenset(number for number, kind in enumerate(kinds) if kind == MAMBA),
        num_heads=heads,
        head_dim=head_dim,
        groups=size(hf_config, "mamba_n_groups"),
        state=size(hf_config, "mamba_d_state"),
        width=size(hf_config, "mamba_d_conv"),
        conv_bias=bool(hf_config["mamba_conv_bias"]),
        norm_groups=1,
        steps=mamba.step_limits(hf_config.get("time_step_limit"), "time_step_limit"),
    )


def experts_of(hf_config: HFConfig) -> moe.MoeSizes | None:
    """The experts, in all layers, with the shared MLP; None: that MLP is all that layers have."""
    if size(hf_config, "num_local_experts", least=0) == 0:
        return None
    shared = size(hf_config, "shared_intermediate_size")
    return replace(moe.in_every_layer(hf_config), shared_ffn_size=shared)


def sizes_of(hf_config: HFConfig) -> dense.DenseSizes:
    """The decoder's sizes; its MLP is the shared one."""
    shared = size(hf_config, "shared_intermediate_size")
    return replace(dense.DenseSizes.from_hf({"intermediate_size": shared, **hf_config}), ffn_size=shared)


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """Granite's arguments, with state spaces in some layers and experts where there are some.

    Raises:
        ModelError: biases of projections, positions of another kind, or anything that Granite refuses.
    """
    refuse(hf_config, "mamba_proj_bias", False, "megarl's Mamba-2 layers have no biases on their projections")
    refuse(hf_config, "normalization_function", "rmsnorm", "megarl's norms are RMSNorms")
    positions = hf_config.get("position_embedding_type")
    if positions not in POSITIONS:
        raise ModelError(f"config.json: position_embedding_type is {positions!r}; it must be null, 'nope' or 'rope'")
    kwargs = granite.transformer_config_kwargs({**hf_config, "layer_types": None}, sizes)
    kwargs |= mamba.transformer_config_kwargs(state_spaces(hf_config), sizes.num_layers)
    if positions != "rope":
        kwargs["no_rope_freq"] = [1] * sizes.num_layers
    if (experts := experts_of(hf_config)) is not None:
        kwargs |= moe.transformer_config_kwargs(experts, sizes.num_layers)
        kwargs |= moe.softmax_router_kwargs(experts, normalised=True)
    return kwargs


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """The rules of both kinds of layers, of the experts, and of the shared MLP."""
    spaces, experts = state_spaces(hf_config), experts_of(hf_config)
    attending = frozenset(range(sizes.num_layers)) - spaces.layers
    mixers = [
        *mamba.mamba_rules(sizes.hidden_size, spaces, HF_LAYER + "mamba.", HF_LAYER + "input_layernorm.weight"),
        *(dense.attention_rules(sizes, layers=attending) if attending else ()),
    ]
    if experts is None:
        norm = [rule for rule in dense.mlp_rules(sizes) if "layernorm" in rule.megatron_name]
        return dense.weight_map(sizes, mixers, [*norm, *_shared_mlp(sizes, LAYER + "mlp.")])
    routed = moe.mlp_rules(replace(experts, shared_ffn_size=0), sizes.hidden_size, hf_block=BLOCK, hf_router="router.layer")
    shared = _shared_mlp(sizes, LAYER + "mlp.shared_experts.")
    return dense.weight_map(sizes, mixers, [*routed, *shared], num_experts=experts.num_experts)


def _shared_mlp(sizes: dense.DenseSizes, name: str) -> list[Rule]:
    hf, hidden, ffn = HF_LAYER + "shared_mlp.", sizes.hidden_size, sizes.ffn_size
    halves = (hf + "gate_proj.weight", hf + "up_proj.weight")
    return [
        Rule(name + "linear_fc1.weight", halves, GateUp(ffn, hidden)),
        Rule(name + "linear_fc2.weight", (hf + "output_linear.weight",), Copy((hidden, ffn), axis=1)),
    ]


def _gate_over_up(sizes: dense.DenseSizes) -> dict[str, tuple[tuple[str, int], ...]]:
    halves = (("shared_mlp.gate_proj.weight", sizes.ffn_size), ("shared_mlp.up_proj.weight", sizes.ffn_size))
    return {"shared_mlp.input_linear.weight": halves}


def shared_rows(hf_config: HFConfig) -> FusedRows:
    """Gate and up of the shared MLP, one below the other; transformers has them as one layer."""
    sizes = sizes_of(text_config(hf_config))
    return FusedRows(_gate_over_up(sizes), sizes.hidden_size)


def stored_together(hf_config: HFConfig) -> FusedRows:
    """The same, and the experts of a layer, whose matrices are one behind another."""
    hf_config = text_config(hf_config)
    sizes, experts = sizes_of(hf_config), experts_of(hf_config)
    if experts is None:
        return shared_rows(hf_config)
    first, last = BLOCK + "input_linear.weight", BLOCK + "output_linear.weight"
    numbers, ffn, hidden = range(experts.num_experts), experts.expert_ffn_size, sizes.hidden_size
    parts = _gate_over_up(sizes) | {
        first: tuple((f"{BLOCK}experts.{n}.{half}_proj.weight", ffn) for n in numbers for half in ("gate", "up")),
        last: tuple((f"{BLOCK}experts.{n}.down_proj.weight", hidden) for n in numbers),
    }
    return FusedRows(parts, hidden, stacks={first: (len(numbers), hidden), last: (len(numbers), ffn)})


ARCHITECTURE = text_family(
    "granitemoehybrid",
    ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=text_config,
    sizes_of=sizes_of,
    sglang=NOT_IN_SGLANG,
    hub=HubNames(block="block_sparse_moe", ends=((".router.weight", ".router.layer.weight"),)),
    traits=granite.traits,
    linear=lambda hf_config: state_spaces(text_config(hf_config)),
    fused_rows=shared_rows,
    fused_experts=stored_together,
)
