"""The common part of all families: a decoder of RMSNorm, attention with rotary positions and a gated SiLU MLP.

Reads a Hugging Face config (transformers 4 or 5 spelling), refuses what megatron-core cannot represent, and gives the
common arguments and rules. An architecture's own file adds what is its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from megarl.errors import ModelError
from megarl.models.hf_fields import refuse, refuse_quantised, size
from megarl.models.packings import Copy, GateUp, GroupedQKV, Packing, Vocabulary
from megarl.models.rope import rope_kwargs
from megarl.models.weight_map import Rule, WeightMap
from megarl.models.windows import in_all_layers, window_kwargs

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."
HF_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class DenseSizes:
    """The sizes of a decoder. `num_labels` is 1 for a reward model with a scalar head, None with a vocabulary."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool
    num_labels: int | None

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], head_dim: int | None = None) -> DenseSizes:
        """Read a config; `head_dim` is the family's default where the config has none, else hidden size over heads.

        Raises:
            ModelError: a field is missing, no positive integer, or contradicts another.
        """
        num_heads, hidden_size = size(hf_config, "num_attention_heads"), size(hf_config, "hidden_size")
        if head_dim is None and hf_config.get("head_dim") is None:
            if hidden_size % num_heads:
                raise ModelError(
                    f"config.json: hidden_size is {hidden_size}, but without head_dim it must be a multiple of "
                    f"num_attention_heads={num_heads}"
                )
            head_dim = hidden_size // num_heads
        num_groups = size(hf_config, "num_key_value_heads", default=num_heads)
        if num_heads % num_groups:
            raise ModelError(
                f"config.json: num_key_value_heads is {num_groups}; it must divide num_attention_heads={num_heads}"
            )
        return cls(
            num_layers=size(hf_config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_groups=num_groups,
            head_dim=size(hf_config, "head_dim", default=head_dim),
            ffn_size=size(hf_config, "intermediate_size"),
            vocab_size=size(hf_config, "vocab_size"),
            tied=bool(hf_config.get("tie_word_embeddings", False)),
            num_labels=_num_labels(hf_config),
        )


def transformer_config_kwargs(
    hf_config: dict[str, Any], sizes: DenseSizes, sliding: Collection[int] | None = None, window: int | None = None
) -> dict[str, Any]:
    """Keyword arguments of megatron-core's TransformerConfig, but for `activation`, a name the caller translates.

    The layers `sliding` attend through `sliding_window`, `window` tokens where the config leaves it out; None: a family that
    has no windows. Dropout is left to the caller: it belongs to the run.

    Raises:
        ModelError: the config asks for something that cannot be represented.
    """
    refuse(hf_config, "hidden_act", "silu", "all families are built with a gated SiLU MLP")
    refuse_quantised(hf_config)
    if sliding is None:
        sliding = in_all_layers(hf_config, sliding=False)
    return {
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.num_heads,
        "num_query_groups": sizes.num_groups,
        "kv_channels": sizes.head_dim,
        "ffn_hidden_size": sizes.ffn_size,
        "layernorm_epsilon": float(hf_config.get("rms_norm_eps", 1e-6)),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "init_method_std": float(hf_config.get("initializer_range", 0.02)),
        **window_kwargs(hf_config, sliding, window),
    }


def gpt_kwargs(hf_config: dict[str, Any], sizes: DenseSizes, *, partial_rotary: bool = False) -> dict[str, Any]:
    """Keyword arguments of megatron-core's GPTModel; `vocab_size` is without padding.

    `partial_rotary`: in this family the config says how many of a head's dimensions rotate.

    Raises:
        ModelError: the rotary embedding cannot be represented.
    """
    return {
        "vocab_size": sizes.vocab_size,
        "max_sequence_length": size(hf_config, "max_position_embeddings"),
        "share_embeddings_and_output_weights": sizes.tied and sizes.num_labels is None,
        **rope_kwargs(hf_config, sizes.head_dim, partial=partial_rotary),
    }


def weight_map(
    sizes: DenseSizes,
    attention: Iterable[Rule],
    mlp: Iterable[Rule],
    *,
    embedding_whole_in_engines: bool = False,
    **more: Any,
) -> WeightMap:
    """Embedding, the rules of a layer's `attention` and `mlp`, and the output; `more` are WeightMap's other fields.

    `embedding_whole_in_engines`: SGLang does not split this family's embedding.
    """
    hidden = sizes.hidden_size
    vocabulary = Vocabulary(sizes.vocab_size, hidden)
    embedding = Rule("embedding.word_embeddings.weight", (HF_EMBEDDING,), vocabulary, stage="first")
    rules = (
        replace(embedding, whole_in_engines=embedding_whole_in_engines),
        *attention,
        *mlp,
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Copy((hidden,)), stage="last"),
        _output_rule(sizes, vocabulary),
    )
    return WeightMap(rules, sizes.num_layers, **more)


def attention_rules(
    sizes: DenseSizes,
    *,
    bias: bool = False,
    output_bias: bool = False,
    head_norms: bool = False,
    hf_norms: tuple[str, str] = ("q_norm", "k_norm"),
    projection_norms: bool = False,
    pre_norm: bool = True,
    gated: bool = False,
    hf_gate: str | None = None,
    gate_rows: int = 0,
    keys_as_values: bool = False,
    value_dim: int = 0,
    layers: frozenset[int] | None = None,
) -> list[Rule]:
    """Grouped attention behind its norm (`pre_norm`), with biases on q, k and v, with a bias on o, and with norms of every q
    and k head, which the hub calls `hf_norms`.

    With `projection_norms` one norm is of all heads of q together, and one of all heads of k. `gated`: a part of q gates the
    output; `hf_gate` is what the hub calls the gate where it is a projection of its own, with `gate_rows` for each head (0: as
    many as the head has). `keys_as_values`: there is no v. `value_dim`: width of a head of v, 0: as of the others. `layers` are
    those that have it, None for all.
    """
    hidden, width = sizes.hidden_size, sizes.num_heads * (value_dim or sizes.head_dim)
    prefix, hf = LAYER + "self_attention.", HF_LAYER + "self_attn."

    def rule(name: str, hf_names: Iterable[str], packing: Packing) -> Rule:
        return Rule(prefix + name, tuple(hf + hf_name for hf_name in hf_names), packing, layers=layers)

    rules = [input_norm_rule(hidden, te_name=prefix + "linear_qkv.layer_norm_weight", layers=layers)] if pre_norm else []
    for kind in ("weight", "bias") if bias else ("weight",):
        columns = hidden if kind == "weight" else None
        shape = sizes.num_heads, sizes.num_groups, sizes.head_dim, columns
        packing = GroupedQKV(*shape, gated, hf_gate is not None, gate_rows, keys_as_values, value_dim)
        parts = [*(f"{part}_proj" for part in ("qk" if keys_as_values else "qkv")), *([hf_gate] if hf_gate else ())]
        rules.append(rule(f"linear_qkv.{kind}", [f"{part}.{kind}" for part in parts], packing))
    of_heads = zip("qk", hf_norms, (sizes.num_heads, sizes.num_groups), strict=True)
    for which, hf_norm, heads in of_heads if head_norms or projection_norms else ():
        normed = heads * sizes.head_dim if projection_norms else sizes.head_dim
        rules.append(rule(f"{which}_layernorm.weight", [f"{hf_norm}.weight"], Copy((normed,))))
    rules.append(rule("linear_proj.weight", ["o_proj.weight"], Copy((hidden, width), axis=1)))
    return [*rules, rule("linear_proj.bias", ["o_proj.bias"], Copy((hidden,)))] if output_bias else rules


def input_norm_rule(hidden_size: int, te_name: str | None, layers: frozenset[int] | None = None) -> Rule:
    """The norm before attention; Transformer Engine fuses it into the linear layer `te_name`, if any."""
    hf_names = (HF_LAYER + "input_layernorm.weight",)
    return Rule(LAYER + "input_layernorm.weight", hf_names, Copy((hidden_size,)), te_name=te_name, layers=layers)


def post_norm_rules(sizes: DenseSizes, after_attention: str, after_mlp: str) -> list[Rule]:
    """The norms of what attention and MLP give, by what the hub calls them in a layer."""
    names = {"post_self_attn_layernorm": after_attention, "post_mlp_layernorm": after_mlp}
    return [
        Rule(f"{LAYER}{module}.weight", (f"{HF_LAYER}{hf}.weight",), Copy((sizes.hidden_size,))) for module, hf in names.items()
    ]


def mlp_rules(
    sizes: DenseSizes,
    layers: frozenset[int] | None = None,
    *,
    pre_norm: bool = True,
    hf_norm: str = "post_attention_layernorm",
    hf_block: str = "mlp.",
    bias: bool = False,
) -> list[Rule]:
    """The dense MLP (the hub's `hf_block`), behind its norm (`hf_norm`) unless `pre_norm` is false, in `layers` (None:
    all), with biases.
    """
    hidden, ffn, mlp = sizes.hidden_size, sizes.ffn_size, LAYER + "mlp."

    def rule(name: str, parts: Iterable[str], packing: Packing) -> Rule:
        kind = name.rpartition(".")[2]
        return Rule(mlp + name, tuple(f"{HF_LAYER}{hf_block}{part}_proj.{kind}" for part in parts), packing, layers=layers)

    biases = [
        rule("linear_fc1.bias", ("gate", "up"), GateUp(ffn, None)),
        rule("linear_fc2.bias", ("down",), Copy((hidden,))),
    ]
    norm = Rule(
        LAYER + "pre_mlp_layernorm.weight",
        (f"{HF_LAYER}{hf_norm}.weight",),
        Copy((hidden,)),
        layers=layers,
        te_name=mlp + "linear_fc1.layer_norm_weight",
    )
    return [
        *(biases if bias else ()),
        *([norm] if pre_norm else []),
        rule("linear_fc1.weight", ("gate", "up"), GateUp(ffn, hidden)),
        rule("linear_fc2.weight", ("down",), Copy((hidden, ffn), axis=1)),
    ]


def _output_rule(sizes: DenseSizes, vocabulary: Vocabulary) -> Rule:
    name = "output_layer.weight"
    if sizes.num_labels is not None:
        return Rule(name, ("score.weight",), Copy((sizes.num_labels, sizes.hidden_size)), stage="last")
    if sizes.tied:
        return Rule(name, (HF_EMBEDDING,), vocabulary, stage="last", tied_copy=True)
    return Rule(name, ("lm_head.weight",), vocabulary, stage="last")


def _num_labels(hf_config: dict[str, Any]) -> int | None:
    if not str((hf_config.get("architectures") or [""])[0]).endswith("ForSequenceClassification"):
        return None
    labels = len(hf_config.get("id2label") or "01")
    if labels != 1:
        raise ModelError(f"config.json: id2label has {labels} labels, but a reward model has a single one, its score")
    return labels
