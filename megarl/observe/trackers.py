"""Where metrics go besides `metrics.jsonl`: TensorBoard and wandb, both optional and imported only when asked for.

One `Trackers.log(step, metrics)` writes to all of them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megarl.config import Config, SupervisedConfig
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


def open_trackers(config: Config | SupervisedConfig, *, resume_after_step: int | None = None) -> Trackers:
    """Open what `config.trackers` asks for in the run folder.

    Raises:
        ConfigError: a tracker's package is not installed; the sentence says how to install it or which field to turn off.
    """
    folder = Path(config.run_folder)
    wanted: list[Tracker] = []
    if config.trackers.tensorboard:
        wanted.append(_TensorBoard(folder / "tensorboard", resume_after_step))
    if config.trackers.wandb.enabled:
        wanted.append(_Wandb(config, folder))
    return Trackers([MetricsFile(folder / "metrics.jsonl", resume_after_step=resume_after_step), *wanted])


class _TensorBoard:
    def __init__(self, folder: Path, resume_after_step: int | None) -> None:
        module = _optional("torch.utils.tensorboard", "trackers.tensorboard", "tensorboard")
        first_step = 0 if resume_after_step is None else resume_after_step + 1
        self._writer = module.SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, config: Config | SupervisedConfig, folder: Path) -> None:
        wandb = _optional("wandb", "trackers.wandb.enabled", "megarl[wandb]")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.trackers.wandb.project,
            name=config.run.name,
            dir=str(folder),
            mode=config.trackers.wandb.mode,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in metrics.items() if not _is_nan(value)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _optional(module: str, field: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{field} is true, but {package} is not installed; pip install {package}, or set it to false"
        ) from None
