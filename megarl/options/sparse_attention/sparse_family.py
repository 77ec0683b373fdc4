"""A family with DeepSeek-V3's layers whose queries attend to chosen keys: fields, sizes, arguments and rules.

A layer's indexer scores the keys before each query, and its attention is over the `index_topk` of them that score highest.
Layers that are called `shared` have no indexer and take the choices of the last one before them that has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import Any

from megarl.errors import ModelError
from megarl.models import deepseek_v3, dense
from megarl.models.architecture import Architecture, HFConfig, SglangFacts
from megarl.models.hf_fields import refuse, size, with_defaults
from megarl.models.packings import Copy
from megarl.models.text_family import text_family
from megarl.models.weight_map import Rule, WeightMap

VARIANT = "indexed_attention"
"""Value of megatron-core's field `experimental_attention_variant`; its own `dsa` comes with demands of its own layers."""
FULL, SHARED = "full", "shared"
DEFAULTS = {
    "index_topk": 2048,
    "index_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
"""transformers', of both families."""
NOT_SERVED = (
    "SGLang computes the indexer by kernels for GPUs alone, and it is not proven where its servers hold the indexer's weights; "
    "the embedded engine computes these models"
)


class Indexing(IntFlag):
    """What a layer does, as an entry of megatron-core's `linear_attention_freq`, which says which layers have a variant."""

    CHOOSES = 1
    """It has an indexer."""
    FOLLOWS = 2
    """It takes the choices of the last layer before it that has one."""
    PAIRS = 4
    """Indexers rotate neighbouring pairs; else halves."""


@dataclass(frozen=True)
class IndexerSizes:
    """An indexer has `heads` of width `head_dim`, and chooses `top_k` keys. `kinds`: by layer `full` or `shared`."""

    heads: int
    head_dim: int
    top_k: int
    kinds: tuple[str, ...]

    @classmethod
    def from_hf(cls, hf_config: HFConfig, *, shares_choices: bool) -> IndexerSizes:
        """Read a config with its defaults.

        Raises:
            ModelError: a field is missing, no positive integer, or contradicts another, or layers share choices in a family
                that has none that do.
        """
        sizes = cls(
            size(hf_config, "index_n_heads"),
            size(hf_config, "index_head_dim"),
            size(hf_config, "index_topk"),
            tuple(_kinds(hf_config)),
        )
        rotated = size(hf_config, "qk_rope_head_dim")
        if sizes.head_dim < rotated:
            raise ModelError(f"config.json: index_head_dim is {sizes.head_dim}; it must be at least qk_rope_head_dim={rotated}")
        if sizes.kinds[0] != FULL:
            raise ModelError("config.json: the first layer is to share choices of keys, but there is no layer before it")
        if not shares_choices and SHARED in sizes.kinds:
            raise ModelError(
                f"config.json: layer {sizes.kinds.index(SHARED)} is to share choices of keys, as none of this family does"
            )
        return sizes

    @property
    def full_layers(self) -> frozenset[int]:
        """The layers that have an indexer."""
        return frozenset(layer for layer, kind in enumerate(self.kinds) if kind == FULL)

    @property
    def followed(self) -> dict[int, int]:
        """By layer that shares choices, the layer that makes them."""
        return {
            layer: max(other for other in self.full_layers if other < layer)
            for layer, kind in enumerate(self.kinds)
            if kind == SHARED
        }


def sparse_family(
    name: str, hf_class: str, *, defaults: Mapping[str, Any], rotates_pairs: bool, shares_choices: bool
) -> Architecture:
    """The architecture of a family; `defaults` are transformers' beside `DEFAULTS`.

    Its indexers rotate neighbouring pairs or halves, and if it `shares_choices`, the config may say which layers do.
    """

    def filled(hf_config: HFConfig) -> HFConfig:
        config = _with_dense_layers(with_defaults(hf_config, {**DEFAULTS, **defaults}))
        for kind in config.pop("layer_types", ()):
            refuse({"layer_types": kind}, "layer_types", VARIANT, "all layers attend to chosen keys")
        return config

    def sizes_of_indexer(hf_config: HFConfig) -> IndexerSizes:
        return IndexerSizes.from_hf(hf_config, shares_choices=shares_choices)

    def transformer_config_kwargs(hf_config: HFConfig, sizes: dense.DenseSizes) -> dict[str, Any]:
        size(hf_config, "q_lora_rank")  # what indexers read
        refuse(hf_config, "indexer_rope_interleave", rotates_pairs, "indexers of this family rotate so in transformers")
        indexer = sizes_of_indexer(hf_config)
        pairs = Indexing.PAIRS if rotates_pairs else Indexing(0)
        by_kind = {FULL: int(Indexing.CHOOSES | pairs), SHARED: int(Indexing.FOLLOWS | pairs)}
        return deepseek_v3.transformer_config_kwargs(hf_config, sizes) | {
            "experimental_attention_variant": VARIANT,
            "linear_attention_freq": [by_kind[kind] for kind in indexer.kinds],
            "dsa_indexer_n_heads": indexer.heads,
            "dsa_indexer_head_dim": indexer.head_dim,
            "dsa_indexer_topk": indexer.top_k,
        }

    def weight_map(hf_config: HFConfig, sizes: dense.DenseSizes) -> WeightMap:
        whole = deepseek_v3.weight_map(hf_config, sizes)
        rules = indexer_rules(sizes.hidden_size, size(hf_config, "q_lora_rank"), sizes_of_indexer(hf_config))
        # The layer for multi-token prediction has an indexer of its own: it is carried into exports as it is.
        return replace(whole, rules=(*whole.rules, *rules), prediction=None)

    return text_family(
        name,
        (hf_class, hf_class.replace("ForCausalLM", "ForSequenceClassification")),
        transformer_config_kwargs,
        weight_map,
        deepseek_v3.gpt_kwargs,
        text_config=filled,
        sizes_of=_sizes,
        sglang=SglangFacts(refusal=lambda hf_config: NOT_SERVED),
        followed=lambda hf_config: sizes_of_indexer(filled(hf_config)).followed,
    )


def indexer_rules(hidden_size: int, query_rank: int, sizes: IndexerSizes) -> list[Rule]:
    """The parameters of an indexer, whole on every tensor rank, under megatron-core's names."""
    prefix, hf = dense.LAYER + "self_attention.core_attention.indexer.", dense.HF_LAYER + "self_attn.indexer."
    shapes = {
        ("linear_wq_b.weight", "wq_b.weight"): (sizes.heads * sizes.head_dim, query_rank),
        ("linear_wk.weight", "wk.weight"): (sizes.head_dim, hidden_size),
        ("k_norm.weight", "k_norm.weight"): (sizes.head_dim,),
        ("k_norm.bias", "k_norm.bias"): (sizes.head_dim,),
        ("linear_weights_proj.weight", "weights_proj.weight"): (sizes.heads, hidden_size),
    }
    return [
        Rule(prefix + name, (hf + hf_name,), Copy(shape), layers=sizes.full_layers) for (name, hf_name), shape in shapes.items()
    ]


def _kinds(hf_config: HFConfig) -> list[str]:
    """By layer whether it chooses keys (`full`) or takes the last choice (`shared`), as transformers reads the fields."""
    layers, field = size(hf_config, "num_hidden_layers"), "indexer_types"
    kinds = hf_config.get(field)
    if kinds is None:
        field, letters = "index_topk_pattern", {"F": FULL, "S": SHARED}
        kinds = hf_config.get(field)
        if isinstance(kinds, str):
            kinds = [letters.get(letter, letter) for letter in kinds]
    if kinds is None:
        every, offset = size(hf_config, "index_topk_freq", default=1), size(hf_config, "index_skip_topk_offset", 2, least=0)
        return [SHARED if max(layer - offset + 1, 0) % every else FULL for layer in range(layers)]
    _check_entries(field, kinds, (FULL, SHARED), layers)
    return list(kinds)


def _with_dense_layers(hf_config: HFConfig) -> HFConfig:
    """The config whose `first_k_dense_replace` says what `mlp_layer_types` does, if there is any."""
    kinds = hf_config.get("mlp_layer_types")
    if kinds is None:
        return hf_config
    _check_entries("mlp_layer_types", kinds, ("dense", "sparse"), size(hf_config, "num_hidden_layers"))
    first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if "dense" in kinds[first:]:
        raise ModelError(f"config.json: mlp_layer_types has a dense layer behind layer {first}, which has experts; it must not")
    return {**hf_config, "first_k_dense_replace": first}


def _check_entries(field: str, entries: Any, allowed: tuple[str, str], layers: int) -> None:
    unknown = [entry for entry in entries if entry not in allowed] if isinstance(entries, (list, tuple)) else [entries]
    if unknown:
        raise ModelError(f"config.json: {field} names {unknown[0]!r}; each entry must be '{allowed[0]}' or '{allowed[1]}'")
    if len(entries) != layers:
        raise ModelError(f"config.json: {field} has {len(entries)} entries; it must have num_hidden_layers={layers}")


def _sizes(hf_config: HFConfig) -> dense.DenseSizes:
    # head_dim says here how many of a head's dimensions rotate; num_key_value_heads means nothing.
    overrides = {"head_dim": size(hf_config, "qk_rope_head_dim"), "num_key_value_heads": None}
    return dense.DenseSizes.from_hf(hf_config | overrides)
