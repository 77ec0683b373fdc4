"""The lines of `megarl plan` on checkpoints in the nodes' memory."""

from __future__ import annotations

from typing import Any

from megarl.options.elastic.copies_plan import SLOTS, CopiesPlan, copies_of
from megarl.planning.plan import CapacityPlan

SHARED_MEMORY_SHARE = 0.5
"""Share of main memory that Linux gives /dev/shm where nobody says otherwise."""


def times_as_json(plan: CapacityPlan) -> dict[str, Any]:
    """Figures that stand beside the phases of a step."""
    copies = copies_of(plan)
    if copies is None:
        return {}
    return {
        "memory_checkpoints": {
            "own_bytes": copies.own,
            "buddy_bytes": copies.buddys,
            "checkpoints": SLOTS,
            "shared_memory_bytes_of_a_node": copies.shared_memory,
            "main_memory_bytes_of_a_node": copies.main_memory,
            "sent_bytes_of_a_node": copies.sent,
            "copy_s": copies.copy_s,
            "send_s": copies.send_s,
            "share_of_step": copies.copy_s / copies.step_s,
            "network_share_of_step": copies.send_s / copies.step_s,
        }
    }


def stated(plan: CapacityPlan) -> list[str]:
    """Say what the checkpoints take of a node's memory, of its network and of a step; nothing of a run without them."""
    copies = copies_of(plan)
    if copies is None:
        return []
    others = f" and of a buddy's ({_size(copies.buddys)})" if copies.nodes > 1 else ""
    lines = [
        f"Memory checkpoints take {_size(copies.shared_memory)} of /dev/shm of a node: {SLOTS} of its ranks "
        f"({_size(copies.own)} each){others}; ranks wait {copies.copy_s:,.2g} s of each step for copies, "
        f"{copies.copy_s / copies.step_s:.2%} of it"
    ]
    if copies.nodes > 1:
        sent = f"After each step a node sends {_size(copies.sent)} to its buddy, beside the next step: {copies.send_s:,.2g} s"
        lines.append(f"{sent} at {copies.link_bytes_per_s / 1e9:,.3g} GB/s, {copies.send_s / copies.step_s:.1%} of a step")
        if copies.send_s > copies.step_s:
            lines.append("Warning: that is longer than a step, and the next one waits for it")
    else:
        lines.append("Warning: with one node there is no buddy; when the node is lost, the run starts again from disk")
    if plan.gpu.node_memory_gb is None:
        lines.append(
            f"With them a node keeps {_size(copies.main_memory)} in main memory; node_memory_gb of --gpu says what it has"
        )
    elif copies.shared_memory > SHARED_MEMORY_SHARE * plan.gpu.node_memory_gb * 1e9:
        lines.append("Warning: that is more than half of the node's main memory, which /dev/shm has by default; give it more")
    return lines


def node_refusal(plan: CapacityPlan) -> str | None:
    """The sentence by which a plan is refused whose nodes do not hold the checkpoints; None of any other."""
    copies, has = copies_of(plan), plan.gpu.node_memory_gb
    if copies is None or has is None or copies.main_memory <= has * 1e9:
        return None
    return (
        f"resources.spares keeps {_size(copies.shared_memory)} of checkpoints in /dev/shm of a node, with which it would hold "
        f"{_size(copies.main_memory)} in main memory, but node_memory_gb of {plan.gpu.name} is {has:,g}; use more nodes, or "
        f"set resources.spares to null{_smaller(copies, has)}"
    )


def _smaller(copies: CopiesPlan, has: float) -> str:
    """The obstacle, if it is not the checkpoints."""
    return "" if copies.rest <= has * 1e9 else f" (without them it is {_size(copies.rest)} already)"


def _size(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:,.3g} {unit}"
    return f"{nbytes / 1e3:,.3g} kB"
