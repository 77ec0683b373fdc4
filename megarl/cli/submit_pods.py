"""`megarl submit kubernetes` and `megarl submit skypilot`: a run in pods, on machines of clouds. `commands.py` adds both."""

from __future__ import annotations

import argparse
import secrets
import sys
from typing import TYPE_CHECKING, Any

from megarl.cli.arguments import add_config, make_console
from megarl.cli.rehearse import show_rehearsal
from megarl.cli.submit import common_options, profile_options, read_options, read_seeds
from megarl.config import load_any
from megarl.errors import ModelError, counted

if TYPE_CHECKING:
    from megarl.launch.job import Job
    from megarl.launch.pod_profile import ContainerProfile

_OF_FILES = ("runtime", "gres", "account", "venv", "directives", "mounts")
"""Fields of a profile that pods have no use for, which a file may have with what they are anyway."""


def add_pods(systems: Any) -> None:
    """Add `kubernetes` and `skypilot` to the subparsers of `megarl submit`."""
    from megarl.launch.pod_profile import KubernetesProfile, SkyProfile

    kubernetes = systems.add_parser(
        "kubernetes",
        help="a RayJob of KubeRay, or a JobSet",
        description="Submit CONFIG to Kubernetes by kubectl: as a RayJob of KubeRay, or, without KubeRay and for training on "
        "given responses, as a JobSet.",
    )
    add_config(kubernetes)
    common_options(kubernetes, "the manifests")
    profile_options(kubernetes, KubernetesProfile, _OF_FILES)
    kubernetes.set_defaults(run=_submit_kubernetes)
    sky = systems.add_parser(
        "skypilot",
        help="a managed job of SkyPilot",
        description="Submit CONFIG by `sky jobs launch`, which finds machines and starts the run again if they are taken back.",
    )
    add_config(sky)
    common_options(sky, "the task")
    profile_options(sky, SkyProfile, (*_OF_FILES, "partition", "qos", "interface"))
    sky.set_defaults(run=_submit_skypilot)


def _planned(arguments: argparse.Namespace, profile: ContainerProfile) -> Job:
    from megarl.launch.job import plan_job

    return plan_job(
        arguments.config, arguments.overrides, profile, seeds=read_seeds(arguments.seeds), step_s=arguments.step_seconds
    )


def _shown(arguments: argparse.Namespace, profile: ContainerProfile, job: Job, text: str) -> bool:
    """Show what was asked to be looked at; whether that was all."""
    if arguments.rehearse:
        show_rehearsal(load_any(arguments.config, arguments.overrides), profile.places, steps=True)
    elif arguments.dry_run:
        sys.stdout.write(text)
    if not arguments.rehearse:
        _tell_what_is_not_here(job)
    return bool(arguments.rehearse or arguments.dry_run)


def _tell_what_is_not_here(job: Job) -> None:
    """Tell of model folders that the run could not load here: in the pods they may be on a volume."""
    from megarl.launch.job import check_folders

    try:
        check_folders(job.config)
    except ModelError as error:
        print(f"megarl: on this machine, so look that it is otherwise in the pods: {error}", file=sys.stderr)


def _submit_kubernetes(arguments: argparse.Namespace) -> int:
    from megarl.launch.kubernetes import as_text, manifests, submit
    from megarl.launch.pod_profile import KubernetesProfile

    profile = read_options(arguments, KubernetesProfile)
    job = _planned(arguments, profile)
    submission = {} if arguments.dry_run else {"submission": secrets.token_hex(4)}
    text = as_text(job, manifests(job, profile, **submission))
    if _shown(arguments, profile, job, text):
        return 0
    make_console().print(f"{submit(profile, text).strip()}\n{counted(job.nodes, 'node')}; --dry-run shows the manifests")
    return 0


def _submit_skypilot(arguments: argparse.Namespace) -> int:
    from megarl.launch.pod_profile import SkyProfile
    from megarl.launch.skypilot import as_text, submit, tasks

    profile = read_options(arguments, SkyProfile)
    job = _planned(arguments, profile)
    texts = [as_text(job, task) for task in tasks(job, profile)]
    if _shown(arguments, profile, job, "---\n".join(texts)):
        return 0
    for text in texts:
        make_console().print(submit(profile, text).strip())
    return 0
