"""The trackers that megarl has: TensorBoard, wandb, MLflow and SwanLab, each imported only when it is asked for.

Each is a class that `trackers.py` makes from the config, the run folder and the step that a resumed run continues after.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import AnyConfig
from megarl.config.secrets import without_secrets
from megarl.errors import ConfigError
from megarl.options.telemetry.section import trackers_of


class TensorBoard:
    """Event files in the folder `tensorboard`."""

    def __init__(self, config: AnyConfig, folder: Path, resume_after_step: int | None) -> None:
        module = _optional("torch.utils.tensorboard", "tensorboard", "tensorboard")
        first_step = 0 if resume_after_step is None else resume_after_step + 1
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """Offline, into the run folder, unless WANDB_MODE says otherwise. A resumed run is a second run of the same name."""

    def __init__(self, config: AnyConfig, folder: Path, resume_after_step: int | None) -> None:
        wandb = _optional("wandb", "wandb", "megarl[wandb]")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=trackers_of(config).project,
            entity=trackers_of(config).entity,
            group=trackers_of(config).group,
            tags=list(trackers_of(config).tags) or None,
            notes=trackers_of(config).notes,
            name=config.run.name,
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=without_secrets(config.model_dump(mode="json")),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._teardown = wandb.teardown

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics that are numbers."""
        self._run.log({name: value for name, value in metrics.items() if not math.isnan(value)}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
        self._teardown()  # `finish` returns before wandb's own process has written the file


class MLflow:
    """Files in the run folder, or the server that MLFLOW_TRACKING_URI names. A resumed run is a second run of the same name."""

    def __init__(self, config: AnyConfig, folder: Path, resume_after_step: int | None) -> None:
        mlflow = _optional("mlflow", "mlflow", "megarl[mlflow]")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # 3.x refuses files, which need no server, without it
        self._metric = mlflow.entities.Metric
        address = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").resolve().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=address)
        name = trackers_of(config).project
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        settings = trackers_of(config)
        tags = dict.fromkeys(settings.tags, "") | {
            key: value
            for key, value in (("group", settings.group), ("mlflow.note.content", settings.notes))
            if value is not None
        }
        self._run = self._client.create_run(number, run_name=config.run.name, tags=tags).info.run_id
        self._client.log_dict(self._run, without_secrets(config.model_dump(mode="json")), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics in one batch."""
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run, [self._metric(*item, now_ms, step) for item in metrics.items()])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class SwanLab:
    """Offline, into the run folder, unless SWANLAB_MODE says otherwise. A resumed run is a second run of the same name."""

    def __init__(self, config: AnyConfig, folder: Path, resume_after_step: int | None) -> None:
        swanlab = _optional("swanlab", "swanlab", "megarl[swanlab]")
        logs = folder / "swanlab"
        logs.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=trackers_of(config).project,
            workspace=trackers_of(config).entity,
            group=trackers_of(config).group,
            tags=list(trackers_of(config).tags) or None,
            description=trackers_of(config).notes,
            name=config.run.name,
            log_dir=str(logs),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
            config=without_secrets(config.model_dump(mode="json")),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics that are finite."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _optional(module: str, name: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"trackers.backends names {name}, but {package} is not installed; pip install '{package}', or leave {name} out"
        ) from None
