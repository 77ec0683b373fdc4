"""Real training ranks push their weights; every rank of an engine is handed exactly the boxes that the plan says it holds.

The bytes are those of the checkpoint that the ranks loaded, read as whole tensors from its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.config import parse_config
from megarl.config.layout import Layout
from megarl.models.adapters import AdapterSpec
from megarl.models.registry import load_hf_config
from megarl.weights.plan import plan_reshard
from megarl.weights.run_plan import plan_of_run
from megarl.weights.sglang_targets import EngineTarget
from tests.families import build_folder
from tests.world import World


class Collecting:
    """An engine's side of the transport: writes what each rank's payload names into what that rank holds of every tensor."""

    in_flight = 1
    waits_for_others = False
    is_checked = False  # the bytes themselves are compared

    def __init__(self, layout: Any, stages: bool = True) -> None:
        self.layout, self.stages = layout, stages
        self.held_by: dict[int, dict[str, Tensor]] = {rank: {} for rank in range(layout.target.ranks)}
        self.written: dict[int, dict[str, Tensor]] = {rank: {} for rank in range(layout.target.ranks)}

    def staging(self, name: str) -> Any:
        """Buffers, or none."""
        from megarl.weights.staging import Staging, ZeroCopy

        return Staging(name=name) if self.stages else ZeroCopy()

    def pieces(self, bucket: Sequence[tuple[str, Tensor]]) -> list[Any]:
        """As a sender of whole tensors."""
        from megarl.weights.rank_plan import SliceKey, WeightSlice

        return [WeightSlice(SliceKey.whole(name, weight), weight) for name, weight in bucket]

    def deliver(self, staged: Any) -> None:
        """Copy the values, and count them."""
        for box, tensor in staged.pieces:
            exact = tensor.float() if tensor.is_floating_point() else tensor.double()  # whole numbers of 32 bits
            values = exact.reshape(box.rows, box.cols)
            for rank in self.held_by if box.engine_rank < 0 else [box.engine_rank]:
                slices = {**self.layout.slices, **self.layout.adapter_slices}[box.tensor]
                width = next(h.cols for h in slices if box.engine_rank < 0 or h.engine_rank == rank)
                for store, part in ((self.held_by, values), (self.written, torch.ones_like(values))):
                    zeros = torch.zeros(box.of_rows, max(width, box.cols), dtype=exact.dtype)
                    mine = store[rank].setdefault(box.tensor, zeros)
                    mine[box.row : box.row + box.rows, box.col : box.col + box.cols] += part

    def join(self) -> None:
        """It is there."""

    def close(self) -> None:
        """Nothing is held."""


def engine_layout(folder: str, tp: int, ep: int = 1, *, predicts: bool = False, lora: AdapterSpec | None = None) -> Any:
    """How an engine of `tp` ranks holds the model of `folder`."""
    from megarl.weights.checksums import EngineLayout
    from megarl.weights.model_compatibility import ServedModel

    return EngineLayout(ServedModel(load_hf_config(folder), "float32", predicts, lora), EngineTarget(tp=tp, ep=ep))


def rank_of(rank: int, folder: str, layout: Layout, dtype: str = "float32", **more: Any) -> Any:
    """This process as a rank of a run, with the model loaded."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.workers.rank_actor import start_rank

    initialize_layout(layout, seed=1)
    mine = start_rank("policy", rank, layout, threads=1)
    mine.roles["policy"] = RankModel(ModelOptions(folder, layout, dtype=dtype, **more))
    mine.load_bytes = 2**13  # so that the model is many loads
    return mine


def given(mine: Any, engines: dict[int, Collecting], bases: Sequence[dict[int, None]], planned: bool) -> list[Any]:
    """What this rank, as a run drives it, gives to engines that take slices (`planned`) or whole tensors."""
    from megarl.weights.sglang_senders import ServerEndpoint
    from megarl.workers import senders

    def opened(target: Any, *_: Any) -> Collecting:
        return engines[int(target.url)] if planned else target

    targets = {
        number: ServerEndpoint(str(number), engine.layout, "token") if planned else engine for number, engine in engines.items()
    }
    found = []
    with mock.patch.multiple(senders, model_of=lambda target: None, open_sender=opened):
        mine.open_senders(targets, "shared_memory" if engines[0].stages else "process_group")
        for some in bases:
            pushed = mine.push_weights("policy", some)
            assert all(one.error is None for one in pushed.values())
            found.append({number: (engines[number].held_by, engines[number].written) for number in pushed})
            for engine in engines.values():
                engine.held_by, engine.written = ({rank: {} for rank in engine.held_by} for _ in range(2))
    return found


def sent_in_turn(rank: int, world_size: int, folder: str, layout: Layout, targets: list[tuple[int, int]]) -> list[Any]:
    """What this rank sends to two engines of each of `targets` (tp, ep): from where it lies, or by way of a buffer, in turn."""
    mine, found = rank_of(rank, folder, layout), []
    for target, (tp, ep) in enumerate(targets):
        engines = {number: Collecting(engine_layout(folder, tp, ep), stages=bool(target % 2)) for number in range(2)}
        mine.parts, mine.pusher, mine.engines = [], None, set()
        found += given(mine, engines, [{0: None, 1: None}], planned=True)
    return found


def load_sizes(rank: int, world_size: int, folder: str) -> list[tuple[int, int]]:
    """What a rank on each platform sends at once: slices as its plan says, and whole tensors."""
    from megarl import platform
    from megarl.weights.sglang_senders import ServerEndpoint
    from megarl.workers import senders
    from megarl.workers.rank import Rank

    loaded, found = rank_of(rank, folder, Layout()), []
    engine = Collecting(engine_layout(folder, 1))
    for name in ("cpu", "cuda"):
        mine = Rank("policy", rank, Layout(), 1, platform.named(name))
        mine.roles = loaded.roles
        with mock.patch.multiple(senders, model_of=lambda _: None, open_sender=lambda *_: engine):
            mine.open_senders({0: ServerEndpoint("0", engine.layout, "token")}, "shared_memory")
        (part,) = mine.parts
        assert mine.pusher is not None
        found.append((part.load_bytes, mine.pusher.load_bytes))
    return found


def test_a_rank_stages_what_the_plan_of_its_platform_says(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    tree = {"data": {"train": {"source": "jsonl", "path": "x"}}, "rewards": [{"name": "exact_number"}]}
    config = parse_config(tree | {"model": {"path": str(tmp_path / "model")}})
    planned = [plan_of_run(config, name).load_bytes for name in ("cpu", "cuda")]
    assert planned == [128 * 2**20, 2**30]
    (of_rank,) = world.call(load_sizes, str(tmp_path / "model"), size=1)
    assert of_rank == [(size, size) for size in planned]


def together(answers: Sequence[Any], engine: int, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sums of what all training ranks wrote into a rank of an engine, and of how often."""
    sums: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for answer in answers:
        for total, part in zip(sums, answer.get(engine, ({}, {})), strict=True):
            for name, values in part.get(rank, {}).items():
                total[name] = total[name] + values if name in total else values
    return sums


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", Layout()),
        ("llama", Layout(pp=4)),
        ("llama", Layout(tp=4)),
        ("qwen2", Layout(tp=2, pp=2)),
        ("qwen3", Layout(tp=2, pp=2, vpp=2)),
        ("mistral", Layout(dp=2, pp=2, first_stage_layers=3)),
        ("llama", Layout(tp=2, cp=2)),
        ("mixtral", Layout(dp=4, ep=2)),
        ("qwen3_moe", Layout(tp=2, dp=2, ep=2, etp=2)),
        ("mixtral", Layout(tp=2, dp=2, ep=4)),
    ],
)
def test_every_rank_of_an_engine_is_handed_the_bytes_of_its_boxes_once_by_the_ranks_that_have_them(
    world: World, tmp_path: Path, family: str, layout: Layout
) -> None:
    build_folder(family, tmp_path / "model")
    whole = load_file(tmp_path / "model" / "model.safetensors")
    has_experts = family in ("mixtral", "qwen3_moe")
    targets = [(1, 1), (2, 1), (4, 1), *([(2, 2), (4, 2)] if has_experts else [])]
    answers = world.call(sent_in_turn, str(tmp_path / "model"), layout, targets, size=layout.world_size)
    for number, (tp, ep) in enumerate(targets):
        plan = plan_reshard(load_hf_config(tmp_path / "model"), layout, EngineTarget(tp=tp, ep=ep))
        for engine, engine_rank in product(range(2), range(tp)):
            values, counts = together([answer[number] for answer in answers], engine, engine_rank)
            boxes = plan.slices(engine_rank)
            assert values.keys() == boxes.keys()
            for name, (row, rows, col, cols) in boxes.items():
                tensor = whole[name].reshape(len(whole[name]), -1)[row : row + rows, col : col + cols]
                assert torch.equal(values[name], tensor), (tp, ep, engine, engine_rank, name)
                assert bool((counts[name] == 1).all()), (tp, ep, engine, engine_rank, name)
        assert all(sum(len(part) for part in answer[number].values()) for answer in answers), "a rank sends nothing"


def exported_by_replicas(rank: int, world_size: int, folder: str, layout: Layout) -> list[dict[str, Tensor]]:
    """What this rank exports when both replicas do, when the second does, and when none does."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel

    initialize_layout(layout, seed=1)
    role = RankModel(ModelOptions(folder, layout))
    return [{name: value.clone() for name, value in role.export(replicas=given)} for given in ((0, 1), (1,), ())]


def test_each_replica_can_export_everything_on_its_own(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    whole = load_file(tmp_path / "model" / "model.safetensors")
    answers = world.call(exported_by_replicas, str(tmp_path / "model"), Layout(tp=2, dp=2), size=4)
    for way, leading in enumerate(({0, 2}, {2}, set())):
        for rank, answer in enumerate(answers):
            assert answer[way].keys() == (whole.keys() if rank in leading else set())
            assert all(torch.equal(tensor, whole[name]) for name, tensor in answer[way].items())


def given_whole(rank: int, world_size: int, folder: str, layout: Layout) -> list[dict[int, dict[str, Tensor]]]:
    """What this rank gives to each of three engines that take whole tensors, all of them and then engine 1 alone."""
    engines = {number: Collecting(engine_layout(folder, 1)) for number in range(3)}
    found = given(rank_of(rank, folder, layout), engines, [dict.fromkeys(range(3)), {1: None}], planned=False)
    return [{number: held[0] for number, (held, _) in answer.items()} for answer in found]


@pytest.mark.parametrize(
    ("family", "layout", "senders"),
    [
        ("llama", Layout(tp=2, dp=2), [{0: {0, 2}, 2: {1}}, {2: {1}}]),
        ("mixtral", Layout(dp=4, ep=2), [{0: {0, 1, 2}}, {0: {1}}]),
    ],
)
def test_replicas_share_engines_that_take_whole_tensors_but_those_that_share_experts_send_as_one(
    world: World, tmp_path: Path, family: str, layout: Layout, senders: list[dict[int, set[int]]]
) -> None:
    build_folder(family, tmp_path / "model")
    whole = load_file(tmp_path / "model" / "model.safetensors")
    answers = world.call(given_whole, str(tmp_path / "model"), layout, size=4)
    for update, of_ranks in enumerate(senders):
        assert {rank: set(answer[update]) for rank, answer in enumerate(answers) if answer[update]} == of_ranks
        for answer in answers:
            for tensors in answer[update].values():
                assert tensors.keys() == whole.keys()
                assert all(torch.equal(tensor.view_as(whole[name]), whole[name]) for name, tensor in tensors.items())
