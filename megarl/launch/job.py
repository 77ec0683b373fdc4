"""The processes that a batch job starts: how many processes on how many nodes, by Ray or by torchrun; what cannot work
is said here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megarl.config import AnyConfig, load_any
from megarl.errors import ConfigError, ModelError, counted, describe_value, either
from megarl.launch.cluster_profile import ClusterProfile, clock
from megarl.models.check_layouts import check_models
from megarl.models.from_hub import model_in, models_here
from megarl.observe import read_metrics
from megarl.option_list import functions
from megarl.planning.gpus import chosen_gpu
from megarl.planning.plan import make_plan
from megarl.system.hub import HubRepo
from megarl.weights.placement import PlacementRequest, place, planned_bundles

START_S = 120
"""Allowance for the nodes' checks, Ray, the engines and the model; a run's own start may take longer."""


WEIGHTS: tuple[str, ...] = ("model.safetensors", "model.safetensors.index.json")
TOKENIZERS: tuple[str, ...] = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Files of a model folder, of which one at least must be there."""
TRAINED_BYTES_PER_PARAMETER = 14
"""In a checkpoint: weights in BF16, and the optimizer's float32 copy and two moments."""


@dataclass(frozen=True)
class StepTime:
    """Duration of a step, in seconds, and who says so."""

    seconds: float
    source: str
    is_estimate: bool = False


@dataclass(frozen=True)
class Job:
    """One job of the batch system. `seeds`: one run for each; `resume` is a checkpoint folder to begin from, or `auto`."""

    launcher: Literal["ray", "torchrun"]
    config: AnyConfig
    config_path: Path
    overrides: tuple[str, ...]
    name: str
    run_folder: Path
    nodes: int
    ranks_per_node: int
    resume: str
    seeds: tuple[int, ...] = ()
    after: tuple[str, ...] = ()
    step: StepTime | None = None

    @property
    def outlives_nodes(self) -> bool:
        """True if the run goes on where a node is lost: others, or spare ones, take over what it did."""
        return self.launcher == "ray" and spare_places(self.config) is not None

    @property
    def run_folders(self) -> tuple[Path, ...]:
        """The folder of each run."""
        if not self.seeds:
            return (self.run_folder,)
        return tuple(self.run_folder.with_name(f"{self.run_folder.name}-seed{seed}") for seed in self.seeds)


def checkpoint_bytes(job: Job) -> int:
    """Bytes of one checkpoint on disk, estimated from the weights of its model folder; 0 if unknown."""
    stored = sum(file.stat().st_size for file in Path(job.config.model.path).glob("*.safetensors"))
    return len(job.config.trained_roles) * stored // 2 * TRAINED_BYTES_PER_PARAMETER


def seconds_to_save(job: Job, warn_s: int) -> float | None:
    """Seconds that a warning of `warn_s` leaves for the checkpoint behind a step in progress, at most its deadline;
    None: not known."""
    return min(warn_s - job.step.seconds, job.config.resources.deadlines.save_s) if job.step else None


def plan_job(
    path: str | Path,
    overrides: Sequence[str],
    profile: ClusterProfile,
    *,
    seeds: Sequence[int] = (),
    after: Sequence[str] = (),
    step_s: float | None = None,
) -> Job:
    """The job that runs the config at `path` on the cluster of `profile`.

    `step_s` is how long a step takes, in seconds (None: what an earlier start of the same run measured, else what a plan says).

    Raises:
        ConfigError, LayoutError: the config is wrong, its layouts do not fit the nodes, or the time limit is too short for a
            step.
        ModelError: a model folder is missing.
    """
    config = load_any(path, overrides)
    launcher: Literal["ray", "torchrun"] = "ray" if config.needs_ray else "torchrun"
    here = models_here(config, weights=False)
    check_models(here)
    if config.resources.ray_address is not None:
        raise ConfigError(
            f"resources.ray_address is '{config.resources.ray_address}', but the job starts a Ray of its own; set it to null"
        )
    nodes = _nodes(config, profile, launcher)
    job = Job(
        launcher, config, Path(path).resolve(), tuple(overrides), config.run.name, Path(config.run_folder).resolve(),
        nodes, config.policy.layout.world_size // nodes if launcher == "torchrun" else profile.places,
        "auto" if config.run.resume == "never" else config.run.resume, tuple(seeds), tuple(after),
    )  # fmt: skip
    for folder in job.run_folders:
        metrics = folder / "metrics.jsonl"
        if config.run.resume == "never" and metrics.exists() and metrics.stat().st_size:
            raise ConfigError(
                f"run.name is '{config.run.name}', but {folder} already holds a run; give this one another run.name, "
                "or continue it with run.resume=auto"
            )
    step = StepTime(step_s, "--step-seconds") if step_s else step_time(here, profile, job.run_folders[0])
    check_time(profile, step)
    return replace(job, step=step)


def check_folders(config: AnyConfig) -> None:
    """Refuse model folders that a run could not load, which it would say after the queue; those of the hub are downloaded then.

    Raises:
        ModelError: a folder has no weights, or that of the policy no tokenizer.
    """
    for field, folder in config.model_folders.items():
        if HubRepo.meant_by("model", folder) is not None:
            continue
        model = Path(model_in(folder, field))
        tokenizer = [(TOKENIZERS, "a tokenizer")] if field == "model.path" else []
        for files, what in [(WEIGHTS, "weights as safetensors"), *tokenizer]:
            if not any((model / file).is_file() for file in files):
                raise ModelError(f"{field} is '{folder}', which has no {either(map(describe_value, files))}; put {what} there")


def step_time(config: AnyConfig, profile: ClusterProfile, run_folder: Path) -> StepTime | None:
    """Seconds of a step, as an earlier start of the run measured it, else as a plan estimates it on GPUs; None: on nodes
    without any."""
    if (seconds := measured_step_s(run_folder)) is not None:
        return StepTime(seconds, "an earlier start of the run")
    if not profile.gpus_per_node:
        return None
    gpu = chosen_gpu(config.resources.gpu, None)
    seconds = make_plan(config, gpu).times.step_seconds
    return StepTime(seconds, f"an estimate of `megarl plan` for {gpu.name}", is_estimate=True)


def check_time(profile: ClusterProfile, step: StepTime | None) -> None:
    """Refuse a time limit that ends before one step is done and saved; nothing is refused where the step is not known."""
    if step is None:
        return
    step_s, says = step.seconds, f" ({step.source}; --step-seconds overrides it)" if step.is_estimate else ""
    needed = math.ceil(START_S + step_s + profile.warn_s)
    enough = clock(math.ceil(needed / 60) * 60)
    if profile.time_s < needed:
        raise ConfigError(
            f"time is {profile.time}, but the start ({START_S} s), one step ({step_s:.0f} s) and the warning "
            f"({profile.warn_s} s before the end) take {needed} s{says}; ask for at least --time {enough}"
        )
    if step_s > profile.warn_s:
        raise ConfigError(
            f"warn_s is {profile.warn_s}, but the step in progress is finished before the run saves and takes {step_s:.0f} s"
            f"{says}; set --warn-s to {math.ceil(step_s * 1.5 / 60) * 60} or more"
        )


def measured_step_s(run_folder: Path) -> float | None:
    """Seconds of the slowest of the last steps that an earlier start of the run recorded; None: there is none."""
    figures = (row.get("time/step_s") for row in read_metrics(run_folder / "metrics.jsonl"))
    seconds = [figure for figure in figures if isinstance(figure, (int, float)) and math.isfinite(figure)]
    return max(seconds[-10:]) if seconds else None


def _nodes(config: AnyConfig, profile: ClusterProfile, launcher: str) -> int:
    """Nodes of the job; every sentence about GPUs and layouts that do not fit is here."""
    kind = "GPUs" if profile.gpus_per_node else "places"
    request = PlacementRequest.of(config)
    needed = request.bundles + (spare_places(config) or 0) if launcher == "ray" else config.policy.layout.world_size
    fewest = math.ceil(needed / profile.places)
    nodes = profile.nodes or fewest
    if nodes < fewest:
        raise ConfigError(
            f"nodes is {nodes}, which have {nodes * profile.places} {kind}, but the layouts need {needed}; "
            f"ask for --nodes {fewest}, or change policy.layout"
        )
    if nodes > fewest and (launcher == "ray" and (nodes - 1) * profile.places >= needed):
        raise ConfigError(
            f"nodes is {nodes}, but the layouts need {needed} {kind}, which {fewest} hold; ask for --nodes {fewest}, "
            "or raise policy.layout.dp"
        )
    if config.sampling is not None and not profile.gpus_per_node and config.sampling.tp > profile.places:
        raise ConfigError(
            f"rollout.tp is {config.sampling.tp}, but without GPUs an engine is on one node and places_per_node is "
            f"{profile.places}; set rollout.tp to {profile.places} or less"
        )
    if launcher == "torchrun" and (needed % nodes or needed // nodes > profile.places):
        fitting = [n for n in range(fewest, needed + 1) if needed % n == 0]
        raise ConfigError(
            f"policy.layout has {counted(needed, 'rank')}, but {counted(nodes, 'node')} of {profile.places} {kind} cannot hold "
            "an equal share each; "
            f"ask for --nodes {fitting[0]}, or change policy.layout.dp"
        )
    if launcher == "ray" and profile.gpus_per_node:
        place(request, planned_bundles(request.bundles, profile.gpus_per_node))
    return nodes


def spare_places(config: AnyConfig) -> int | None:
    """Number of places beside the run's own that wait for lost ranks; None: a run whose ranks are lost starts again."""
    answers = (ask(config) for ask in functions("questions", "spare_places"))
    return next((answer for answer in answers if answer is not None), None)
