"""`megarl plan`: what a run will do, computed from its config before anything is started; megarl/cli.py adds the command."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from megarl.config import Config
    from megarl.reshard.cost import Cost
    from megarl.reshard.plan import ReshardPlan
    from megarl.reshard.verify import Proof

NAMED = 2
"""Names shown of a list of tensors."""


def add_plan(commands: Any, add_config: Callable[[argparse.ArgumentParser], None], console: Callable[[], Console]) -> None:
    """Add the command `plan` to the subparsers `commands`; `add_config` adds CONFIG and its overrides."""
    plan = commands.add_parser(
        "plan",
        help="what a run of CONFIG will move, computed from config.json alone",
        description="What a run of CONFIG will do, computed before anything is started. config.json is all that is read of the "
        "model. --reshard: the way of the weights from the training ranks to the engines, bytes by link, and seconds.",
    )
    add_config(plan)
    plan.add_argument("--reshard", action="store_true", help="plan, verify and price a weight update")
    plan.add_argument("--cluster", metavar="FILE", help="YAML file with the cluster's rates (default: nodes of 8 H100)")
    plan.set_defaults(run=lambda arguments: _plan(arguments, console()))


def _plan(arguments: argparse.Namespace, console: Console) -> int:
    if not arguments.reshard:
        raise ConfigError("megarl plan needs to know what to plan; it may be --reshard")
    from megarl.config import check_models, load_config
    from megarl.reshard.cost import Cluster, cost_of
    from megarl.reshard.run_plan import plan_of_run
    from megarl.reshard.verify import verify

    config = load_config(arguments.config, arguments.overrides)
    check_models(config)
    cluster = Cluster.read(arguments.cluster) if arguments.cluster else Cluster()
    began = time.perf_counter()
    plan = plan_of_run(config)
    proof = verify(plan)
    seconds = time.perf_counter() - began
    cost = cost_of(plan, cluster, colocated=config.resources.placement == "colocated")
    console.print(_facts(config, plan, proof, cost, seconds))
    console.print()
    console.print(_links(cost))
    return 0


def _facts(config: Config, plan: ReshardPlan, proof: Proof, cost: Cost, seconds: float) -> Table:
    from rich.table import Table

    from megarl.reshard.verify import stated

    layout, target, bound = plan.layout, plan.target, cost.bound
    placed = "on the trainer's GPUs" if config.resources.placement == "colocated" else "on nodes of their own"
    buckets = f"{len(plan.bucket_starts) - 1:,} buckets of at most {_size(plan.bucket_bytes)}"
    table = Table(box=None, pad_edge=False, show_header=False)
    for label, value in (
        (
            "model",
            f"{config.model.path}: {len(plan.tensors):,} tensors, {_size(plan.tensors.nbytes.sum())} in {config.model.dtype}",
        ),
        ("from", f"{layout.world_size:,} training ranks: {stated(layout)}"),
        ("to", f"{target.engines:,} engines of {target.ranks} ranks: {stated(target)}, {placed}"),
        ("for each engine", f"{len(plan.transfers):,} transfers in {buckets}"),
        ("verified", f"every byte of {proof.slices:,} slices once, from a rank that has it; planned in {seconds:.2f} s"),
        ("taken whole", _taken_whole(plan)),
        ("redundancy", f"{cost.redundancy:.3f} bytes received for each byte held"),
        ("a rank sends", _range(cost.sent)),
        ("a rank receives", _range(cost.received)),
        ("peak staging", f"{_size(cost.peak_staging_bytes)} on a sending rank"),
        ("predicted", f"{cost.seconds:.3g} s, bound by {bound.name} {bound.where} at {bound.gb_per_s:g} GB/s"),
    ):
        table.add_row(label, value)
    return table


def _links(cost: Cost) -> Table:
    from rich.table import Table

    table = Table("link", box=None, pad_edge=False)
    for column in ("all GPUs", "busiest, out", "busiest, in", "GB/s", "seconds"):
        table.add_column(column, justify="right")
    for link in cost.links:
        sizes = (_size(size) for size in (link.nbytes, link.busiest_out, link.busiest_in))
        table.add_row(link.name, *sizes, f"{link.gb_per_s:g}", f"{link.seconds:.3g}")
    return table


def _taken_whole(plan: ReshardPlan) -> str:
    names = plan.taken_whole
    if not names:
        return "none: every rank is sent its own slices"
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _range(of_ranks: tuple[int, int]) -> str:
    least, most = of_ranks
    return _size(least) if least == most else f"{_size(least)} to {_size(most)}"


def _size(nbytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:.0f} B"
