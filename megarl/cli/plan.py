"""`megarl plan`: what a run will do, computed from its config before anything is started; `commands.py` adds the command."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from megarl.cli.arguments import add_config, make_console, with_models
from megarl.config import AnyConfig, Config, load_any, load_config
from megarl.errors import ConfigError, counted
from megarl.system.safe_console import SafeConsole

if TYPE_CHECKING:
    from megarl.planning.plan import CapacityPlan
    from megarl.planning.search import Found
    from megarl.planning.times import PhaseTime
    from megarl.weights.cost import Cost
    from megarl.weights.plan import ReshardPlan
    from megarl.weights.verify import Proof

NO_COMMUNICATORS = {"shared_memory": "none: engines open what is staged", "rdma": "none: engines read what is staged"}
"""By transport, what is said where no process group is made."""
NAMED = 2
"""Names shown of a list of tensors."""


def add_plan(commands: Any) -> None:
    """Add the command `plan` to the subparsers `commands`."""
    plan = commands.add_parser(
        "plan",
        help="predict whether a run fits into memory and how long a step takes; needs only config.json",
        description="What a run of CONFIG will need, computed before anything is started: memory on every GPU, seconds by "
        "phase and what bounds them. config.json is all that is read of the model. Exit code 2 if the run does not fit.",
    )
    add_config(plan)
    plan.add_argument(
        "--gpu",
        help="kind of GPU: h100, h200, h20, a100, l40s, b200, gb200, gb300, cpu, or a YAML file (default: resources.gpu)",
    )
    plan.add_argument("--gpus", type=int, metavar="N", help="number of available GPUs (default: as many as the layouts take)")
    plan.add_argument("--search", action="store_true", help="rank the layouts that fit, and show why others do not")
    plan.add_argument(
        "--calibrate",
        metavar="RUN",
        action="append",
        help="folder of a run whose recorded phases scale the seconds; given several times, constants are fitted to all",
    )
    plan.add_argument(
        "--against",
        metavar="FILE",
        help="compare with measured phases: a JSON table whose row has the config's run.name as id, or a run's folder",
    )
    plan.add_argument("--prompt-tokens", type=float, metavar="N", help="mean length of prompts (default: half the longest)")
    plan.add_argument("--response-tokens", type=float, metavar="N", help="mean length of responses (default: half the longest)")
    plan.add_argument("--longest-response", type=int, metavar="N", help="tokens of the longest response (default: the limit)")
    plan.add_argument("--efficiency", type=float, metavar="FLOAT", help="share of the GPU's peak that training reaches")
    plan.add_argument(
        "--pictures-per-prompt",
        type=int,
        metavar="N",
        help="pictures, or frames of videos, of a prompt (default: those of the rows)",
    )
    plan.add_argument("--picture-pixels", type=float, metavar="N", help="mean pixels of a picture (default: those of the rows)")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--reshard", action="store_true", help="plan, verify and estimate a weight update instead")
    plan.add_argument(
        "--cluster", metavar="FILE", help="with --reshard: YAML file with the cluster's rates (default: 8 H100s a node)"
    )
    plan.add_argument("--placement", action="store_true", help="show which GPU each rank and engine would have instead")
    plan.add_argument("--gpus-per-node", type=int, metavar="N", help="with --placement: GPUs of a node (default: 8)")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.reshard:
        return _reshard(arguments)
    if arguments.placement:
        return _placement(arguments)
    if arguments.gpus_per_node is not None:
        raise ConfigError("--gpus-per-node is for `megarl plan --placement`; the GPUs of a plan are counted by --gpus")
    if arguments.cluster:
        raise ConfigError("--cluster is for `megarl plan --reshard`; the GPUs of a plan are named by --gpu")
    if arguments.gpus is not None and arguments.gpus < 1:
        raise ConfigError(f"--gpus is {arguments.gpus}; it must be a whole number above 0")
    if arguments.pictures_per_prompt is not None and arguments.pictures_per_prompt < 0:
        raise ConfigError(f"--pictures-per-prompt is {arguments.pictures_per_prompt}; it must be a whole number, 0 or more")
    for option in ("prompt_tokens", "response_tokens", "longest_response", "picture_pixels"):
        value = getattr(arguments, option)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{option.replace('_', '-')} is {value:g}; it must be a number above 0")
    from megarl.planning.calibration import Calibration
    from megarl.planning.gpus import chosen_gpu, given_efficiencies, with_efficiency
    from megarl.planning.measured import read_measured
    from megarl.planning.plan import check_lengths, lengths_of, make_plan
    from megarl.planning.search import what_fits
    from megarl.planning.show import against_tables, as_json, found_tables, found_tree, plan_tables

    config = load_any(arguments.config, arguments.overrides)
    gpu, model = with_efficiency(chosen_gpu(config.resources.gpu, arguments.gpu), arguments.efficiency), config.model.path
    check_lengths(config, arguments.prompt_tokens, arguments.response_tokens, arguments.longest_response)
    config, console = with_models(config, weights=False), make_console()
    measured = read_measured(arguments.against, config) if arguments.against else None
    lengths = lengths_of(
        config,
        arguments.prompt_tokens or (measured.prompt_tokens if measured else None),
        arguments.response_tokens or (measured.response_tokens if measured else None),
        longest=arguments.longest_response,
        pictures_per_prompt=arguments.pictures_per_prompt,
        picture_pixels=arguments.picture_pixels,
    )
    efficiencies = given_efficiencies(gpu)
    calibration = Calibration()
    if efficiencies:
        calibration = replace(calibration, source=f"{calibration.source}, but for what is given: {efficiencies}")
    if arguments.calibrate:
        from megarl.planning.measured import calibrated, fitted_gpu

        if len(arguments.calibrate) > 1:
            calibration, gpu = fitted_gpu(arguments.calibrate, gpu)
        else:
            calibration = calibrated(arguments.calibrate[0], gpu)
    if measured is not None:
        calibration = replace(calibration, whole_pass=measured.whole_pass)
    plan = make_plan(config, gpu, available=arguments.gpus, lengths=lengths, calibration=calibration)
    ranked = _searched(config, plan, is_given=arguments.gpus is not None) if arguments.search else None
    if arguments.json:
        text = as_json(plan, found_tree(ranked) if ranked is not None else None, measured)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        if ranked is None or plan.fits:
            for part in plan_tables(plan, model):
                console.print(part, highlight=False)
        if ranked is not None:
            if plan.fits:
                console.print()
            for part in found_tables(ranked):
                is_text = isinstance(part, str)  # whose overrides are pasted: no line may be cut
                console.print(part, highlight=False, markup=not is_text, soft_wrap=is_text)
        if measured is not None:
            console.print()
            for part in against_tables(plan, measured):
                console.print(part, highlight=False)
    if ranked is None and measured is None and not plan.fits:
        raise ConfigError(
            f"the run does not fit: {plan.excess}; {what_fits(config, plan, is_given=arguments.gpus is not None)}"
        )
    if (refused := plan.node_refusal) is not None:
        raise ConfigError(refused)
    return 0


def _searched(config: AnyConfig, plan: CapacityPlan, *, is_given: bool) -> Found:
    """Search on the GPUs of `plan`; where the user has not said how many there are, on as many as it takes."""
    from megarl.planning.search import Refusals, Search

    with SafeConsole(stderr=True).status("searching: every layout is planned"):  # a terminal shows it
        search = Search(config, plan)
        found = search.ranked()
        if found.best or is_given:
            return found
        enough = search.enough(is_given=False)
        return found if isinstance(enough, Refusals) else Search(config, replace(plan, available=enough[0])).ranked()


def _reshard(arguments: argparse.Namespace) -> int:
    from megarl.planning.gpus import chosen_gpu
    from megarl.planning.plan import make_plan
    from megarl.weights.communicators import check_communicators
    from megarl.weights.cost import ClusterRates, cost_of, placement_of
    from megarl.weights.placement import PlacementRequest
    from megarl.weights.run_plan import plan_of_run
    from megarl.weights.verify import verify

    config, console = with_models(load_config(arguments.config, arguments.overrides), weights=False), make_console()
    gpu = chosen_gpu(config.resources.gpu, arguments.gpu)
    cluster = ClusterRates.read(arguments.cluster) if arguments.cluster else gpu.cluster
    gpu = gpu.in_cluster(cluster) if arguments.cluster else gpu
    began = time.perf_counter()
    plan = plan_of_run(config, gpu.platform)
    check_communicators(config, plan)
    proof = verify(plan)
    seconds = time.perf_counter() - began
    colocated, request = config.resources.placement == "colocated", PlacementRequest.of(config)
    placed = placement_of(request, cluster)
    cost = cost_of(plan, cluster, colocated=colocated, placement=placed)
    [update] = [phase for phase in make_plan(config, gpu).times.phases if phase.name == "sync"]
    console.print(_facts(config, plan, proof, cost, update, seconds))
    console.print()
    console.print(_links(cost))
    return 0


def _placement(arguments: argparse.Namespace) -> int:
    from megarl.weights.placement import PlacementRequest, place, planned_bundles

    size = 8 if arguments.gpus_per_node is None else arguments.gpus_per_node
    if size < 1:
        raise ConfigError(f"--gpus-per-node is {size}; it must be a whole number above 0")
    request = PlacementRequest.of(load_any(arguments.config, arguments.overrides))
    if arguments.gpus is not None and arguments.gpus < request.bundles:
        raise ConfigError(f"--gpus is {arguments.gpus}, but the layouts need {request.bundles}")
    placement, console = place(request, planned_bundles(request.bundles, size)), make_console()
    if arguments.json:
        console.print(json.dumps(placement.as_json(), indent=1), markup=False, highlight=False, soft_wrap=True)
        return 0
    table = Table("node", "GPUs", *request.groups, "engines", box=None, pad_edge=False)
    for node, gpus, by_group in placement.rows():
        table.add_row(node, gpus, *by_group.values())
    console.print(placement.summary(), highlight=False)
    console.print()
    console.print(table, highlight=False)
    return 0


def _facts(config: Config, plan: ReshardPlan, proof: Proof, cost: Cost, update: PhaseTime, seconds: float) -> Table:
    from megarl.weights.verify import stated

    layout, target, bound = plan.layout, plan.target, cost.bound
    placed = "on the trainer's GPUs" if config.resources.placement == "colocated" else "on nodes of their own"
    transport = config.rollout.weight_transport
    is_staged = transport != "process_group"
    staging = f"{_size(cost.peak_staging_bytes)} on a sending rank" if is_staged else "none: sent from where the weights lie"
    buckets = f"{len(plan.bucket_starts) - 1:,} buckets of at most {_size(plan.bucket_bytes)}"
    tensors = f"{len(plan.tensors):,} tensors, {_size(plan.tensors.nbytes.sum())} in {config.model.dtype}"
    table = Table(box=None, pad_edge=False, show_header=False)
    for label, value in (
        ("model", f"{config.model.path}: {tensors}"),
        ("from", f"{counted(layout.world_size, 'training rank')}: {stated(layout)}"),
        ("to", f"{counted(target.engines, 'engine')} of {counted(target.ranks, 'rank')}: {stated(target)}, {placed}"),
        ("for each engine", f"{len(plan.transfers):,} transfers in {buckets}"),
        ("verified", f"every byte of {proof.slices:,} slices once, from a rank that has it; planned in {seconds:.2f} s"),
        ("taken whole", _taken_whole(plan)),
        ("redundancy", f"{cost.redundancy:.3f} bytes received for each byte held"),
        ("a rank sends", _range(cost.sent)),
        ("a rank receives", _range(cost.received)),
        ("peak staging", staging),
        ("communicators", NO_COMMUNICATORS.get(transport) or _communicators(plan)),
        ("busiest link", f"{cost.seconds:.3g} s, {bound.name} {bound.where} at {bound.gb_per_s:g} GB/s"),
        ("predicted", f"{update.seconds:.3g} s, bound by {update.bound}: {_parts(update)}"),
    ):
        table.add_row(label, value)
    return table


def _parts(update: PhaseTime) -> str:
    return ", ".join(f"{part} {seconds:.3g} s" for part, seconds in update.parts.items())


def _links(cost: Cost) -> Table:
    table = Table("link", box=None, pad_edge=False)
    for column in ("all GPUs", "busiest, out", "busiest, in", "GB/s", "seconds"):
        table.add_column(column, justify="right")
    for link in cost.links:
        sizes = (_size(size) for size in (link.nbytes, link.busiest_out, link.busiest_in))
        table.add_row(link.name, *sizes, f"{link.gb_per_s:g}", f"{link.seconds:.3g}")
    return table


def _communicators(plan: ReshardPlan) -> str:
    from megarl.weights.communicators import Communicators

    communicators = Communicators.of(plan)
    least, most = communicators.of_a_rank
    of_a_rank = str(most) if least == most else f"{least} to {most}"
    return f"{of_a_rank} of a training rank, 1 of an engine's rank, of at most {communicators.members:,} members"


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
