"""Flows share ports evenly, wait for each other, and are no faster than the busiest port allows."""

from __future__ import annotations

import pytest

from megarl.weights.simulated_network import SimulatedNetwork


def test_a_flow_is_as_fast_as_its_slowest_share_and_begins_when_those_before_it_have_ended() -> None:
    network = SimulatedNetwork({"wide": 10, "narrow": 5})
    first = network.flow(100, [("wide", 0), ("narrow", 0)])  # 5 a second, whoever is beside it
    second = network.flow(100, [("wide", 0)], wait_s=1)  # 5 a second until the first has ended, then 10
    network.flow(10, [("narrow", 0)], after=[first, second], wait_s=1)
    assert network.play() == pytest.approx([20, 20.5, 23.5])
    assert network.busiest_s() == 22
    assert network.busiest_s(["wide"]) == 20


def test_flows_of_other_ports_do_not_wait_and_one_without_bytes_only_waits() -> None:
    network = SimulatedNetwork({"link": 2})
    flows = [network.flow(8, [("link", number)]) for number in range(3)]
    last = network.flow(0, after=flows, wait_s=0.5)
    assert network.play() == pytest.approx([4, 4, 4, 4.5])
    assert last == 3


def test_three_flows_over_one_port_end_when_it_has_carried_them() -> None:
    network = SimulatedNetwork({"link": 3})
    for nbytes in (3, 6, 9):
        network.flow(nbytes, [("link", "a")])
    assert network.play() == pytest.approx([3, 5, 6])  # 1, then 3/2, then 3 a second
