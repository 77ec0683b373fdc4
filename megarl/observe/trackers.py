"""Where metrics go besides `metrics.jsonl`: TensorBoard, wandb and MLflow, all optional and imported only when asked for.

One `Trackers.log(step, metrics)` writes to all of them.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megarl.config import AnyConfig
from megarl.config.secrets import without_secrets
from megarl.errors import ConfigError
from megarl.observe.metrics import MetricsFile


class Tracker(Protocol):
    """Anything that takes the metrics of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of `step`."""

    def close(self) -> None:
        """Write out what is buffered."""


class Trackers:
    """Fans one step out to every tracker, `metrics.jsonl` first."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step` everywhere."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Close every tracker."""
        for tracker in self._trackers:
            tracker.close()


def open_trackers(config: AnyConfig, *, resume_after_step: int | None = None) -> Trackers:
    """Open what `config.trackers` asks for in the run folder.

    Raises:
        ConfigError: a tracker's package is not installed; the sentence says how to install it.
    """
    folder = Path(config.run_folder)
    wanted = [_KINDS[name](config, folder, resume_after_step) for name in dict.fromkeys(config.trackers.backends)]
    return Trackers([MetricsFile(folder / "metrics.jsonl", resume_after_step=resume_after_step), *wanted])


def upload_commands(config: AnyConfig) -> list[str]:
    """What a user types to upload what was written offline."""
    if "wandb" not in config.trackers.backends:
        return []
    runs = sorted((Path(config.run_folder) / "wandb").glob("offline-run-*"))
    return [f"`wandb sync {run}` uploads the wandb run" for run in runs]


class _TensorBoard:
    def __init__(self, config: AnyConfig, folder: Path, resume_after_step: int | None) -> None:
        module = _optional("torch.utils.tensorboard", "tensorboard", "tensorboard")
        first_step = 0 if resume_after_step is None else resume_after_step + 1
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Offline, into the run folder, unless WANDB_MODE says otherwise. A resumed run is a second run of the same name."""

    def __init__(self, config: AnyConfig, folder: Path, resume_after_step: int | None) -> None:
        wandb = _optional("wandb", "wandb", "megarl[wandb]")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.trackers.project,
            entity=config.trackers.entity,
            group=config.trackers.group,
            tags=list(config.trackers.tags) or None,
            notes=config.trackers.notes,
            name=config.run.name,
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=without_secrets(config.model_dump(mode="json")),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._teardown = wandb.teardown

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in _numbers(metrics).items() if not math.isnan(value)}, step=step)

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # `finish` returns before wandb's own process has written the file


class _MLflow:
    """Files in the run folder, or the server that MLFLOW_TRACKING_URI names. A resumed run is a second run of the same name."""

    def __init__(self, config: AnyConfig, folder: Path, resume_after_step: int | None) -> None:
        mlflow = _optional("mlflow", "mlflow", "megarl[mlflow]")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # 3.x refuses files, which need no server, without it
        self._metric = mlflow.entities.Metric
        address = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").resolve().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=address)
        name = config.trackers.project
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        settings = config.trackers
        tags = dict.fromkeys(settings.tags, "") | {
            key: value
            for key, value in (("group", settings.group), ("mlflow.note.content", settings.notes))
            if value is not None
        }
        self._run = self._client.create_run(number, run_name=config.run.name, tags=tags).info.run_id
        self._client.log_dict(self._run, without_secrets(config.model_dump(mode="json")), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run, [self._metric(*item, now_ms, step) for item in _numbers(metrics).items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


_KINDS: dict[str, Callable[[AnyConfig, Path, int | None], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of `metrics`, tensors and numpy's among them, as Python numbers."""
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {name: value for name, value in plain.items() if isinstance(value, (int, float))}


def _optional(module: str, name: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"trackers.backends names {name}, but {package} is not installed; pip install '{package}', or leave {name} out"
        ) from None
