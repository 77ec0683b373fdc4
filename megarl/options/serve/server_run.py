"""The run folder of a server: its config, marks, metrics, and who watches; each minute in which something happens is a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megarl.config import Config, save_resolved
from megarl.errors import RunStopped
from megarl.experience.samples_file import SamplesFile
from megarl.observe import MetricsFile, Phases
from megarl.observe.kept_lines import mend_ends
from megarl.observe.metrics import read_metrics
from megarl.observe.run_state import RunState
from megarl.options.serve.figures import ServerFigures
from megarl.options.serve.served_samples import ServedSamples, as_record
from megarl.runs.marks import RunMarks
from megarl.runs.observers import RunStart, open_observers
from megarl.runs.run_checkpoint import CheckpointFolder
from megarl.supervise.child_run import follow
from megarl.system.threads import repeating

STEP_S = 60.0
"""Seconds of the figures of one row of `metrics.jsonl`."""


class ServerRun:
    """The files of a server, and the figures in them. A server that is started again in its folder goes on with both."""

    def __init__(self, config: Config, say: Callable[[str], None], *, step_s: float = STEP_S) -> None:
        """Open the folder `config.run_folder`, which this process owns; `close` ends it."""
        self.folder, self.figures, self.phases = Path(config.run_folder), ServerFigures(), Phases()
        self.state, self._say, self._step_s = RunState(config), say, step_s
        self.samples = ServedSamples(config.run.log_samples)
        self._samples_file: SamplesFile | None = None
        self._stack, self._lock, self._since = ExitStack(), threading.Lock(), time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        for line in mend_ends(self.folder):
            say(line)
        path = self.folder / "metrics.jsonl"
        self.step = max((row["step"] for row in read_metrics(path)), default=0)
        self.state.say = say
        self.state.begin_after(self.step)
        follow(self.phases)
        self.phases.listen(self.state.phase_changed)
        save_resolved(config, self.folder / "config.yaml")
        self.marks = RunMarks(self.folder, leads=True)
        self.marks.begin()
        self._file = MetricsFile(path, resume_after_step=self.step)
        self._stack.callback(self._file.close)
        self._observers = open_observers(config, CheckpointFolder(self.folder / "checkpoints"))
        start = RunStart(self.state, self.step or None, is_continued=self.step > 0, say=say)
        for observer in self._observers:
            self._stack.callback(observer.close)
            observer.started(start)

    def open_samples(self, tokenizer: Any) -> None:
        """Have samples written to `samples.jsonl` from now on, with the texts of `tokenizer`."""
        path = self.folder / "samples.jsonl"
        self._tokenizer, self._samples_file = tokenizer, SamplesFile(path, self.samples.most, self.step or None, tokenizer)

    def watch(self) -> None:
        """Write figures every minute from now on, in a thread of its own."""
        self._since = time.monotonic()
        self._stack.enter_context(repeating(self.record, self._step_s, "figures of a server"))

    def record(self) -> None:
        """Write what happened since the last time, if anything did."""
        with self._lock:
            now = time.monotonic()
            metrics = self.figures.take(now - self._since)
            self._since = now
            if not metrics:
                return
            self.step += 1
            if self._samples_file is not None:
                self._samples_file.add(self.step, [as_record(answer, self._tokenizer) for answer in self.samples.drain()])
            self._file.log(self.step, metrics)
            self.state.log(self.step, metrics)
            for observer in self._observers:
                observer.logged(self.step, metrics)
                for line in observer.take_lines():
                    self._say(line)

    def close(self, error: BaseException) -> None:
        """Write the last figures, and how the server ended: by `error`, which is RunStopped where it was told to."""
        self._stack.callback(self.record)
        self._stack.close()
        self.marks.end(error)
        for observer in self._observers:
            observer.end(wait=isinstance(error, RunStopped))
