"""Micro-batches are made one ahead of the device, in a thread, in order; padded to one length they give the same gradients."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.stream import ScorePosition, context_parallel_shard, laid_tokens, pack, split_shared_prompts
from tests.families import build_folder
from tests.megatron.moments import merged
from tests.themes.parallel.worlds import MODES, gradients, micro_batches, objective, units
from tests.world import World

CPU, META = torch.device("cpu"), torch.device("meta")


class Makers:
    """Four makers of numbers; says which have been made, and in which threads."""

    def __init__(self, failing: int | None = None) -> None:
        self.made: list[int] = []
        self.threads: set[int] = set()
        self.failing = failing
        self.is_made = [threading.Event() for _ in range(4)]

    def __getitem__(self, number: int) -> int:
        if number == self.failing:
            raise ValueError(f"micro-batch {number}")
        self.made.append(number)
        self.threads.add(threading.get_ident())
        self.is_made[number].set()
        return 10 * number

    def all(self) -> list[Any]:
        return [lambda number=number: self[number] for number in range(4)]


def test_the_next_is_made_in_a_thread_while_one_is_used_and_no_more() -> None:
    from megarl.megatron.prefetch import Prefetched

    makers = Makers()
    with Prefetched(makers.all(), CPU) as items:
        for number, item in enumerate(items.iterator()):
            assert item == 10 * number
            if number < 3:
                assert makers.is_made[number + 1].wait(20)
            assert makers.made == list(range(min(number + 2, 4)))
    assert threading.get_ident() not in makers.threads
    assert len(makers.threads) == 1


def test_every_model_chunk_is_given_every_micro_batch_once_made() -> None:
    from megarl.megatron.prefetch import Prefetched

    makers = Makers()
    with Prefetched(makers.all(), CPU, takers=2) as items:
        first, second = items.iterator(), items.iterator()
        taken = [next(first), next(first), next(second), next(second), next(first), next(second), next(first), next(second)]
        assert not items._waiting  # nothing is kept that all have taken
    assert taken == [0, 10, 0, 10, 20, 20, 30, 30]
    assert makers.made == [0, 1, 2, 3]


def test_what_fails_in_the_thread_fails_where_it_is_taken() -> None:
    from megarl.megatron.prefetch import Prefetched

    with Prefetched(Makers(failing=2).all(), CPU) as items:
        found = items.iterator()
        assert [next(found), next(found)] == [0, 10]
        with pytest.raises(ValueError, match="micro-batch 2"):
            next(found)


def test_copies_to_a_device_leave_from_pinned_memory_and_are_kept_until_they_are_used(monkeypatch: Any) -> None:
    from megarl.megatron.prefetch import _Arrival, pinned_copies

    pinned: list[Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    source, there = torch.arange(3), torch.zeros(2, device=META)
    with pinned_copies() as copies:
        assert source.to(META).device == META
        assert source.to(CPU) is source
        assert there.to(META) is there
        assert source.to(torch.float32).dtype == torch.float32
    source.to(META)  # outside, as ever
    assert len(copies) == 1
    assert [id(tensor) for tensor in pinned] == [id(source)]

    said: list[str] = []

    class Stream:
        def wait_event(self, event: str) -> None:
            said.append(f"waits for {event}")

    class Copy:
        def record_stream(self, stream: Stream) -> None:
            said.append("is used there")

    _Arrival("event", [Copy(), Copy()]).await_on(Stream())  # type: ignore[list-item]
    assert said == ["waits for event", "is used there", "is used there"]


def test_attention_that_is_made_in_main_memory_is_moved_whole() -> None:
    from megarl.megatron.attention import stream_attention
    from megarl.megatron.prefetch import on_device

    stream = pack(units())
    made = stream_attention(stream, context_parallel_shard(stream, 1, 0), torch.float32)
    calls = on_device(made, META).calls[None]
    assert [call.queries.shape for call in calls] == [call.queries.shape for call in made.calls[None]]
    for call in calls:
        of_call = [call.queries, call.keys, call.source, call.target, *([] if call.bias is None else [call.bias])]
        assert {tensor.device for tensor in of_call} == {META}


@pytest.mark.parametrize("position", ScorePosition)
@pytest.mark.parametrize("segment_multiple", [1, 4])
@pytest.mark.parametrize("pad_to_multiple", [4, 256])
def test_the_length_of_a_stream_is_known_before_it_is_laid(
    position: ScorePosition, segment_multiple: int, pad_to_multiple: int
) -> None:
    multiples = {"position": position, "segment_multiple": segment_multiple, "pad_to_multiple": pad_to_multiple}
    for given in (units(), split_shared_prompts(units()), units()[:1]):
        assert laid_tokens(given, **multiples) == len(pack(given, **multiples).token_ids)  # type: ignore[arg-type]


def trained(rank: int, world_size: int, folder: Path, layout: Layout, padded_tokens: int | None) -> dict[str, Any]:
    """Gradients of a pass, the lengths of streams that layers saw, and how often a stage told another a shape."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.megatron.step import forward_backward

    initialize_layout(layout, seed=1)
    role = RankModel(ModelOptions(str(folder), layout, padded_tokens=padded_tokens), OptimizerOptions(lr=1e-3))
    lengths: set[int] = set()
    for chunk in role.chunks:
        chunk.train()
        for layer in chunk.module.decoder.layers:
            layer.mlp.register_forward_hook(lambda module, inputs, found: lengths.add(inputs[0].shape[0]))
    told = 0
    tell = P2PCommunicator._communicate_shapes

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal told
        told += 1
        return tell(*arguments, **named)

    P2PCommunicator._communicate_shapes = counted
    try:
        forward_backward(
            role.chunks, role.options, micro_batches(MODES["unpacked"], layout.dp)[layout.coords(rank).dp], objective
        )
    finally:
        P2PCommunicator._communicate_shapes = tell
    role.optimizer.prepare_grads()
    return {"gradients": gradients(role), "lengths": lengths, "told": told}


@pytest.mark.parametrize(
    ("family", "layout", "of_rank"),
    [
        ("llama", Layout(pp=2), 61),
        pytest.param("llama", Layout(cp=2), 32, marks=pytest.mark.exhaustive),
        pytest.param("llama", Layout(pp=2, vpp=2), 61, marks=pytest.mark.exhaustive),
        pytest.param("mixtral", Layout(dp=2, ep=2), 61, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5", Layout(tp=2, sequence_parallel=True), 31, marks=pytest.mark.exhaustive),
    ],
)
def test_micro_batches_padded_to_one_length_give_the_same_gradients(
    world: World, tmp_path: Path, family: str, layout: Layout, of_rank: int
) -> None:
    build_folder(family, tmp_path / "model")
    plain = world.call(trained, tmp_path / "model", layout, None, size=2)
    padded = world.call(trained, tmp_path / "model", layout, 61, size=2)
    assert {length for rank in padded for length in rank["lengths"]} == {of_rank}
    assert len({length for rank in plain for length in rank["lengths"]}) > 3
    if layout.pp > 1:
        assert [rank["told"] for rank in padded] == [0, 0]
        assert all(rank["told"] for rank in plain)
    expected, found = merged(plain, "gradients"), merged(padded, "gradients")
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        # float32 sums over rows that are zero take another order; linear attention's small elements show it most
        assert float((found[name] - gradient).abs().max()) <= 5e-6 * float(gradient.abs().max()), name


def order_of(rank: int, world_size: int, folder: Path, reads_ahead: bool) -> list[str]:
    """What a part of an option is asked in a pass of four micro-batches, and how many `begin` is given."""
    from megarl.data.stream import Response, Unit
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.pass_parts import PassPart
    from megarl.megatron.rank_model import RankModel

    events: list[str] = []

    class Noting(PassPart):
        def placed(self, units: Any) -> Any:
            events.append("placed")
            return units

        def joins(self, *, training: bool) -> bool:
            return True

        def lay(self, *arguments: Any) -> None:
            events.append("laid")

        def begin(self, streams: Any, given: Any) -> None:
            events.append(f"begin {len(given)}")

        def forward(self, model: Any, given: Any) -> Any:
            events.append("forward")
            return super().forward(model, given)

    initialize_layout(Layout(), seed=1)
    role = RankModel(ModelOptions(str(folder), Layout(), trainable=False))
    part = Noting()
    part.reads_ahead = reads_ahead  # type: ignore[misc]
    role.parts = (part,)
    tokens = torch.arange(4)
    response = Response(0, tokens[:2], torch.ones(2, dtype=torch.bool))
    role.forward([[Unit(tokens, [response])] for _ in range(4)])
    return events


def test_all_micro_batches_are_laid_first_only_for_parts_that_read_ahead(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    ahead, not_ahead = (world.call(order_of, tmp_path / "model", reads, size=1)[0] for reads in (True, False))
    assert ahead == ["placed"] * 4 + ["laid"] * 4 + ["begin 4"] + ["forward"] * 4
    assert not_ahead[:5] == ["placed"] * 4 + ["begin 0"]
    assert not_ahead[: not_ahead.index("forward")].count("laid") <= 2
    assert (not_ahead.count("laid"), not_ahead.count("forward")) == (4, 4)
