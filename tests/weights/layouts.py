"""The layouts that resharding is tested between, and small random models of every family, as tensors and as ranks hold them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.models.packings import padded_vocab
from megarl.models.registry import architecture_for
from megarl.models.weight_map import WeightMap
from megarl.models.weight_tensors import shard_from_hf
from megarl.weights.sglang_targets import EngineTarget
from tests.families import FAMILIES
from tests.families.family import SIZES, VOCAB_SIZE

# of 4 layers; etp is tp where ep is 1, as training needs it
SOURCES: dict[str, dict[str, int]] = {
    "one rank": {},
    "tp2": {"tp": 2, "etp": 2},
    "tp4 dp2": {"tp": 4, "dp": 2, "etp": 4},
    "pp4": {"pp": 4},
    "vpp": {"pp": 2, "vpp": 2, "tp": 2, "etp": 2},
    "uneven": {"pp": 2, "first_stage_layers": 3, "dp": 2},
    "uneven ends": {"pp": 3, "first_stage_layers": 1, "last_stage_layers": 1, "tp": 2, "etp": 2},
    "cp2 dp3": {"cp": 2, "dp": 3},
    "tp2 cp2 pp2": {"tp": 2, "cp": 2, "pp": 2, "etp": 2},
    "ep2 dp4": {"dp": 4, "ep": 2},
    "ep4 tp2": {"tp": 2, "dp": 4, "pp": 2, "ep": 4},
    "ep2 etp2": {"tp": 4, "dp": 2, "pp": 2, "ep": 2, "etp": 2},
}
TARGETS: dict[str, EngineTarget] = {
    "one rank": EngineTarget(),
    "5 engines": EngineTarget(engines=5),
    "tp2": EngineTarget(tp=2, engines=2),
    "tp4": EngineTarget(tp=4, engines=3),
    "tp2 ep2": EngineTarget(tp=2, ep=2),
    "tp4 ep2": EngineTarget(tp=4, ep=2, engines=2),
    "tp2 dp2 ep4": EngineTarget(tp=2, dp=2, ep=4, engines=4),
    "tp4 ep2, whole experts": EngineTarget(tp=4, ep=2, whole="experts"),
    "tp2 whole": EngineTarget(tp=2, engines=2, whole="all"),
}


def hf_config(family: str) -> dict[str, Any]:
    """What config.json of the family's tiny model says of its weights."""
    entry = FAMILIES[family]
    return SIZES | {"architectures": [f"{entry.class_prefix}ForCausalLM"]} | entry.settings


def source(name: str, family: str) -> Layout:
    """A layout of `SOURCES`; the experts' own split is left out where there are none."""
    sizes = SOURCES[name]
    return Layout(
        **(sizes if FAMILIES[family].num_experts else {key: n for key, n in sizes.items() if key not in ("ep", "etp")})
    )


def target(name: str, family: str) -> EngineTarget:
    """A target of `TARGETS`; expert parallelism, copies of KV heads and of attention are left out where SGLang has none."""
    wanted = TARGETS[name]
    if FAMILIES[family].linear:  # whose engines have one rank
        return EngineTarget(engines=wanted.engines)
    sglang = architecture_for(hf_config(family)).sglang
    dp = wanted.dp if sglang.replicates_attention else 1
    tp = wanted.tp if sglang.copies_kv_heads else min(wanted.tp, hf_config(family)["num_key_value_heads"])
    ep = wanted.ep if FAMILIES[family].num_experts and tp * dp % wanted.ep == 0 else 1
    return EngineTarget(tp, ep, dp, wanted.engines, wanted.whole)


def weight_map(family: str) -> WeightMap:
    """The weight map of the family's tiny model."""
    config = hf_config(family)
    return architecture_for(config).weight_map(config)


def random_tensors(family: str) -> dict[str, Tensor]:
    """Every Hugging Face tensor of the model; no number comes twice."""
    shapes = weight_map(family).hf_shapes()
    numbers = iter(
        torch.arange(1, 1 + sum(torch.Size(shape).numel() for shape in shapes.values()), dtype=torch.int32).split(
            [torch.Size(shape).numel() for shape in shapes.values()]
        )
    )
    return {name: next(numbers).view(shape) for name, shape in shapes.items()}


def shards_of_ranks(tensors: dict[str, Tensor], family: str, layout: Layout) -> list[dict[str, Tensor]]:
    """What each training rank holds: Megatron parameter -> its shard, as a matrix."""
    rules = list(weight_map(family).bound_rules())
    num_experts, padded = FAMILIES[family].num_experts or 0, padded_vocab(VOCAB_SIZE, layout.tp)
    stages = [[layer for chunk in chunks for layer in chunk] for chunks in layout.stage_layers(4)]
    made: dict[tuple[str, int], Tensor] = {}
    ranks = []
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        held = {}
        for rule in rules:
            is_first = rule.megatron_name.startswith("embedding.")
            if (rule.layer not in stages[at.pp]) if rule.layer is not None else at.pp != (0 if is_first else layout.pp - 1):
                continue
            if rule.expert is not None and rule.expert // (num_experts // layout.ep) != at.ep:
                continue
            place, size = (at.tp, layout.tp) if rule.expert is None else (at.etp, layout.etp)
            key = (rule.megatron_name, place)
            if key not in made:
                is_vocabulary = is_first or rule.megatron_name == "output_layer.weight"
                shard = shard_from_hf(rule, tensors.__getitem__, place, size, padded if is_vocabulary else None)
                made[key] = shard.reshape(len(shard), -1)
            held[rule.megatron_name] = made[key]
        ranks.append(held)
    return ranks
