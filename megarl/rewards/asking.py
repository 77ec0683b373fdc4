"""One source of reward that is asked: with a deadline, and ahead about responses whose group is finished, while others are
still sampled.
"""

from __future__ import annotations

import copy
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from megarl.data.sample import Sample
from megarl.errors import RewardError
from megarl.rewards.scorer import Outcome, Scorer, Verdict

_MARGIN_S = 5.0
"""Seconds before the deadline at which a scorer is told to be done, so that slow answers get 0 and do not end the run."""


def outcomes_of(scorer: Scorer, until: float, label: str, deadline_s: float, samples: Sequence[Sample]) -> list[Outcome]:
    """One outcome per sample, an error in place of each number that is not finite.

    Raises:
        RewardError: the source gave another number of them, or none in time; what it raises is passed on.
    """
    verdicts = verdicts_within(scorer, samples, until, label, deadline_s)
    if len(verdicts) != len(samples):
        raise RewardError(f"reward '{label}' gave {len(verdicts)} rewards for {len(samples)} samples")
    outcomes: list[Outcome] = []
    for sample, verdict in zip(samples, verdicts, strict=True):
        if isinstance(verdict, int | float) and not math.isfinite(verdict):
            outcomes.append(
                RewardError(f"reward '{label}' gave {verdict} to sample {sample.sample_id}; it must be a finite number")
            )
        else:
            outcomes.append(verdict)
    return outcomes


def verdicts_within(
    scorer: Scorer, samples: Sequence[Sample], until: float, label: str, deadline_s: float
) -> Sequence[Outcome]:
    """Call `scorer` in a thread of its own, which is left behind if it does not finish.

    Raises:
        RewardError: it did not finish; what it raises is passed on.
    """
    answer: Future[Sequence[Outcome]] = Future()

    def work() -> None:
        try:
            answer.set_result(scorer(samples, until - min(_MARGIN_S, deadline_s / 10)))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            answer.set_exception(error)

    threading.Thread(target=work, name=f"reward {label}", daemon=True).start()
    try:
        return answer.result(max(until - time.monotonic(), 0))
    except TimeoutError:
        if answer.done():
            raise
        raise RewardError(_late(label, samples, deadline_s)) from None


def _late(label: str, samples: Sequence[Sample], deadline_s: float) -> str:
    return (
        f"reward '{label}' did not score {len(samples)} samples before the deadline of {deadline_s:g} s for all rewards "
        "(of runs: rollout.deadlines.reward_s)"
    )


class VerdictsAhead:
    """Verdicts of one source before a step asks for them; a thread asks it about all samples that have come, in one call.

    A failure is not kept: the source is asked again where the run decides what a failure does.
    """

    def __init__(self, label: str, scorer: Scorer, deadline_s: float) -> None:
        """`deadline_s`: for the samples of one call."""
        self._label, self._deadline_s = label, deadline_s
        self._scorer = copy.copy(scorer)  # what it has started is shared, what it does with errors is not
        self._scorer.keeps_errors = True
        self._asking = threading.Lock()  # a source takes one call at a time
        self._state = threading.Lock()
        self._waiting: dict[int, Sample] = {}
        self._verdicts: dict[int, tuple[weakref.ref[Sample], Verdict]] = {}
        self._is_working, self._is_held = False, False
        self._count = 0

    def begin(self, samples: Sequence[Sample]) -> None:
        """Judge these soon."""
        with self._state:
            self._waiting |= {id(sample): sample for sample in samples}
            if self._is_working or self._is_held or not self._waiting:
                return
            self._is_working = True
        threading.Thread(target=self._work, name=f"reward {self._label}, ahead", daemon=True).start()

    def outcomes(
        self, samples: Sequence[Sample], until: float, ask: Callable[[Sequence[Sample]], Sequence[Outcome]]
    ) -> list[Outcome]:
        """The outcome of each sample in order; `ask` is called on those alone that have none yet.

        Raises:
            RewardError: a call that began ahead is not done `until` then; what `ask` raises is passed on.
        """
        with self._held(samples, until) as known:
            self._count += len(known)
            left = [sample for sample in samples if id(sample) not in known]
            outcomes = known | dict(zip(map(id, left), ask(left) if left else (), strict=True))
        return [outcomes[id(sample)] for sample in samples]

    def take_count(self) -> int:
        """Count of the outcomes since the last call that were there before they were asked for."""
        taken, self._count = self._count, 0
        return taken

    @contextmanager
    def _held(self, samples: Sequence[Sample], until: float) -> Iterator[dict[int, Verdict]]:
        """Keep the source to the block; the value has the verdicts that are there, by the samples' `id`."""
        with self._state:
            self._is_held = True
            for sample in samples:
                self._waiting.pop(id(sample), None)
        try:
            if not self._asking.acquire(timeout=max(until - time.monotonic(), 0)):
                late = _late(self._label, samples, self._deadline_s)
                raise RewardError(f"{late}: it was still asked about earlier ones")
            try:
                with self._state:
                    known = {id(s): self._verdicts.pop(id(s))[1] for s in samples if id(s) in self._verdicts}
                yield known
            finally:
                self._asking.release()
        finally:
            with self._state:
                self._is_held = False
            self.begin(())

    def _work(self) -> None:
        while True:
            with self._asking:
                with self._state:
                    if self._is_held or not self._waiting:
                        self._is_working = False
                        return
                    samples = [*self._waiting.values()]
                    self._waiting.clear()
                with suppress(Exception):
                    outcomes = self._scorer(samples, time.monotonic() + self._deadline_s)
                    self._keep(samples, outcomes)

    def _keep(self, samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> None:
        with self._state:
            for sample, outcome in zip(samples, outcomes, strict=True):
                if outcome is None or (isinstance(outcome, int | float) and math.isfinite(outcome)):
                    key = id(sample)
                    gone = weakref.ref(sample, lambda _, key=key: self._verdicts.pop(key, None))  # type: ignore[misc]
                    self._verdicts[key] = gone, outcome
