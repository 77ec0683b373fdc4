"""OLMo hybrid: gated delta nets with a norm before them and one before the MLP, and OLMo's attention with norms behind both.

Each projection and each convolution has a tensor of its own on the hub, where the norms of layers with linear attention have
other names than in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.errors import ModelError
from megarl.models import dense, olmo2
from megarl.models.architecture import DecoderTraits, HFConfig
from megarl.models.fused_rows import FusedRows
from megarl.models.hf_fields import refuse_biases, size, with_defaults
from megarl.models.text_family import NOT_IN_SGLANG, text_family
from megarl.models.weight_map import Rule, WeightMap
from megarl.options.linear_attention import delta_net
from megarl.options.linear_attention.delta_net import FULL, LINEAR, DeltaSizes

NORM_EPSILON = 1e-5
"""transformers norms what is read of states with it, whatever `rms_norm_eps` says."""
PERIOD = 4
INPUT_NORM, MLP_NORM = "attention_layer_norm", "feedforward_layer_norm"
"""The hub's names of norms in layers with linear attention."""


def text_config(hf_config: HFConfig) -> HFConfig:
    """The config with what transformers gives fields that are missing. `rotates`: whether there are positions.

    Raises:
        ModelError: a size is no positive integer, or layers of one kind are missing.
    """
    layers, hidden, heads = (size(hf_config, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kinds = hf_config.get("layer_types")
    if kinds is None:
        kinds = [FULL if number % PERIOD == PERIOD - 1 else LINEAR for number in range(layers)]
        kinds = kinds if FULL in kinds else [*kinds[:-1], FULL]
    keys = size(hf_config, "linear_num_key_heads", default=heads)
    key_dim = size(hf_config, "linear_key_head_dim", default=int(0.75 * hidden / keys))
    of_linear = {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    }
    found = with_defaults(hf_config, of_linear) | {"layer_types": kinds, "rotates": _rotates(hf_config)}
    if not found["rotates"]:
        found |= {"rope_parameters": None, "rope_scaling": None, "rope_theta": None}
    if {*delta_net.layer_types(found)} != {FULL, LINEAR}:
        raise ModelError(f"config.json: layer_types has layers of one kind; it must have both '{LINEAR}' and '{FULL}'")
    return found


def _rotates(hf_config: HFConfig) -> bool:
    """As transformers: a base that is null means that nothing rotates; one that is not there is 10,000."""
    parameters = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    return parameters.get("rope_theta", hf_config.get("rope_theta", 10000.0)) is not None


def delta_sizes(hf_config: HFConfig) -> DeltaSizes:
    """The sizes of a config with its defaults. Raises ModelError as `DeltaSizes.from_hf`."""
    most_written = 2.0 if hf_config["linear_allow_neg_eigval"] else 1.0
    return replace(DeltaSizes.from_hf(hf_config), most_written=most_written, norm_epsilon=NORM_EPSILON)


def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
    """The dense decoder's arguments with `qk_layernorm`, and linear attention in some layers.

    Raises:
        ModelError: biases, or anything that the dense decoder refuses.
    """
    refuse_biases(hf_config)
    kwargs = dense.transformer_config_kwargs({**hf_config, "layer_types": None}, sizes) | {"qk_layernorm": True}
    if not hf_config["rotates"]:
        kwargs["no_rope_freq"] = [1] * sizes.num_layers
    return kwargs | delta_net.linear_kwargs(delta_sizes(hf_config), sizes.num_layers)


def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
    """OLMo's rules in the layers with full attention, and those of linear attention with a norm before it and the MLP."""
    delta = delta_sizes(hf_config)
    full = frozenset(range(sizes.num_layers)) - delta.layers
    after = dense.post_norm_rules(sizes, "post_attention_layernorm", "post_feedforward_layernorm")
    of_full = [
        *dense.attention_rules(sizes, projection_norms=True, pre_norm=False, layers=full),
        *(replace(rule, layers=full) for rule in after),
        *dense.mlp_rules(sizes, full, pre_norm=False),
    ]
    input_norm = replace(delta_net.input_norm_rule(sizes, delta), hf_names=(f"{dense.HF_LAYER}{INPUT_NORM}.weight",))
    mlp = dense.mlp_rules(sizes, delta.layers, hf_norm=MLP_NORM)
    return dense.weight_map(sizes, [input_norm, *_linear_rules(sizes, delta), *of_full], mlp)


def _linear_rules(sizes: dense.DenseSizes, delta: DeltaSizes) -> list[Rule]:
    rows = delta_net.channel_rows(delta)
    gates = {"z": delta.values_width, "beta": delta.values, "alpha": delta.values}
    projections = tuple(f"{part}_proj" for part in ("q", "k", "v", "g", "b", "a"))
    packing = delta_net.each_by_itself(delta, rows | gates, sizes.hidden_size)
    convolutions = (delta_net.CONVOLUTIONS, delta_net.each_by_itself(delta, rows, 1, delta.width))
    rules = delta_net.linear_rules(
        sizes, delta, (projections, packing), convolutions=convolutions, norm="o_norm", output="o_proj"
    )
    return [*rules, *delta_net.decay_rules(delta)]


def traits(hf_config: HFConfig) -> DecoderTraits:
    """OLMo's norms in the layers with full attention alone."""
    return replace(olmo2.traits(hf_config), of_variant=DecoderTraits())


def _in_transformers(hf_config: HFConfig) -> FusedRows:
    """Its one convolution, and the norms of layers with linear attention, which it calls as those of other layers."""
    hf_config = text_config(hf_config)
    delta, hidden = delta_sizes(hf_config), size(hf_config, "hidden_size")
    rows = delta_net.channel_rows(delta).values()
    parts = tuple((f"linear_attn.{name}.weight", count) for name, count in zip(delta_net.CONVOLUTIONS, rows, strict=True))
    renamed = {"input_layernorm": INPUT_NORM, "post_attention_layernorm": MLP_NORM}
    norms = {
        f"layers.{layer}.{name}.weight": ((f"layers.{layer}.{on_the_hub}.weight", hidden),)
        for layer in sorted(delta.layers)
        for name, on_the_hub in renamed.items()
    }
    return FusedRows({"linear_attn.conv1d.weight": parts, **norms}, columns=1)


ARCHITECTURE = text_family(
    "olmo_hybrid",
    ("OlmoHybridForCausalLM", "OlmoHybridForSequenceClassification"),
    transformer_config_kwargs,
    weight_map,
    text_config=text_config,
    sglang=NOT_IN_SGLANG,
    traits=traits,
    in_transformers=_in_transformers,
    linear=lambda hf_config: delta_sizes(text_config(hf_config)),
)
