"""What the dense families share: a decoder of RMSNorm, grouped attention with rotary positions and a gated SiLU MLP.

Reads a Hugging Face config (transformers 4 or 5 spelling), refuses what megatron-core cannot represent, and gives the
common arguments and rules. An architecture's own file adds what is its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megarl.errors import ModelError
from megarl.models.packings import Copy, GateUp, GroupedQKV, Vocabulary
from megarl.models.rope import rope_kwargs
from megarl.models.weight_map import Rule, WeightMap

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."
HF_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class DenseSizes:
    """The sizes of a dense decoder. `num_labels` is 1 for a reward model with a scalar head, None with a vocabulary."""

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
                f"config.json: num_key_value_heads is {num_groups}, but it must divide num_attention_heads={num_heads}"
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


def size(hf_config: dict[str, Any], field: str, default: int | None = None) -> int:
    """A positive integer field, `default` where it is absent or null.

    Raises:
        ModelError: it is absent without a default, or no positive integer.
    """
    value = hf_config.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {field} is {value!r}, but it must be a positive integer")
    return value


def refuse(hf_config: dict[str, Any], field: str, supported: Any, why: str) -> None:
    """Raise ModelError unless a field is absent, null or `supported`."""
    value = hf_config.get(field)
    if value is not None and value != supported:
        raise ModelError(f"config.json: {field} is {value!r}, but it may only be {supported!r}: {why}")


def transformer_config_kwargs(hf_config: dict[str, Any], sizes: DenseSizes) -> dict[str, Any]:
    """Keyword arguments of megatron-core's TransformerConfig, but for `activation`, a name the caller translates.

    Dropout is left to the caller: it belongs to the training run.

    Raises:
        ModelError: the config asks for something that cannot be represented.
    """
    refuse(hf_config, "hidden_act", "silu", "the dense families are built with a gated SiLU MLP")
    refuse(hf_config, "quantization_config", None, "training needs weights that are not quantised")
    refuse_sliding_window(hf_config, sizes.num_layers)
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
    }


def gpt_kwargs(hf_config: dict[str, Any], sizes: DenseSizes) -> dict[str, Any]:
    """Keyword arguments of megatron-core's GPTModel; `vocab_size` is without padding.

    Raises:
        ModelError: the rotary embedding cannot be represented.
    """
    return {
        "vocab_size": sizes.vocab_size,
        "max_sequence_length": size(hf_config, "max_position_embeddings"),
        "share_embeddings_and_output_weights": sizes.tied and sizes.num_labels is None,
        **rope_kwargs(hf_config),
    }


def refuse_sliding_window(hf_config: dict[str, Any], num_layers: int) -> None:
    """Raise ModelError if a layer attends through a sliding window (transformers' rule for `max_window_layers`)."""
    full_until = hf_config.get("max_window_layers", 0) if hf_config.get("use_sliding_window") else num_layers
    slides = full_until < num_layers and hf_config.get("sliding_window") is not None
    if any(kind != "full_attention" for kind in hf_config.get("layer_types") or ()):
        raise ModelError("config.json: layer_types names other layers than 'full_attention', which is all that is supported")
    if slides and not hf_config.get("layer_types"):
        raise ModelError(
            f"config.json: use_sliding_window is true with max_window_layers={full_until} of {num_layers} layers, "
            "but only full attention is supported; it may be false"
        )


def weight_map(sizes: DenseSizes, own_rules: Iterable[Rule] = ()) -> WeightMap:
    """The rules common to the dense families, with an architecture's `own_rules`."""
    hidden, layer, hf_layer = sizes.hidden_size, LAYER, HF_LAYER
    attention, mlp = hf_layer + "self_attn.", hf_layer + "mlp."
    vocabulary = Vocabulary(sizes.vocab_size, hidden)
    return WeightMap(
        num_layers=sizes.num_layers,
        rules=(
            Rule("embedding.word_embeddings.weight", (HF_EMBEDDING,), vocabulary, stage="first"),
            Rule(
                layer + "input_layernorm.weight",
                (hf_layer + "input_layernorm.weight",),
                Copy((hidden,)),
                fused_norm_name=layer + "self_attention.linear_qkv.layer_norm_weight",
            ),
            Rule(
                layer + "self_attention.linear_qkv.weight",
                (attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"),
                GroupedQKV(sizes.num_heads, sizes.num_groups, sizes.head_dim, hidden),
            ),
            *own_rules,
            Rule(
                layer + "self_attention.linear_proj.weight",
                (attention + "o_proj.weight",),
                Copy((hidden, sizes.num_heads * sizes.head_dim), axis=1),
            ),
            Rule(
                layer + "pre_mlp_layernorm.weight",
                (hf_layer + "post_attention_layernorm.weight",),
                Copy((hidden,)),
                fused_norm_name=layer + "mlp.linear_fc1.layer_norm_weight",
            ),
            Rule(
                layer + "mlp.linear_fc1.weight",
                (mlp + "gate_proj.weight", mlp + "up_proj.weight"),
                GateUp(sizes.ffn_size, hidden),
            ),
            Rule(layer + "mlp.linear_fc2.weight", (mlp + "down_proj.weight",), Copy((hidden, sizes.ffn_size), axis=1)),
            Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Copy((hidden,)), stage="last"),
            _output_rule(sizes, vocabulary),
        ),
    )


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
