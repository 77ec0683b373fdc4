"""Layouts as values: which layers and ranks sit where, and what is refused with what proposal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.layout import Layout, closest, divisors
from megarl.errors import LayoutError, WrongValue

EXPERTS = {"num_experts": 4, "expert_ffn_size": 16}
MODEL = {"num_heads": 8, "num_kv_heads": 2, "ffn_size": 96}


def test_all_sizes_that_fit_are_said_and_of_many_the_nearest() -> None:
    assert closest([4, 1, 2], 3) == "1, 2 or 4"
    assert closest(divisors(64), 5) == "1, 2, 4, 8, 16, 32 or 64"
    assert closest(divisors(720), 7) == "5, 6, 8 or 9, among others"


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
        facts = error.facts
    assert isinstance(facts, WrongValue)
    assert (facts.field, facts.value) == ("pp", pp)
    other = re.fullmatch(r"(.+) with vpp = (\w+)(?:, first_stage_layers = (\d+) and last_stage_layers = (\d+))?", facts.allowed)
    ends = re.search(r"first_stage_layers and last_stage_layers to (\d+) and (\d+)", facts.allowed)
    sizes = other[1] if other else facts.allowed[: ends.start()] if ends else facts.allowed
    proposed = [int(size) for size in re.findall(r"\d+", sizes)]
    chunks = vpp if not other else None if other[2] == "null" else int(other[2])
    first, last = (int(layers) if layers else None for layers in (other.groups()[2:] if other else (None, None)))
    for size in proposed:
        Layout(pp=size, vpp=chunks, first_stage_layers=first, last_stage_layers=last).stage_layers(num_layers)
    if ends:
        Layout(pp=pp, vpp=vpp, first_stage_layers=int(ends[1]), last_stage_layers=int(ends[2])).stage_layers(num_layers)
    assert proposed or ends


def test_a_vpp_that_no_stages_of_94_layers_have_is_answered_with_one_that_they_have() -> None:
    with pytest.raises(LayoutError, match="must be 8 with vpp = 2, first_stage_layers = 12 and last_stage_layers = 10"):
        Layout(pp=8, vpp=4).stage_layers(94)
    stages = Layout(pp=8, vpp=2, first_stage_layers=12, last_stage_layers=10).stage_layers(94)
    assert [sum(map(len, stage)) for stage in stages] == [12, *[12] * 6, 10]


def test_deepseeks_61_layers_on_16_stages_get_a_proposal() -> None:
    with pytest.raises(LayoutError, match="first_stage_layers and last_stage_layers to 3 and 2"):
        Layout(pp=16).stage_layers(61)
    assert [len(chunks[0]) for chunks in Layout(pp=16, first_stage_layers=3, last_stage_layers=2).stage_layers(61)] == [
        3, *[4] * 14, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp is 0; it must be at least 1"),
        (
            {"ep": 3, "dp": 4},
            "ep is 3, which times etp = 1 does not divide the 4 ranks of a pipeline stage "
            "(tp * cp * dp = 1 * 1 * 4); it must be 1, 2 or 4",
        ),
        ({"etp": 4, "tp": 2}, "(tp * cp * dp = 2 * 1 * 1); it must be 1 or 2"),
        ({"sequence_parallel": True}, "sequence_parallel needs a tp of at least 2: set tp, or remove sequence_parallel"),
        ({"vpp": 2}, "vpp needs a pp of at least 2: set pp, or remove vpp"),
        ({"pp": 2, "vpp": 1}, "vpp is 1; it must be at least 2, or null for one chunk per stage"),
        ({"first_stage_layers": 2}, "first_stage_layers needs a pp of at least 2: set pp, or remove first_stage_layers"),
        ({"pp": 2, "vpp": 2, "last_stage_layers": 3}, "last_stage_layers is 3; it must be a positive multiple of vpp = 2"),
    ],
)
def test_contradictory_sizes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        Layout(**sizes)


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        (Layout(tp=3), {}, "tp is 3, which does not divide the model's 8 attention heads, 2 KV heads and feed-forward width of "
         "96; it must be 1, 2, 4 or 8"),
        (Layout(tp=4), {"ffn_size": 90}, "feed-forward width of 90; it must be 1 or 2"),
        (Layout(ep=2, dp=2), {}, "ep is 2, which needs experts, and the model has none; it must be 1"),
        (Layout(ep=4, dp=4), {"num_experts": 6}, "ep is 4, which does not divide the model's 6 experts; it must be 1 or 2"),
        (Layout(tp=4, etp=4, sequence_parallel=True), EXPERTS | {"expert_ffn_size": 10},
         "etp is 4, which does not divide an expert's feed-forward width of 10; it must be 1 or 2"),
        (Layout(tp=2), EXPERTS, "sequence_parallel is false, which megatron-core cannot train experts with under tp = 2"),
        (Layout(tp=2, sequence_parallel=True), EXPERTS, "it must be 2, or set ep to more than 1"),
        (Layout(pp=4), {}, "pp is 4, which does not divide the model's 6 layers; it must be 1, 2, 3 or 6, or set "
         "first_stage_layers and last_stage_layers to 1 and 1"),
        (Layout(pp=3, first_stage_layers=5), {}, "first_stage_layers is 5, which with last_stage_layers = null leaves no "
         "equal shares of the model's 6 layers to the other stages of pp = 3; it must be 2, with last_stage_layers = 2"),
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
