"""Layouts as values: which layers and ranks sit where, and what is refused with what proposal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.layout import Layout
from megarl.errors import LayoutError

EXPERTS = {"num_experts": 4, "expert_ffn_size": 16}
MODEL = {"num_heads": 8, "num_kv_heads": 2, "ffn_size": 96}


@settings(max_examples=300, deadline=None)
@given(
    pp=st.integers(1, 5),
    vpp=st.one_of(st.none(), st.integers(2, 3)),
    first=st.one_of(st.none(), st.integers(1, 6)),
    last=st.one_of(st.none(), st.integers(1, 6)),
    num_layers=st.integers(1, 30),
)
def test_stages_hold_every_layer_once_and_say_what_was_asked_for(pp, vpp, first, last, num_layers) -> None:
    try:
        layout = Layout(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
        stages = layout.stage_layers(num_layers)
    except LayoutError:
        return
    assert len(stages) == pp
    assert {len(chunks) for chunks in stages} == {vpp or 1}
    in_order = [layer for chunk in range(vpp or 1) for stage in stages for layer in stage[chunk]]
    assert in_order == list(range(num_layers))
    sizes = [sum(map(len, chunks)) for chunks in stages]
    assert first in (None, sizes[0])
    assert last in (None, sizes[-1])
    middle = sizes[(first is not None) : pp - (last is not None)]
    assert len(set(middle)) <= 1
    assert all(size > 0 for size in sizes)


@settings(max_examples=300, deadline=None)
@given(pp=st.integers(2, 9), vpp=st.one_of(st.none(), st.integers(2, 3)), num_layers=st.integers(2, 80))
def test_proposed_stages_fit(pp, vpp, num_layers) -> None:
    layout = Layout(pp=pp, vpp=vpp)
    try:
        layout.stage_layers(num_layers)
        return
    except LayoutError as error:
        text = str(error)
    sizes = re.search(r" pp may be ([\d, ]+)", text)
    for size in [int(n) for n in sizes[1].strip(" ,").split(", ")] if sizes else []:
        Layout(pp=size, vpp=vpp).stage_layers(num_layers)
    uneven = re.search(r"first_stage_layers and last_stage_layers (\d+) and (\d+)", text)
    if uneven:
        Layout(pp=pp, vpp=vpp, first_stage_layers=int(uneven[1]), last_stage_layers=int(uneven[2])).stage_layers(num_layers)


def test_deepseeks_61_layers_on_16_stages_get_a_proposal() -> None:
    with pytest.raises(LayoutError, match="first_stage_layers and last_stage_layers 3 and 2"):
        Layout(pp=16).stage_layers(61)
    assert [len(chunks[0]) for chunks in Layout(pp=16, first_stage_layers=3, last_stage_layers=2).stage_layers(61)] == [
        3, *[4] * 14, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "layout.tp is 0"),
        ({"ep": 3, "dp": 4}, "ep may be 1, 2, 4"),
        ({"etp": 4, "tp": 2}, "etp may be 1, 2"),
        ({"sequence_parallel": True}, "needs layout.tp of at least 2"),
        ({"vpp": 2}, "layout.vpp is 2"),
        ({"first_stage_layers": 2}, "uneven stages need layout.pp of at least 2"),
        ({"pp": 2, "vpp": 2, "last_stage_layers": 3}, "positive multiple of layout.vpp=2"),
    ],
)
def test_contradictory_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        Layout(**sizes)


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        (Layout(tp=3), {}, "8 attention heads, 2 KV heads and a feed-forward width of 96; tp may be 1, 2, 4, 8"),
        (Layout(tp=4), {"ffn_size": 90}, "tp may be 1, 2"),
        (Layout(ep=2, dp=2), {}, "the model has no experts; ep may be 1"),
        (Layout(ep=4, dp=4), {"num_experts": 6}, "ep may be 1, 2"),
        (Layout(tp=4, etp=4, sequence_parallel=True), EXPERTS | {"expert_ffn_size": 10}, "width is 10; etp may be 1, 2"),
        (Layout(tp=2), EXPERTS, "layout.sequence_parallel is false with layout.tp=2"),
        (Layout(tp=2, sequence_parallel=True), EXPERTS, "gradients of the experts; etp may be 2, or ep more than 1"),
        (Layout(pp=4), {}, "layout.pp=4 does not divide the model's 6 layers; pp may be 1, 2, 3, 6"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_hold_the_model_names_the_nearest_that_can(layout: Layout, sizes: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        layout.check_model(**({"num_layers": 6} | MODEL | sizes))


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, cp=2, dp=2, pp=2, ep=4), Layout(tp=2, dp=4, ep=2, etp=2), Layout(cp=2, dp=2, ep=4, pp=3)]
)
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    dense = {(c.tp, c.cp, c.dp, c.pp) for c in map(layout.coords, range(layout.world_size))}
    expert = {(c.etp, c.ep, c.edp, c.pp) for c in map(layout.coords, range(layout.world_size))}
    assert len(dense) == len(expert) == layout.world_size
    for rank in range(layout.world_size):
        c = layout.coords(rank)
        assert layout.rank(tp=c.tp, cp=c.cp, dp=c.dp, pp=c.pp) == rank
