"""Destinations of metrics besides `metrics.jsonl`, by one small interface: trackers that megarl has (TensorBoard, wandb, MLflow
and SwanLab, each imported only when it is asked for), and classes of the user's own.

One `Trackers.log(step, metrics)` writes to all of them. A tracker that fails is a line, and never the end of a run.
"""

from __future__ import annotations

import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megarl.config import AnyConfig
from megarl.config.secrets import without_secrets
from megarl.errors import ConfigError, MegarlError
from megarl.observe.metrics import numbers
from megarl.options.telemetry.section import trackers_of
from megarl.system.redaction import redacted
from megarl.system.user_code import describe, load_user_object, why_not_called


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
            notes=_notes(config),
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
            for key, value in (("group", settings.group), ("mlflow.note.content", _notes(config)))
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
            description=_notes(config),
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


def _notes(config: AnyConfig) -> str | None:
    notes = trackers_of(config).notes
    return redacted(notes) if notes else notes


def _optional(module: str, name: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"trackers.backends names {name}, but {package} is not installed; pip install '{package}', or leave {name} out"
        ) from None


FAILURES = 3
"""Failures of a tracker in a row, after which it is told no more."""
_BUILT_IN: dict[str, Callable[[AnyConfig, Path, int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}


class Tracker(Protocol):
    """Anything that takes the metrics of a step.

    A class of the user's own is made as `Class(config, folder, resume_after_step, **args)`: the config as a mapping without its
    secrets, the run folder, the step that a resumed run continues after (None: the run is new), and its `trackers.args`.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of `step`, Python numbers by name; step 0 is the evaluation before training."""

    def close(self) -> None:
        """Write out what is buffered; the run has ended, well or badly."""


class Trackers:
    """Fans one step out to trackers, whose failures do not end the run."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        """`trackers` by the name that lines call them."""
        self._trackers = dict(trackers)
        self._failures = dict.fromkeys(trackers, 0)
        self.say: Callable[[str], None] = lambda line: None
        """Is told in a line of trackers that fail."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step` everywhere."""
        plain = numbers(metrics)
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, dict(plain))
            except Exception as error:  # noqa: BLE001 - whatever a tracker's package or the user's class raises
                self._failed(name, step, error)
            else:
                self._failures[name] = 0

    def close(self) -> None:
        """Close every tracker."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - the same
                self.say(f"tracker {name} could not be closed: {describe(error)}")

    def _failed(self, name: str, step: int, error: Exception) -> None:
        self._failures[name] += 1
        is_last = self._failures[name] >= FAILURES
        more = f"; it failed {FAILURES} times in a row, so it is told no more" if is_last else ""
        self.say(f"tracker {name} did not take step {step}: {describe(error)}{more}")
        if is_last:
            del self._trackers[name]


def open_trackers(config: AnyConfig, *, resume_after_step: int | None = None) -> Trackers:
    """Open what `trackers.backends` asks for in the run folder.

    Raises:
        ConfigError: a tracker's package is not installed, or a class of the user's own cannot be used; the sentence says why.
    """
    folder = Path(config.run_folder)
    with _keeping_signals():
        opened = {name: _open(name, config, folder, resume_after_step) for name in dict.fromkeys(trackers_of(config).backends)}
    return Trackers(opened)


def upload_commands(config: AnyConfig) -> list[str]:
    """Commands that a user types to upload what was written offline."""
    folder = Path(config.run_folder)
    runs = [("wandb", run) for run in sorted((folder / "wandb").glob("offline-run-*"))]
    runs += [("swanlab", run) for run in sorted((folder / "swanlab").glob("run-*"))]
    return [f"`{name} sync {run}` uploads the {name} run" for name, run in runs if name in trackers_of(config).backends]


def _open(name: str, config: AnyConfig, folder: Path, resume_after_step: int | None) -> Tracker:
    if name in _BUILT_IN:
        return _BUILT_IN[name](config, folder, resume_after_step)
    cls = load_user_object(name, _about_own, "class", lambda found: isinstance(found, type))
    missing = [method for method in ("log", "close") if not callable(getattr(cls, method, None))]
    if missing:
        raise _about_own(f"'{name}' has no {' and no '.join(missing)}, which every tracker must have")
    positional: Sequence[Any] = (without_secrets(config.model_dump(mode="json")), folder, resume_after_step)
    args = trackers_of(config).args.get(name, {})
    if (why := why_not_called(cls, *positional, **args)) is not None:
        raise _about_own(f"'{name}' cannot be made of (config, folder, resume_after_step) and trackers.args: {why}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tracker: Tracker = cls(*positional, **args)
    except MegarlError:
        raise
    except Exception as error:
        raise _about_own(f"'{name}' cannot be opened: {describe(error)}") from error
    return tracker


def _about_own(sentence: str) -> ConfigError:
    return ConfigError(f"trackers.backends: {sentence}")


@contextmanager
def _keeping_signals() -> Iterator[None]:
    """Some packages take over Ctrl-C and the hook for exceptions, by which a run saves before it ends: it gets them back."""
    hook = sys.excepthook
    is_main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if is_main else ()
    handlers = {number: signal.getsignal(number) for number in ours}
    try:
        yield
    finally:
        sys.excepthook = hook
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)
