"""The common part of every kind of run: its folder, its phases, when it evaluates and saves, how it resumes and ends.

Under Ray one driver runs this; under torchrun every rank does, and only rank 0 writes files.
"""

from __future__ import annotations

import errno
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from megarl.config import AnyConfig, Config, SupervisedConfig, save_resolved, to_yaml
from megarl.config.guard_rules import GuardRule
from megarl.core.protocols import Placed
from megarl.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    MegarlError,
    OwnerError,
    RunInterrupted,
    RunStopped,
    WorkerError,
    counted,
    nearest,
)
from megarl.observe import MetricsFile, Phases, Progress, build_summary, evaluation_line, read_summary, write_summary
from megarl.observe.kept_lines import mend_ends
from megarl.observe.progress import aligned, gate_line
from megarl.observe.run_state import RunState
from megarl.runs.expert_record import ExpertRecord
from megarl.runs.folders import checkpoint_in
from megarl.runs.guards import Guards, newest_sound_before
from megarl.runs.leader_first import leader_first
from megarl.runs.marks import RunMarks
from megarl.runs.observers import RunStart, open_observers
from megarl.runs.profiling import Profiling
from megarl.runs.provenance import provenance
from megarl.runs.resuming import differences_at_resume
from megarl.runs.run_checkpoint import CheckpointFolder, read_state
from megarl.runs.run_template import template_of
from megarl.runs.saving import Saving, unwritable
from megarl.runs.stop import StopRequest
from megarl.runs.timeline import Timeline
from megarl.runs.training_side import POLICY, REFERENCE, TrainingSide
from megarl.supervise.child_run import follow, is_restart
from megarl.system.atomic_files import write_text_atomically
from megarl.system.processor import slow_bfloat16
from megarl.system.safe_console import SafeConsole
from megarl.system.torchrun import is_torchrun

OneConfig = TypeVar("OneConfig", Config, SupervisedConfig)
_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Run(ABC):
    """One run, as a context manager: entering starts its processes, leaving ends them, whatever happened.

    The constructor of each kind of run reads what the user gave: whatever may be wrong with it is said while nothing is
    written, and no process of the run is started but Ray's own.
    """

    shown: ClassVar[Mapping[str, str]]
    """Label and metric name of what the progress shows of every step."""
    roles: TrainingSide
    experts: ExpertRecord

    def __init__(self, config: AnyConfig, *, leads: bool = True) -> None:
        """`leads`: this process writes the run's files and shows its progress."""
        self.folder = Path(config.run_folder)
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints", config.run.keep_checkpoints, config.run.keep_best)
        self.saving = Saving(self.checkpoints, to_yaml(config), leads=leads)
        self.observers = open_observers(config, self.checkpoints) if leads else []
        self.marks = RunMarks(self.folder, leads=leads)
        self.phases = Phases()
        self.step = 0
        self.evaluations: dict[str, dict[str, float] | None] = {"before": None, "after": None}
        self.metrics: dict[str, float] = {}
        self.leads = leads
        self.was_finished = False
        self.guards = Guards(config.run.guards)
        self.profiling = Profiling(config.profile, self.folder / "profile")
        self._settings = config
        self._stack = ExitStack()
        self._after_step: list[str] = []
        self._stop = StopRequest()
        self.watching = RunState(config)
        self._saved_at = time.monotonic()

    def count_epochs(self, config: OneConfig, rows: int, per_step: int) -> OneConfig:
        """Give, where `run.epochs` is set, `config` with the steps that pass so often over `rows` rows, `per_step` in a
        step."""
        run = config.run
        if run.epochs is None:
            return config
        steps = ceil(Fraction(repr(run.epochs)) * rows / per_step)
        self._settings = config = config.model_copy(update={"run": run.model_copy(update={"steps": steps})})
        self.saving.config_text = to_yaml(config)
        self.watching.steps = steps
        return config

    @abstractmethod
    def start(self) -> None:
        """Start processes and load `self.roles`; the first lines to be said go to `self.progress`."""

    @abstractmethod
    def measure(self) -> dict[str, float] | None:
        """The figures of an evaluation of the current weights; None where there is nothing to evaluate on."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """State for a checkpoint besides the roles, the step and the evaluations; JSON-able."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`'s answer."""

    @abstractmethod
    def go_to_row(self, state: dict[str, Any]) -> list[str]:
        """Go to the place in the data of `state()`'s answer, before anything starts; returns what is to be said of it. Raises
        CheckpointError where the rows are others, and the config does not say how to go on."""

    @abstractmethod
    def gates(self) -> dict[str, float | None]:
        """The parity figures so far."""

    def gate_bounds(self) -> Mapping[str, float]:
        """The greatest sound value of each parity figure that has one."""
        return {}

    def __enter__(self) -> Self:
        with self.telling_of_disk_trouble():
            try:
                self._open()
            except BaseException as error:
                self.marks.end(error)
                for observer in self.observers:
                    observer.end(wait=False)
                self._stack.close()
                raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.marks.end(error)
        ranks_are_well = isinstance(error, Exception) and not isinstance(error, WorkerError | DeadlineError | OwnerError)
        if self.saving.is_under_way and ranks_are_well and not is_torchrun():  # else other drivers may know of no error
            with suppress(MegarlError):  # what is there already is not to be lost, whatever happened since
                self.saving.finish(self.roles, wait=True)
        self._stack.close()
        for observer in self.observers:
            observer.end(wait=error is None or ranks_are_well)
            for line in observer.take_lines():
                self.progress.say(line)
        if self.leads and not isinstance(error, OwnerError):
            self.checkpoints.remove_unfinished()
        if isinstance(error, OSError) and error.errno in _DISK_TROUBLE:
            raise self._disk_trouble(error) from error
        if isinstance(error, KeyboardInterrupt) and self.leads:
            raise RunInterrupted(f"interrupted after step {self.step} of {self._settings.run.steps}; {self._how_to_go_on()}")

    def _resume_point(self) -> Path | None:
        """The checkpoint to continue from, fetched from the second place if need be; None: begin anew."""
        resume = self._resume_from(self._settings.run.resume)
        fetched: list[Path] = []

        def fetch() -> None:
            for observer in self.observers:
                if (checkpoint := observer.fetch(resume, is_restart=is_restart())) is not None:
                    fetched.append(checkpoint)

        leader_first(fetch)
        return fetched[0] if fetched else self.checkpoints.resolve(resume)

    def _refuse_unwritable(self) -> None:
        if (why := unwritable(self.folder)) is not None:
            name = self._settings.run.folder
            raise ConfigError(f"run.folder is '{name}', but nothing can be written to {self.folder} ({why})")

    def _resume_from(self, resume: str) -> str:
        """`run.resume`, where it names another run's folder as the newest checkpoint in it."""
        return resume if resume in ("never", "auto") else str(checkpoint_in(resume) or resume)

    def _how_to_go_on(self) -> str:
        newest = self.checkpoints.all()[-1:]
        if not newest:
            return f"there is no checkpoint in {self.checkpoints.folder}, so run.resume=auto would begin anew"
        return f"run.resume=auto continues from the newest checkpoint, {newest[0]}"

    @contextmanager
    def telling_of_disk_trouble(self) -> Iterator[None]:
        """A disk that is full or cannot be written to becomes one sentence."""
        try:
            yield
        except OSError as error:
            if error.errno in _DISK_TROUBLE:
                raise self._disk_trouble(error) from error
            raise

    def _disk_trouble(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"'{error.filename or self.folder}' cannot be written to ({error.strerror}); once it can, run.resume=auto "
            "continues from the newest checkpoint"
        )

    def _open(self) -> None:
        config, early = self._settings, list[str]()
        self.watching.say = early.append
        self._stack.enter_context(self._stop)
        follow(self.phases)
        resume_from = self._resume_point()
        state = read_state(resume_from) if resume_from is not None else None
        self.step = state["step"] if state is not None else 0
        changed = differences_at_resume(resume_from, config, self.step)
        changed += self.go_to_row(state) if state is not None else []
        self._refuse_to_overwrite()
        self.was_finished = self.finished and (self.folder / "summary.json").exists()
        if self.leads:
            self._refuse_unwritable()
            if not is_restart():
                early += aligned(config.batch_rows()) + slow_bfloat16(config.model.dtype)
            early += mend_ends(self.folder)
            self._watch(has_state=state is not None)
            self.checkpoints.remove_unfinished()
            save_resolved(config, self.folder / "config.yaml")
            self.marks.begin()
            resume_after = self.step if state is not None else None
            self._metrics_file = MetricsFile(self.folder / "metrics.jsonl", resume_after_step=resume_after)
            self._stack.callback(self._metrics_file.close)
        experts = self.folder / "experts.jsonl" if self.leads else None
        self.experts = ExpertRecord(experts, self.step if state is not None else None)
        self._stack.callback(self.experts.close)
        trace = self.folder / "trace.jsonl" if self.leads else None
        self.timeline = Timeline(trace, self.phases, self.step if state is not None else None, self.observers)
        self._stack.callback(self.timeline.close)
        progress = Progress(
            config.run.steps, self.phases, first_step=self.step, shown=self.shown, console=SafeConsole(quiet=not self.leads)
        )
        self.progress = self._stack.enter_context(progress)
        self.watching.say = self.progress.say
        for line in early:
            self.progress.say(line)
        self._stop.tell = self._tell_of_stop
        self.phases.listen(self._name_what_is_written)
        for damage in self.checkpoints.damaged:
            self.progress.say(f"a checkpoint was passed over: {damage}")
        for line in (*self._observers_lines(), *changed):
            self.progress.say(line)
        if not self.was_finished:
            with self.phases("start"):
                self.start()
                self.marks.note(gpu=self.roles.device)
                self.watching.ranks = {name: group.states for name, group in self.roles.groups.items()}
                if resume_from is not None:
                    self.progress.doing("checkpoint")
                    self.roles.restore(str(resume_from.resolve()))
            self.progress.say_parts("started")
        if state is not None:
            self.evaluations.update(state["evaluations"])
            self.load_state(state)
        self.saving.then = self._saved
        if resume_from is not None and resume_from.parent == self.checkpoints.folder:
            self._saved(resume_from)

    def _watch(self, *, has_state: bool) -> None:
        """Tell of the run's state from now on; `has_state`: it goes on from a checkpoint."""
        is_continued = has_state or self.watching.restarts > 0
        self.watching.begin_after(self.step)
        self.watching.guards = self.guards.counts
        self.watching.checkpoint = lambda: next(reversed(self.checkpoints.all()), None)
        self.phases.listen(self.watching.phase_changed)
        resume_after = self.step if has_state else None
        start = RunStart(self.watching, resume_after, is_continued, say=lambda line: self.watching.say(line))
        for observer in self.observers:
            self._stack.callback(observer.close)
            observer.started(start)

    def _tell_of_stop(self) -> None:
        again = "; Ctrl-C again leaves at once" if self._stop.received == "Ctrl-C" else ""
        self.progress.say(f"{self._stop.received}: finishing the step in progress, then saving{again}")

    def tell_placement(self, placement: Placed) -> None:
        """Say in one line where ranks and engines are, and write all of it to `placement.json`."""
        if self.leads:
            self.marks.note(gpus=placement.gpu_count)
            write_text_atomically(self.folder / "placement.json", json.dumps(placement.as_json(), indent=1) + "\n")
            self.progress.say(f"placement: {placement.summary()}")

    def _name_what_is_written(self, phase: str | None) -> None:
        """At the begin of every phase, so that a checkpoint is there soon after it is whole."""
        if phase is not None and self.saving.is_under_way:
            self.saving.finish(self.roles, wait=False)

    def _refuse_to_overwrite(self) -> None:
        """With `auto`, as a batch system restarts a job, what a run left that had no checkpoint yet is begun anew."""
        metrics, model = self.folder / "metrics.jsonl", self.folder / "model"
        if self._settings.run.export and model.exists() and not self.finished:
            raise ConfigError(f"run.export is true, but {model} exists already; move it away, or give another run.name")
        if self._settings.run.resume == "never" and metrics.exists() and metrics.stat().st_size:
            raise ConfigError(
                f"run.name is '{self._settings.run.name}', but {self.folder} already holds a run; give this one another "
                "run.name, continue it with run.resume=auto, or remove the folder"
            )

    @property
    def finished(self) -> bool:
        """Return whether the last step is done."""
        return self.step >= self._settings.run.steps

    @contextmanager
    def next_step(self) -> Iterator[None]:
        """One training step; what happens inside is timed and its metrics are collected."""
        self.metrics = {}
        self._stop.has_steps = True
        with self.profiling.of_step(self.step + 1, self.roles), self.phases.step():
            yield
        self.step += 1

    def reset_reference_if_due(self) -> None:
        """Move the reference towards the policy where `reference.reset_every` says so; for a step, before it asks either."""
        reference = self._settings.reference
        if reference.reset_every and self.step and self.step % reference.reset_every == 0:
            self.roles.copy_weights(POLICY, REFERENCE, reference.reset_share)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write the metrics of the step that was just done, and show them."""
        assert self.phases.last_step is not None, "metrics come after a step"
        self.metrics |= {**metrics, **self.phases.last_step.metrics(), **self.timeline.record(self.step, self.roles)}
        self.experts.write(self.step)
        if self.leads:
            self._record(self.step)
            self.progress.step_done(self.step, self.metrics)
        for line in (*self._after_step, *self._observers_lines()):
            self.progress.say(line)
        self._after_step.clear()

    def _record(self, step: int) -> None:
        """Write the metrics of `step`, with those of observers, which no guard sees: only the leader has them."""
        metrics = dict(self.metrics)
        for observer in self.observers:
            metrics |= observer.figures()
        self._metrics_file.log(step, metrics)
        self.watching.log(step, metrics)
        for observer in self.observers:
            observer.logged(step, metrics)

    def _observers_lines(self) -> list[str]:
        return [line for observer in self.observers for line in observer.take_lines()]

    def _saved(self, checkpoint: Path) -> None:
        for observer in self.observers:
            observer.saved(checkpoint)

    def save_if_due(self) -> None:
        """Save as `run.save_every` and `run.save_minutes` say, after the last step, and when told to stop, which ends the run.

        Training goes on while a checkpoint is written, but no other is begun and the run does not end before it is whole.

        Raises:
            RunStopped: after a signal, with everything saved.
            CheckpointError: this checkpoint, or the one before, could not be written.
        """
        every, minutes = self._settings.run.save_every, self._settings.run.save_minutes
        any_rank = self.roles.groups[POLICY].any_rank
        warned = any_rank(self._stop.received is not None)
        late = bool(minutes) and any_rank(time.monotonic() - self._saved_at >= 60 * minutes)
        if self.finished or warned or late or (every and self.step % every == 0):
            self._saved_at = time.monotonic()
            with self.phases("save"):
                self.saving.finish(self.roles, wait=True)
                self._begin_to_save()
                self.saving.finish(self.roles, wait=self.finished or warned)
        elif self.saving.is_under_way:
            self.saving.finish(self.roles, wait=False)
        if warned and not self.finished:
            kind = RunInterrupted if self._stop.received == "Ctrl-C" else RunStopped
            raise kind(
                f"stopped by {self._stop.received or 'a signal to another rank'} after step {self.step} of "
                f"{self._settings.run.steps}; run.resume=auto continues from {self.checkpoints.folder}/step_{self.step:06d}"
            )

    def evaluate_if_due(self) -> None:
        """Evaluate at `run.eval_every` and after the last step."""
        every = self._settings.run.eval_every
        if self.finished:
            self.evaluate("after")
        elif every and self.step % every == 0:
            self.evaluate(f"step {self.step}")

    def evaluate(self, when: str) -> None:
        """Measure the current weights, unless that was done before the run was resumed."""
        if self.evaluations.get(when) is not None or self.was_finished:
            return
        if when == "before" and not self._settings.run.eval_before:
            return
        with self.phases("evaluate"):
            started = time.perf_counter()
            result = self.measure()
        if result is None:
            return
        best = self._settings.run.keep_best
        if best is not None and best not in result:
            choices = ", ".join(sorted(result))
            raise ConfigError(f"run.keep_best is '{best}'; it must be one of {choices}{nearest(best, result)}")
        result["seconds"] = time.perf_counter() - started
        self.evaluations[when] = result
        line = f"evaluation {when}: {evaluation_line(result)}"
        if self.step:  # behind the line of its step, which `log` shows
            self._after_step.append(line)
        else:
            self.progress.say(line)
        self.metrics |= {f"eval/{name}": value for name, value in result.items()}
        if not self.step and self.leads:
            self._record(0)

    def roll_back(self, rule: GuardRule) -> dict[str, Any]:
        """Give every role its weights and moments from the newest sound checkpoint from before `rule` was broken.

        Prompts and step numbers go on: the same samples would lead to the same place. Returns the driver's state of the
        checkpoint.

        Raises:
            GuardError: there is no such checkpoint.
        """
        self.saving.finish(self.roles, wait=True)
        folder = newest_sound_before(self.checkpoints.all(), self.step, rule)
        self.progress.say(
            f"after step {self.step}: the guard '{rule}' applies, so weights and moments are those of {folder} again"
        )
        with self.phases("rollback"):
            self.roles.restore(str(folder.resolve()))
        self.guards.went_back()
        return read_state(folder)

    def finish(self) -> dict[str, Any]:
        """Write `summary.json` and return it; a run that was already finished keeps the summary that it has.

        One that did its last step and was then killed does only what is still to be done.
        """
        path = self.folder / "summary.json"
        if self.was_finished:
            self.progress.say(f"{self.folder} is finished; its summary is in {path}")
            return read_summary(path)
        model = self.folder / "model"
        if self._settings.run.export and not self.roles.groups[POLICY].any_rank(model.exists()):
            with self.phases("export"):
                self.roles.export(POLICY, str(model.resolve()))
        self.timeline.record(self.step, self.roles)
        extra = {"template": template_of(self._settings.data), "guards": self.guards.totals()}
        extra["gate_bounds"] = dict(self.gate_bounds())
        before, after = self.evaluations["before"], self.evaluations["after"]
        summary = build_summary(
            self._settings, self.phases, eval_before=before, eval_after=after, gates=self.gates(), extra=extra
        )
        if self.leads:
            write_summary(path, summary)
            if newest := self.checkpoints.all()[-1:]:
                self._saved(newest[0])  # again, for the summary
            self._say_result()
            self._say_where(model)
        return summary

    def _say_where(self, model: Path) -> None:
        """Say where the results are, and the command that shows them."""
        self.progress.say(f"done: {self.folder}\nto see it: megarl report {self.folder}")
        if newest := self.checkpoints.all()[-1:]:
            self.progress.say(f"newest checkpoint: {newest[0]}")
        if model.exists():
            self.progress.say(f"exported model: {model}")
        for line in (line for observer in self.observers for line in observer.last_lines()):
            self.progress.say(line)

    def _say_result(self) -> None:
        before, after = self.evaluations["before"], self.evaluations["after"]
        if before is not None and after is not None:
            if "reward" in before:
                self.progress.say(
                    f"held-out reward: {before['reward']:.4g} before, {after['reward']:.4g} after {counted(self.step, 'step')}"
                )
            for name in (name for name in before if name == "accuracy" or name.rpartition("/")[2].startswith("avg@")):
                what = "held-out accuracy" if name == "accuracy" else name
                self.progress.say(f"{what}: {before[name]:.1%} before, {after[name]:.1%} after {counted(self.step, 'step')}")
        bounds = self.gate_bounds()
        for name, value in self.gates().items():
            self.progress.say(f"gate {name}: {gate_line(value, bounds.get(name))}")

    def _begin_to_save(self) -> None:
        state = {"step": self.step, "evaluations": self.evaluations, **self.state()}
        origin = provenance(self.saving.config_text, self.step, state.get("weight_version"))
        evaluation = self.evaluations.get("after" if self.finished else f"step {self.step}")
        self.saving.begin(self.roles, self.step, state, origin, evaluation)
