"""Nodes as tables for the terminal and a job's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from megarl.launch.agree import GIB, verdicts
from megarl.launch.node_facts import NodeFacts

if TYPE_CHECKING:
    from megarl.launch.cluster_doctor import ClusterReport


def node_table(nodes: Sequence[NodeFacts]) -> Table:
    """One line a node: what it has, and what is doubtful about it."""
    table = Table("node", "cores", "memory", "GPUs", "local disk", "addresses", "verdict", box=None, pad_edge=False)
    for node in nodes:
        remarks = verdicts(node, nodes)
        table.add_row(*_columns(node), ", ".join(f"{n} {a[0]}" for n, a in node.interfaces.items()), _verdict(remarks))
    return table


def cluster_tables(report: ClusterReport) -> list[Table]:
    """The nodes, and under them the versions and what is wrong."""
    table = Table("node", "cores", "memory", "GPUs", "local disk", "clock", "to the next", "latency", "verdict", box=None,
                  pad_edge=False, title=f"by {report.gathered_by}", title_justify="left")  # fmt: skip
    for node in report.nodes:
        table.add_row(
            *_columns(node.facts),
            f"{node.clock_s:+.3f} s",
            f"{node.gb_per_s:.2f} GB/s" if node.gb_per_s is not None else "-",
            f"{node.latency_s * 1e6:.0f} µs" if node.latency_s is not None else "-",
            _verdict(node.remarks),
        )
    facts = Table(box=None, pad_edge=False, show_header=False)
    versions = report.nodes[0].facts.versions
    facts.add_row("versions", ", ".join(f"{name} {number}" for name, number in versions.items() if number))
    facts.add_row("interface", report.interface or "none needed: one node")
    for problem in report.problems or ("nothing",):
        facts.add_row("[red]to mend[/]" if report.problems else "to mend", problem)
    return [table, facts]


def _columns(node: NodeFacts) -> tuple[str, ...]:
    kinds = sorted({gpu.name for gpu in node.gpus})
    gpus = f"{len(node.gpus)} × {', '.join(kinds)}" if kinds else "none"
    return (
        node.name, str(node.cores), f"{node.memory_bytes / GIB:.0f} GiB", gpus, f"{node.free_disk_bytes / GIB:.0f} GiB free",
    )  # fmt: skip


def _verdict(remarks: Sequence[str]) -> str:
    return "[green]ok[/]" if not remarks else f"[red]{'; '.join(remarks)}[/]"
