"""Real training ranks push their weights; every rank of an engine is handed exactly the boxes that the plan says it holds.

The bytes are those of the checkpoint that the ranks loaded, read as whole tensors from its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.config.layout import Layout
from megarl.models.registry import load_hf_config
from megarl.reshard.plan import plan_reshard
from megarl.reshard.targets import Target
from tests.families import build_folder
from tests.world import World

TPS = (1, 2, 4)


class Collecting:
    """An engine's side of the transport: reads each rank's places of the shared buffer, as its payload names them."""

    align_bytes = 16
    in_flight = 1

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        self.found: dict[int, dict[str, Tensor]] = {rank: {} for rank in range(layout.tp)}

    def slices(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Sequence[Tensor]]]:
        """As the sender through shared memory."""
        from megarl.rollout.checksums import held_slices

        return [(name, held_slices(name, weight, self.layout)) for name, weight in bucket]

    def new_checksums(self, values: bool) -> None:
        """The bytes themselves are compared."""

    def deliver(self, staged: Any) -> None:
        """Copy what the payloads of all ranks point at."""
        for engine_rank, found in self.found.items():
            for name, part in staged.tensors(engine_rank):
                assert name not in found, f"{name} was sent twice"
                found[name] = part.clone()

    def finish(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


def engine_layout(folder: str, tp: int) -> Any:
    """How an engine of `tp` ranks holds the model of `folder`."""
    from megarl.models.hf_folder import HFFolder
    from megarl.rollout.checksums import EngineLayout

    config = HFFolder(folder).config
    tied, kv_heads = bool(config.get("tie_word_embeddings")), config["num_key_value_heads"]
    return EngineLayout(kv_heads=kv_heads, tied_embeddings=tied, dtype=torch.float32, tp=tp)


def received(rank: int, world_size: int, folder: str, layout: Layout) -> dict[tuple[int, int], dict[str, Tensor]]:
    """What this rank hands to each rank of engines of every size in `TPS`: (tp, engine rank) -> name -> slice."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.roles import Role
    from megarl.workers import weight_sync

    initialize_layout(layout, seed=1)
    role = Role(ModelOptions(folder, layout))
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    for tp in TPS:
        pusher, engine = weight_sync.Pusher(), Collecting(engine_layout(folder, tp))
        at = layout.coords(rank)
        if not (at.tp or at.dp or at.cp):
            pusher.connect(0, lambda engine=engine: engine)  # type: ignore[misc]
        with mock.patch.object(weight_sync, "BUCKET_BYTES", 2**13):
            pushed = pusher.push(role.export())
        assert all(one.error is None for one in pushed.values())
        found |= {(tp, engine_rank): tensors for engine_rank, tensors in engine.found.items()}
    return found


def merged(answers: Sequence[dict[tuple[int, int], dict[str, Tensor]]]) -> dict[tuple[int, int], dict[str, Tensor]]:
    """What all training ranks together handed over; nothing may come from two of them."""
    together: dict[tuple[int, int], dict[str, Tensor]] = {}
    for answer in answers:
        for place, tensors in answer.items():
            assert not together.setdefault(place, {}).keys() & tensors.keys()
            together[place] |= tensors
    return together


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", Layout()),
        ("llama", Layout(pp=4)),
        ("qwen2", Layout(tp=2, pp=2)),
        ("qwen3", Layout(tp=2, pp=2, vpp=2)),
        ("mistral", Layout(dp=2, pp=2, first_stage_layers=3)),
        ("mixtral", Layout(dp=4, ep=2)),
        ("qwen3_moe", Layout(tp=2, dp=2, ep=2, etp=2)),
    ],
)
def test_every_rank_of_an_engine_is_handed_the_bytes_of_its_boxes(
    world: World, tmp_path: Path, family: str, layout: Layout
) -> None:
    build_folder(family, tmp_path / "model")
    whole = load_file(tmp_path / "model" / "model.safetensors")
    together = merged(world.call(received, str(tmp_path / "model"), layout, size=layout.world_size))
    for tp in TPS:
        plan = plan_reshard(load_hf_config(tmp_path / "model"), layout, Target(tp=tp, whole="experts"))
        for engine_rank in range(tp):
            handed = {name: part for name, part in together[tp, engine_rank].items() if part.numel()}
            boxes = plan.slices(engine_rank)
            assert handed.keys() == boxes.keys()
            for name, (row, rows, col, cols) in boxes.items():
                tensor = whole[name].reshape(len(whole[name]), -1)[row : row + rows, col : col + cols]
                assert torch.equal(handed[name].reshape(rows, cols), tensor), (tp, engine_rank, name)


def exported_by_replicas(rank: int, world_size: int, folder: str, layout: Layout) -> list[dict[str, Tensor]]:
    """What this rank exports when both replicas do, when the second does, and when none does."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.roles import Role

    initialize_layout(layout, seed=1)
    role = Role(ModelOptions(folder, layout))
    return [{name: value.clone() for name, value in role.export(replicas=given)} for given in ((0, 1), (1,), ())]


def test_each_replica_can_export_everything_on_its_own(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    whole = load_file(tmp_path / "model" / "model.safetensors")
    answers = world.call(exported_by_replicas, str(tmp_path / "model"), Layout(tp=2, dp=2), size=4)
    for way, leading in enumerate(({0, 2}, {2}, set())):
        for rank, answer in enumerate(answers):
            assert answer[way].keys() == (whole.keys() if rank in leading else set())
            assert all(torch.equal(tensor, whole[name]) for name, tensor in answer[way].items())


def given_to_engines(rank: int, world_size: int, folder: str, layout: Layout) -> list[dict[int, dict[str, Tensor]]]:
    """What this rank gives to each of three engines in an update of all, and then in one of engine 1 alone."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.roles import Role
    from megarl.workers import weight_sync
    from megarl.workers.rank import Rank

    initialize_layout(layout, seed=1)
    mine = Rank("policy", rank, layout, threads=1)
    mine.roles["policy"] = Role(ModelOptions(folder, layout))
    found = []
    for bases in ({0: None, 1: None, 2: None}, {1: None}):
        engines = {number: Collecting(engine_layout(folder, 1)) for number in range(3)}
        with mock.patch.multiple(weight_sync, model_of=lambda target: None, open_sender=lambda target, *_: target):
            mine.open_senders(engines, "tensors")
        pushed = mine.push_weights("policy", bases)
        assert all(one.error is None for one in pushed.values())
        found.append({number: engines[number].found[0] for number in pushed})
    return found


@pytest.mark.parametrize(
    ("family", "layout", "senders"),
    [
        ("llama", Layout(tp=2, dp=2), [{0: {0, 2}, 2: {1}}, {2: {1}}]),
        ("mixtral", Layout(dp=4, ep=2), [{0: {0, 1, 2}}, {0: {1}}]),
    ],
)
def test_replicas_share_the_engines_but_those_that_share_experts_send_as_one(
    world: World, tmp_path: Path, family: str, layout: Layout, senders: list[dict[int, set[int]]]
) -> None:
    build_folder(family, tmp_path / "model")
    whole = load_file(tmp_path / "model" / "model.safetensors")
    answers = world.call(given_to_engines, str(tmp_path / "model"), layout, size=4)
    for update, of_ranks in enumerate(senders):
        assert {rank: set(answer[update]) for rank, answer in enumerate(answers) if answer[update]} == of_ranks
        for answer in answers:
            for tensors in answer[update].values():
                assert tensors.keys() == whole.keys()
                assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())
