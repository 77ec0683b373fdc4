"""`megarl submit`: a run as a batch job; and `megarl node`: what its script asks on the nodes. `commands.py` adds both.

The words of the first go to a person, those of the second to the job's log and its script.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cli.arguments import add_config, make_console
from megarl.cli.rehearse import show_rehearsal
from megarl.config import load_any
from megarl.config.reference import fields_of
from megarl.errors import ConfigError, ModelError, counted
from megarl.option_list import functions
from megarl.system.atomic_files import write_text_atomically
from megarl.system.redaction import redacted

if TYPE_CHECKING:
    from megarl.launch.cluster_profile import ClusterProfile, Profile
    from megarl.launch.job import Job

BATCH_SYSTEMS = {"slurm": "Slurm", "pbs": "PBS", "lsf": "LSF"}


def add_submit(commands: Any) -> Any:
    """Add the groups `submit` and `node` to the subparsers `commands`; returns the subparsers of `submit`."""
    group = commands.add_parser(
        "submit",
        help="run CONFIG as a job: of Slurm, PBS, LSF, a Ray cluster, Kubernetes or SkyPilot",
        description="Run CONFIG as a job of a batch system: one script, which --dry-run prints, or manifests of Kubernetes. "
        "Reinforcement learning is started by Ray on the job's nodes, training on given responses by torchrun.",
    )
    systems = group.add_subparsers(metavar="SYSTEM", required=True)
    for system, title in BATCH_SYSTEMS.items():
        parser = systems.add_parser(system, help=f"a batch job of {title}", description=f"Submit CONFIG as a job of {title}.")
        add_config(parser)
        _job_options(parser)
        if system == "slurm":
            parser.add_argument(
                "--preflight", action="store_true", help="check the cluster, its nodes and the job; submit nothing"
            )
        parser.set_defaults(run=_submit, system=system, preflight=False)
    ray = systems.add_parser("ray", help="a job of a running Ray cluster", description="Submit CONFIG by `ray job submit`.")
    add_config(ray)
    ray.add_argument("--address", default="http://127.0.0.1:8265", help="the cluster's dashboard (default: %(default)s)")
    ray.add_argument("--dry-run", action="store_true", help="print the command")
    ray.set_defaults(run=_submit_ray)
    _add_node(commands)
    return systems


def _job_options(parser: argparse.ArgumentParser) -> None:
    from megarl.launch.cluster_profile import ClusterProfile

    common_options(parser, "the script")
    parser.add_argument(
        "--after", action="append", metavar="CONDITION", default=[],
        help="dependency on another job in the batch system's syntax, such as afterok:1234",
    )  # fmt: skip
    parser.add_argument(
        "--chain", type=int, default=1, help="number of jobs to submit; each continues where the one before ended"
    )
    profile_options(parser, ClusterProfile)


def common_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options that submissions to every system have; `what` --dry-run prints."""
    parser.add_argument("--cluster-profile", metavar="FILE", help="YAML file with the options below, as fields")
    parser.add_argument("--dry-run", action="store_true", help=f"print {what}; submit and write nothing")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="rehearse the run on nodes as the job would get (`megarl rehearse`); submit nothing",
    )
    parser.add_argument("--seeds", metavar="1,2,3", help="submit a job array: one run per seed, named after the seed")
    parser.add_argument(
        "--step-seconds",
        type=float,
        help="seconds per step (default: as an earlier start recorded, else the estimate of megarl plan)",
    )


def profile_options(parser: argparse.ArgumentParser, kind: type[ClusterProfile], without: Container[str] = ()) -> None:
    """Add an option for each field of a profile of this `kind`, but for those in `without`."""
    from megarl.launch.cluster_profile import option_kind

    fields = parser.add_argument_group("the cluster")
    for name, field in fields_of(kind).items():
        if name in without:
            continue
        value, option = option_kind(field.annotation), f"--{name.replace('_', '-')}"
        help_text = (field.description or "").replace("\n", " ").replace("%", "%%")
        if value is bool:
            fields.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=help_text)
        elif value in (tuple, dict):
            shown = "KEY=VALUE" if value is dict else "TEXT"
            fields.add_argument(option, action="append", metavar=shown, help=f"{help_text} May be repeated.")
        else:
            shown = "N" if value is int else name.upper()
            fields.add_argument(option, type=value, metavar=shown, help=help_text)


def read_options(arguments: argparse.Namespace, kind: type[Profile]) -> Profile:
    """The profile of this `kind` that the command line gives, by a file and by options.

    Raises:
        ConfigError: one sentence about an option or a field.
    """
    from megarl.launch.cluster_profile import option_kind, read_profile

    options: dict[str, Any] = {name: getattr(arguments, name, None) for name in fields_of(kind)}
    for name, field in fields_of(kind).items():
        if options[name] is not None and option_kind(field.annotation) is dict:
            if wrong := [pair for pair in options[name] if "=" not in pair]:
                shown = f"is '{wrong[0]}'" if name != "secrets" else "has no ="
                example = ", such as NCCL_IB_HCA=mlx5" if name == "env" else ""
                raise ConfigError(f"--{name.replace('_', '-')} {shown}; it must be KEY=VALUE{example}")
            options[name] = dict(pair.split("=", 1) for pair in options[name])
    return read_profile(arguments.cluster_profile, options, kind)


def _submit(arguments: argparse.Namespace) -> int:
    from megarl.launch.cluster_profile import ClusterProfile
    from megarl.launch.job import check_folders, plan_job
    from megarl.launch.submit import render, script_path, submit

    if arguments.chain < 1:
        raise ConfigError(f"--chain is {arguments.chain}; it must be 1 or more jobs")
    profile = read_options(arguments, ClusterProfile)
    job = plan_job(
        arguments.config, arguments.overrides, profile,
        seeds=read_seeds(arguments.seeds), after=arguments.after, step_s=arguments.step_seconds,
    )  # fmt: skip
    script = render(arguments.system, job, profile, cwd=Path.cwd())
    if arguments.rehearse:
        return show_rehearsal(load_any(arguments.config, arguments.overrides), profile.places, steps=True)
    if arguments.dry_run:
        shown = redacted(script)
        sys.stdout.write(shown)
        if shown != script:
            print("megarl: secrets are not shown; put them in before you submit this script yourself", file=sys.stderr)
        _warn_of_folders(job)
        folder = script_path(job, arguments.system).parent
        if arguments.system in ("slurm", "pbs", "lsf") and not folder.is_dir():
            print(f"megarl: before you submit this script yourself: mkdir -p {folder} (its log goes there)", file=sys.stderr)
        return 0
    check_folders(job.config)
    if arguments.preflight:
        return _preflight(job, profile)
    if arguments.system == "slurm":
        from megarl.launch.preflight import check_site

        check_site(job, profile)
    numbers = submit(arguments.system, job, script, chain=arguments.chain)
    make_console().print(
        f"job {', then '.join(numbers)}: {counted(job.nodes, 'node')}; the script is {script_path(job, arguments.system)}"
    )
    return 0


def _warn_of_folders(job: Job) -> None:
    """Tell what a submission would refuse: the weights may be elsewhere while a script is looked at."""
    from megarl.launch.job import check_folders

    try:
        check_folders(job.config)
    except ModelError as error:
        print(f"megarl: without --dry-run this job is refused: {error}", file=sys.stderr)


def read_seeds(text: str | None) -> list[int]:
    """The seeds of `--seeds`.

    Raises:
        ConfigError: they are no whole numbers.
    """
    if text is None:
        return []
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"--seeds is '{text}'; it must be whole numbers with commas between them, such as 1,2,3")
    return [int(part) for part in parts]


def _preflight(job: Job, profile: ClusterProfile) -> int:
    from megarl.launch.cluster_table import node_table
    from megarl.launch.doctor import render
    from megarl.launch.preflight import ask_nodes, check_site

    console = make_console()
    console.print(render(check_site(job, profile)))
    console.print(node_table(ask_nodes(job, profile)))
    return 0


def _submit_ray(arguments: argparse.Namespace) -> int:
    from megarl.launch.cluster_profile import ClusterProfile
    from megarl.launch.job import plan_job
    from megarl.launch.submit import ray_job
    from megarl.weights.placement import PlacementRequest

    # the cluster is there already: what it has is for Ray to say, when the run asks for its places
    job = plan_job(arguments.config, arguments.overrides, ClusterProfile(nodes=1, gpus_per_node=0, places_per_node=2**20))
    command = ray_job(job, arguments.address)
    if arguments.dry_run:
        sys.stdout.write(f"# needs {PlacementRequest.of(job.config).bundles} places\n{redacted(shlex.join(command))}\n")
        return 0
    return subprocess.run(command, check=False).returncode


def _add_node(commands: Any) -> None:
    group = commands.add_parser(
        "node",
        help="commands about the nodes of a job or a run",
        description="What a script of `megarl submit` asks on the nodes of its job, and nodes that leave a run.",
    )
    actions = group.add_subparsers(metavar="ACTION", required=True)
    describe = actions.add_parser("describe", help="write this node's facts into a folder that all nodes share")
    describe.add_argument("folder", metavar="FOLDER")
    describe.add_argument("--disk", default="/tmp", help="folder on the node's own disk (default: /tmp)")
    describe.add_argument("--count", type=int, help="wait until the facts of this many nodes are visible")
    describe.set_defaults(run=_describe)

    agree = actions.add_parser("agree", help="compare the nodes; write the interface and ports that they use")
    agree.add_argument("folder", metavar="FOLDER")
    agree.add_argument("--nodes", type=int, required=True, help="nodes of the job")
    agree.add_argument("--head", required=True, help="name of the first node")
    agree.add_argument("--gpus", type=int, default=0, help="GPUs that every node must have")
    agree.add_argument("--ports-from", type=int, default=0, help="job number, from which ports are chosen")
    agree.add_argument("--interface", help="network interface (default: the fastest that all nodes have)")
    agree.set_defaults(run=_agree)

    for add_action in functions("node_action", "add_action"):
        add_action(actions)
    wait = actions.add_parser("wait-for-ray", help="wait until all nodes have joined Ray")
    wait.add_argument("--address", required=True, help="HOST:PORT of the head")
    wait.add_argument("--nodes", type=int, required=True)
    wait.add_argument("--gpus", type=int, default=0)
    wait.add_argument("--deadline", type=float, default=600.0, help="seconds")
    wait.set_defaults(run=_wait_for_ray)

    measure = actions.add_parser("measure", help="measure the network with one process per node")
    measure.add_argument("folder", metavar="FOLDER", help="gets <rank>.link")
    measure.add_argument("--plan", required=True, help="JSON of what the nodes agreed on")
    measure.set_defaults(run=_measure)


def _measure(arguments: argparse.Namespace) -> int:
    from megarl.launch.network import measure

    position = {"rank": int(os.environ["SLURM_PROCID"]), "world_size": int(os.environ["SLURM_NTASKS"])}
    measurement = measure(json.loads(arguments.plan) | position)
    write_text_atomically(Path(arguments.folder) / f"{position['rank']}.link", json.dumps(measurement))
    return 0


def _describe(arguments: argparse.Namespace) -> int:
    from megarl.launch.node_facts import describe_node, node_name, read_facts, write_facts

    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not on {node_name()}; run.folder must be on a file system that all nodes share")
    write_facts(folder, describe_node(folder, arguments.disk))
    if arguments.count is not None:
        read_facts(folder, count=arguments.count)
    return 0


def _agree(arguments: argparse.Namespace) -> int:
    from megarl.launch.agree import agree
    from megarl.launch.cluster_table import node_table
    from megarl.launch.node_facts import read_facts

    nodes = read_facts(arguments.folder, count=arguments.nodes)
    make_console().print(node_table(nodes))
    agreement = agree(
        nodes, arguments.head, interface=arguments.interface, ports_from=arguments.ports_from, gpus=arguments.gpus
    )
    token = Path(arguments.folder).resolve() / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    write_text_atomically(Path(arguments.folder) / "agreed.sh", agreement.shell(token))
    return 0


def _wait_for_ray(arguments: argparse.Namespace) -> int:
    from megarl.workers.ray_nodes import wait_for_nodes

    wait_for_nodes(arguments.address, arguments.nodes, arguments.gpus, arguments.deadline)
    return 0
