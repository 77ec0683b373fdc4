"""Planned bytes of vision towers against what autograd saves in transformers' own, alone and before a decoder on real ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import pytest

from megarl.config.layout import Layout
from megarl.config.sections import PolicyConfig
from megarl.models.shape import shape_of
from megarl.options.pictures.plan_towers import tower_activations
from megarl.planning.activations import Precision
from megarl.planning.memory import Workload, role_memory
from megarl.planning.roles import PlannedRole
from tests.planning.ranks import VOCABULARY, held, tower_saved
from tests.seeing import SEEING, hf_config, tower_grids
from tests.world import World

GRIDS = [(1, 16, 12), (2, 8, 8), (1, 20, 28)]
TOKENS, SCORED, GRID = 256, 192, (1, 8, 12)


def config_of(family: str) -> dict[str, Any]:
    """The config of a family with a tower of six layers, 64 wide, before a decoder of four layers, 128 wide."""
    config = hf_config(family).to_dict()
    tower = {"depth": 6, "num_heads": 4, "window_size": 112, "fullatt_block_indexes": [2, 5]}
    tower |= {"embed_dim": 64, "mlp_ratio": 2, "hidden_size": 128} if family == "qwen2_vl" else {"hidden_size": 64}
    tower |= {"intermediate_size": 100, "out_hidden_size": 128} if family != "qwen2_vl" else {}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    config = config | {"architectures": [f"{SEEING[family].class_prefix}ForConditionalGeneration"]}
    if family == "kimi_k25":
        config["vision_config"] |= {
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "hidden_size": 64,
            "intermediate_size": 100,
        }
        config["text_config"] |= sizes | {"head_dim": 4, "num_key_value_heads": 4}
        return config | {"projection_hidden_size": 64}
    rope = config["text_config"]["rope_parameters"]
    pairs = int(rope.get("partial_rotary_factor", 1) * sizes["head_dim"]) // 2
    rope |= {"mrope_section": [pairs // 2, pairs // 4, pairs // 4]}
    config["vision_config"] |= tower
    config["text_config"] |= sizes | {"rope_parameters": rope}
    return config


CHOICES = [*product(("float32", "bfloat16"), ("none", "full"), ((), ("vision",), ("projector",), ("vision", "projector")))]
SOME = [CHOICES[at] for at in (0, 2, 5, 7, 9, 11, 12, 14)]
"""Half of them, with every two values of their three parts."""
REST = [choice for choice in CHOICES if choice not in SOME]


@pytest.mark.parametrize(
    ("family", "cases"),
    [
        *((family, CHOICES if family == "qwen2_5_vl" else SOME) for family in SEEING),
        # families differ in their layers, not in what dtype, recomputation and freezing do together
        *(pytest.param(family, REST, marks=pytest.mark.exhaustive) for family in SEEING if family != "qwen2_5_vl"),
    ],
    ids=lambda value: value if isinstance(value, str) else "rest" if value is REST else str(len(value)),
)
def test_planned_activations_of_a_tower_are_what_autograd_saves(world: World, family: str, cases: list[Any]) -> None:
    config = config_of(family)
    vision = shape_of(config).vision
    assert vision is not None
    patches = sum(map(prod, GRIDS))
    (measured,) = world.call(tower_saved, config, cases, tower_grids(family, GRIDS), size=1)
    for (dtype, recompute, freeze), (kept, peak) in zip(cases, measured, strict=True):
        of_patch = tower_activations(vision, {"float32": 4, "bfloat16": 2}[dtype], freeze)
        # Cosines and sines belong to what is computed anew, whose inputs of this kind the hooks are not shown.
        unseen = 2 * 4 * vision.hidden / vision.heads if recompute == "full" and "vision" not in freeze else 0.0
        assert patches * (of_patch.kept(recompute) - unseen) == pytest.approx(kept, rel=0.05), (dtype, recompute, freeze)
        if freeze != ("vision", "projector"):  # checkpoints of nothing save their inputs for a moment
            planned = patches * (of_patch.kept(recompute) + of_patch.recomputed(recompute))
            assert planned == pytest.approx(peak, rel=0.02), (dtype, recompute, freeze)


@dataclass(frozen=True)
class Case:
    """A family under a layout, with `options` of ModelOptions, in an update of some micro-batches."""

    family: str
    layout: Layout = field(default_factory=Layout)
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 2

    @property
    def name(self) -> str:
        """For the table and the test's name."""
        sizes = {size: getattr(self.layout, size) or 1 for size in ("tp", "pp", "vpp", "ep", "dp")}
        said = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        said += ["sp"] if self.layout.sequence_parallel else []
        chosen = {name: value for name, value in self.options.items() if name != "freeze"}
        frozen = [f"frozen {' and '.join(self.options['freeze'])}"] if "freeze" in self.options else []
        return " ".join([self.family, *(said or ["one rank"]), *map(str, chosen.values()), *frozen])

    def planned(self, stage: int) -> dict[str, float]:
        """Planned bytes of a rank of a stage; activations are those of decoder and tower."""
        trained = PolicyConfig(freeze=self.options.get("freeze", ()))
        role = PlannedRole("policy", "policy", shape_of(config_of(self.family)), self.layout, False, trained, TOKENS, None)
        itemsize = 2 if self.options.get("dtype") == "bfloat16" else 4
        precision = Precision("reference", itemsize, self.options.get("recompute", "none"))
        work = Workload(TOKENS, SCORED, self.micro_batches, TOKENS / 2, 2 * prod(GRID))
        parts = dict(role_memory(role, stage, precision, work).parts)
        return parts | {"activations": parts["activations"] + parts["tower activations"]}


SP = {"tp": 2, "sequence_parallel": True}
CASES = [
    *(Case(family) for family in SEEING),
    Case("qwen2_5_vl", options={"recompute": "full", "dtype": "bfloat16"}),
    Case("qwen2_5_vl", options={"recompute": "selective"}),
    Case("qwen2_5_vl", options={"freeze": ("vision",)}),
    Case("qwen2_5_vl", options={"freeze": ("vision", "projector"), "recompute": "full"}),
    Case("qwen2_5_vl", Layout(**SP, pp=2), {"dtype": "bfloat16"}, micro_batches=4),
    Case("qwen3_vl", Layout(**SP), {"recompute": "full"}),
    Case("qwen3_vl", Layout(pp=2, dp=2), {"recompute": "full"}, micro_batches=4),
    Case("qwen2_vl", Layout(pp=2, vpp=2), micro_batches=4),
    Case("glm4v_moe", Layout(**SP, ep=2, pp=2), {"recompute": "full", "dtype": "bfloat16"}, micro_batches=4),
    Case("glm4v_moe", Layout(**SP, ep=2), {"dtype": "bfloat16", "freeze": ("vision",)}),
]


def measured(world: World, case: Case) -> list[dict[str, int]]:
    """Bytes of every rank."""
    arguments = (case.layout, config_of(case.family), case.options, TOKENS, SCORED, case.micro_batches, GRID)
    return world.call(held, *arguments, size=case.layout.world_size)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_planned_memory_of_a_model_that_sees_is_what_real_tensors_sum_to(world: World, case: Case) -> None:
    of_ranks = measured(world, case)
    for stage in range(case.layout.pp):
        planned = case.planned(stage)
        ranks = [rank for number, rank in enumerate(of_ranks) if case.layout.coords(number).pp == stage]
        assert {rank["parameters"] for rank in ranks} == {planned["parameters"]}
        for part in ("gradients", "optimizer", "activations"):
            assert planned[part] == pytest.approx(max(rank[part] for rank in ranks), rel=0.1), part
        assert bool(planned["tower activations"]) == (stage == 0 and case.options.get("freeze") != ("vision", "projector"))
