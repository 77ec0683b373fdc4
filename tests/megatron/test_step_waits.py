"""Between the micro-batches of a pass the host never asks the device for a number: it would wait for all queued work."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megarl.algorithms import LossSettings
from megarl.algorithms.preference import PreferenceSettings
from megarl.data.stream import SCORED_IDS, Response, ScorePosition, TopK, Unit
from megarl.experience.objectives import PolicyObjective, ValueObjective
from megarl.megatron.step import on_host
from megarl.options.distillation.formulas import DistillationTerm
from megarl.options.distillation.loss import DistillationLoss
from megarl.options.online_pairs.loss import PairLoss
from megarl.trainers.supervised.objectives import (
    BcoObjective,
    KtoObjective,
    PairObjective,
    ProcessRewardObjective,
    RewardModelObjective,
    SupervisedObjective,
)
from tests.families import build_folder
from tests.families.family import VOCAB_SIZE
from tests.world import World

WAITS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero", "is_nonzero"}
COLUMNS = ("weights", "advantages", "old_log_probs", "reference_log_probs", "rollout_log_probs", "values", "returns")
COLUMNS += ("chosen", "top_entropy", "nll_weights")
TOP = TopK(3, VOCAB_SIZE)


class Waits(TorchFunctionMode):
    """Counts the calls by which main memory gets values of a tensor, while a pass is under way if `progress` is given."""

    def __init__(self, progress: Any = None) -> None:
        super().__init__()
        self.progress = progress
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__getitem__" and any(isinstance(at, torch.Tensor) and at.dtype == torch.bool for at in _places(args[1])):
            name = "nonzero"  # how long the result is only the device knows
        if name == "tensor" and (kwargs or {}).get("device") is not None:
            name = "tolist"  # numbers of main memory: the copy to the device is waited for
        if name in WAITS and (self.progress is None or self.progress.wanted):
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def _places(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def unit(index: int) -> Unit:
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCAB_SIZE, (5,), generator=generator)
    columns = {name: torch.rand(5, generator=generator) - 1 for name in COLUMNS}
    sides = {"pair": index // 2, "is_chosen": index % 2, "labels": index % 2}
    columns |= {name: torch.full((5,), float(value)) for name, value in sides.items()}
    columns |= {SCORED_IDS: torch.arange(3.0).expand(5, 3), "teacher_scored_log_probs": torch.full((5, 3), -3.0)}
    return Unit(torch.randint(0, VOCAB_SIZE, (4,), generator=generator), [Response(index, tokens, torch.ones(5) > 0, columns)])


def waits(rank: int, world_size: int, folder: Path, spec: str) -> dict[str, Counter[str]]:
    from megarl.config.layout import Layout
    from megarl.megatron import step
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.update_guard import WatchedLoss

    initialize_layout(Layout(), seed=1)
    policy = PolicyObjective("clip", LossSettings(clip_low=0.2, clip_high=0.2), kl_coef=0.1, entropy_coef=0.1, shown_rows=2)
    chooses = PolicyObjective("kl_cov", nll_coef=0.1, also_given=("chosen",), arguments={"coef": 0.5})
    policy = replace(policy, terms=(DistillationLoss(DistillationTerm(1.0, "jsd")),))
    settings = PreferenceSettings(rpo_alpha=0.1, mixture={"dpo": 0.8, "bco_pair": 0.2, "sft": 1.0})
    with_reference = ("dpo", "cdpo", "robust_dpo", "ipo", "apo_zero", "apo_down", "bco_pair", "mixture")
    pairs = [PairObjective(name, settings, 6) for name in with_reference]
    pairs += [PairObjective(name, PreferenceSettings(), 6, has_reference=False) for name in ("simpo", "orpo")]
    labelled = [KtoObjective(settings, 6, 0.1), BcoObjective(settings, 6)]
    losses: dict[str, list[Any]] = {
        "log_probs": [
            policy,
            chooses,
            PolicyObjective("dpo", of_stream=PairLoss("dpo", settings)),
            SupervisedObjective(),
            *pairs,
            *labelled,
        ],
        "value": [ValueObjective(0.2), RewardModelObjective(3), ProcessRewardObjective(30)],
    }
    found: dict[str, Counter[str]] = {}
    for head, objectives in losses.items():
        model = RankModel(ModelOptions(str(folder), Layout(), head=head, layer_spec=spec), OptimizerOptions(lr=1e-3))  # type: ignore[arg-type]
        micro_batches = [[unit(2 * number), unit(2 * number + 1)] for number in range(3)]
        for objective in objectives:
            scores = isinstance(objective, RewardModelObjective | ProcessRewardObjective)
            position = ScorePosition.AT if scores else ScorePosition.NEXT
            progress, watched = step.PassProgress(), WatchedLoss(objective)
            with Waits(progress) as mode:
                step.forward_backward(model.chunks, model.options, micro_batches, watched, position=position, progress=progress)
                assert watched.is_finite
                top_k = TOP if head == "log_probs" else None
                step.forward(model.chunks, model.options, micro_batches, position=position, progress=progress, top_k=top_k)
            found[f"{type(objective).__name__} {getattr(objective, 'name', '')}"] = mode.seen
    return found


@pytest.mark.parametrize(
    ("spec", "of_megatron_core"),
    # megatron-core's unfused attention asks which random numbers it is to use
    [("reference", set()), pytest.param("local", {"item"}, marks=pytest.mark.exhaustive)],
)
def test_nothing_of_megarl_waits_in_a_pass(world: World, tmp_path: Path, spec: str, of_megatron_core: set[str]) -> None:
    build_folder("llama", tmp_path / "llama")
    found = world.call(waits, tmp_path / "llama", spec, size=1)[0]
    assert len(found) == 19
    assert {loss: set(seen) for loss, seen in found.items()} == dict.fromkeys(found, of_megatron_core)


def metrics_with_gradients(rank: int, world_size: int, folder: Path) -> list[bool]:
    from megarl.config.layout import Layout
    from megarl.megatron import step
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(Layout(), seed=1)
    model = RankModel(ModelOptions(str(folder), Layout()), OptimizerOptions(lr=1e-3))
    found: list[bool] = []

    def read(of_micro_batches: Any) -> list[dict[str, Any]]:
        found.extend(metrics["sum"].requires_grad for metrics in of_micro_batches)
        return []

    step.metrics_on_host = read  # type: ignore[assignment]
    micro_batches = [[unit(number)] for number in range(2)]
    step.forward_backward(model.chunks, model.options, micro_batches, lambda output, _: (output.sum(), {"sum": output.sum()}))
    return found


@pytest.mark.slow
def test_a_metric_that_a_loss_did_not_detach_does_not_keep_the_pass_in_memory(tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "llama")
    with World(1) as own:  # in which a function is replaced for good
        assert own.call(metrics_with_gradients, tmp_path / "llama")[0] == [False, False]


def test_many_tensors_come_to_main_memory_at_once_as_they_are() -> None:
    tensors = [torch.randn(3, 2), torch.tensor(7.25), torch.randn(0), torch.tensor(3, dtype=torch.int32)]
    with Waits() as mode:
        copies = on_host(tensors)
    assert mode.seen == {"cpu": 1}
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor.double())
    assert on_host([]) == []


def waits_of_routers(rank: int, world_size: int, folder: Path, counts: bool) -> Counter[str]:
    from megarl.config.layout import Layout
    from megarl.megatron import step
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.pass_parts import PassParts
    from megarl.megatron.rank_model import RankModel

    initialize_layout(Layout(), seed=1)
    model = RankModel(ModelOptions(str(folder), Layout()), OptimizerOptions(lr=1e-3))
    progress, micro_batches = step.PassProgress(), [[unit(number)] for number in range(3)]
    watch = model.watch if counts else None
    assert model.watch is not None
    with Waits(progress) as mode:
        routers = PassParts(watch=watch)
        step.forward_backward(
            model.chunks, model.options, micro_batches, SupervisedObjective(), progress=progress, parts=routers
        )
    assert bool(model.watch.sums.any()) is counts
    return mode.seen


def test_counting_what_routers_decide_adds_no_wait(world: World, tmp_path: Path) -> None:
    build_folder("mixtral", tmp_path / "mixtral")
    # megatron-core's dispatcher asks how many tokens each expert has
    without, counted = (world.call(waits_of_routers, tmp_path / "mixtral", counts, size=1)[0] for counts in (False, True))
    assert counted == without
