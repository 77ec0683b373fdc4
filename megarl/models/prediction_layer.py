"""The layer for multi-token prediction (MTP) behind a decoder: its rules, by what each family calls its tensors.

From the decoder's output for a token, behind the final norm, and the embedding of the next one it predicts the token after that
(DeepSeek-V3, arXiv 2412.19437, 2.2): the two are normed, joined and projected, and a layer of the family's own, with full
attention and with experts if the model has any, follows. Embedding and output layer are the decoder's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megarl.models.dense import HF_EMBEDDING, HF_LAYER, LAYER, DenseSizes
from megarl.models.hf_fields import size
from megarl.models.packings import Copy
from megarl.models.weight_map import PREDICTION, PredictionLayer, Rule

OWN = PREDICTION + "layers.0."
"""Beginning of its parameters' names: megatron-core's."""


def behind_the_decoder(hf_config: dict[str, Any], sizes: DenseSizes, layer: Iterable[Rule], default: int = 0) -> dict[str, Any]:
    """WeightMap's fields for DeepSeek-V3's names: a further layer of the decoder, which has embedding and output layer again.

    `layer` are the rules of attention and MLP in it, `default` how many there are where the config does not say.
    """
    count = size(hf_config, "num_nextn_predict_layers", default=default, least=0)
    prefixes = tuple(f"model.layers.{sizes.num_layers + number}." for number in range(count))
    if count != 1:
        return {"left_out": prefixes}
    hf = prefixes[0]
    head = HF_EMBEDDING if sizes.tied else "lm_head.weight"
    copies = ((f"{hf}embed_tokens.weight", HF_EMBEDDING), (f"{hf}shared_head.head.weight", head))
    names = (f"{hf}enorm.weight", f"{hf}hnorm.weight", f"{hf}eh_proj.weight", f"{hf}shared_head.norm.weight")
    return {"left_out": prefixes, "prediction": PredictionLayer(_rules(sizes.hidden_size, names, layer, hf), copies)}


def beside_the_decoder(hf_config: dict[str, Any], sizes: DenseSizes, layer: Iterable[Rule]) -> dict[str, Any]:
    """WeightMap's fields for Qwen3-Next's names, which begin with `mtp.`; a config that says nothing may have one layer."""
    if size(hf_config, "mtp_num_hidden_layers", default=1, least=0) != 1:
        return {"left_out": ("mtp.",)}
    names = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight")
    return {"left_out": ("mtp.",), "prediction": PredictionLayer(_rules(sizes.hidden_size, names, layer, "mtp.layers.0."))}


def _rules(hidden: int, names: tuple[str, str, str, str], layer: Iterable[Rule], hf_layer: str) -> tuple[Rule, ...]:
    """`names` are of the norms of embedding and hidden state, the projection, and the norm before the output layer."""
    modules = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    shapes = ((hidden,), (hidden,), (hidden, 2 * hidden), (hidden,))
    rules = [
        Rule(f"{OWN}{module}.weight", (name,), Copy(shape), stage="last")
        for module, name, shape in zip(modules, names, shapes, strict=True)
    ]
    return (*rules, *(_moved(rule, hf_layer) for rule in layer))


def _moved(rule: Rule, hf_layer: str) -> Rule:
    """A rule of the decoder's layers as one of the layer behind them, on the last stage."""
    names = (rule.megatron_name, rule.te_name or "")
    megatron_name, te_name = (name.replace(LAYER, OWN + "transformer_layer.") for name in names)
    hf_names = tuple(name.replace(HF_LAYER, hf_layer) for name in rule.hf_names)
    return replace(rule, megatron_name=megatron_name, te_name=te_name or None, hf_names=hf_names, stage="last", layers=None)
