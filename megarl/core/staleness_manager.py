"""Rules of which prompt groups may start and which train next: bounded staleness as a pure state machine.

A *group* is one prompt with all of its responses, known here by its number: queued → in flight → finished → consumed. There is
no clock, no thread and no engine here; whoever drives it says what happened and is told what may happen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

State = Literal["queued", "in_flight", "finished"]


@dataclass(slots=True)
class _GroupState:
    """One unconsumed group. `version` is that of the weights it was started under, also of one that is queued to go on from
    what it has (-1: it has nothing); `order` counts finished groups."""

    state: State = "queued"
    version: int = -1
    order: int = -1
    deferred: bool = False


@dataclass(frozen=True)
class ConsumedBatch:
    """A batch: group `numbers` in order, each one's `staleness` in versions, and the groups that were `dropped`.

    What was dropped is back in the queue: its responses, under way, finished or kept, must be thrown away.
    """

    numbers: list[int]
    staleness: list[int]
    dropped: list[int]


class StalenessManager:
    """The prompt groups of a run, and the rule that keeps staleness η: consumed at version v means started at v − η or later.

    **Admission.** A group at place p among the unconsumed ones will be consumed at version `v` if p is within what is still
    due at v, else at `v + 1 + (p − due) // batch_size` at the latest, since one step makes at most one version. It may be
    started under weights that are at most η older than that. Groups are consumed in the order in which they were made, so
    a long response delays its batch and is never replaced by a shorter one.

    **Over-sampling.** With `over_sample` k > 0, k more groups than are due may be started, and the first to finish make the
    batch. The k others are passed over, which happens to a group once: its next batch waits for it. Of these, the ones
    that would exceed η in the next batch go back into the queue.

    **Continuing.** With `continues`, these are consumed with what they have, one version older than η allows: a group that is
    suspended goes on from there, and counts as started when it was started first.

    So the bound (η + 1 with `continues`) holds whatever happens, and without over-sampling no group is ever thrown away for its
    age.

    **Cost.** `start`, `finish` and what puts a group back cost O(log groups), `ready` O(1); what a step calls once, O(groups).
    """

    def __init__(self, batch_size: int, staleness: int, over_sample: int = 0, *, continues: bool = False) -> None:
        """`over_sample` may be at most `batch_size`, or a batch could not hold all groups that were passed over."""
        if batch_size < 1 or staleness < 0 or not 0 <= over_sample <= batch_size:
            raise ValueError(
                f"batch_size is {batch_size}, staleness {staleness} and over_sample {over_sample}; they must be at least 1, "
                "at least 0 and from 0 to batch_size"
            )
        self.batch_size, self.staleness, self.over_sample = batch_size, staleness, over_sample
        self.continues = continues
        self.version = 0
        self.due = 0
        self.requeued = 0
        """Times that a started group went back into the queue, for any reason."""
        self.aborted = 0
        """Those of them in which it would have become too old."""
        self.suspended = 0
        """Times that a started group went back into the queue with what there was of its responses."""
        self._made = 0
        self._finished = 0
        self._groups: dict[int, _GroupState] = {}  # unconsumed, by number
        self._places: list[int] = []  # their numbers, ascending: a group's index is its place
        self._queued: list[int] = []  # those of them in this state, as a heap
        self._counts: dict[State, int] = {"queued": 0, "in_flight": 0, "finished": 0}
        self._last: int | None = None  # the last number in the window; None: it is counted anew, with what follows
        self._done = 0  # groups in the window that have finished
        self._awaited: set[int] = set()  # those that the batch must have, and that have not

    # the trainer's side -------------------------------------------------------------------------------------------

    def add(self, count: int) -> list[int]:
        """Queue `count` new groups behind all others; returns their numbers."""
        numbers = list(range(self._made, self._made + count))
        self._made += count
        self._enter({number: _GroupState() for number in numbers})
        return numbers

    @property
    def room(self) -> int:
        """Number of groups that may be of use before the next batch is taken."""
        needed = self.due + self.staleness * self.batch_size + self.over_sample
        return max(0, needed - len(self._groups))

    def open_step(self, version: int, due: int | None = None) -> list[int]:
        """The next batch, of `due` groups (None: `batch_size`), is for a policy of this `version`; returns what is dropped."""
        if version < self.version:
            raise ValueError(f"the policy's version goes from {self.version} to {version}; it may only rise")
        self.version, self.due = version, self.batch_size if due is None else due
        self._last = None
        return self._drop_older_than(version - self.staleness)

    def ready(self) -> bool:
        """Return whether a batch can be taken."""
        if self.due and self._last is None:
            window = self._window()
            self._last = window[-1] if window else -1
            self._done = sum(self._groups[number].state == "finished" for number in window)
            self._awaited = {number for number in self._owed() if self._groups[number].state != "finished"}
        return 0 < self.due <= self._done and not self._awaited

    def pop_batch(self) -> ConsumedBatch:
        """Consume the batch that is due; ValueError if it is not ready."""
        if not self.ready():
            raise ValueError(f"{self.due} groups are due, but they are not all finished")
        batch = self._batch()
        for number in self._window():
            self._groups[number].deferred = True
        staleness = [self.version - self._groups.pop(number).version for number in batch]
        self._places = sorted(self._groups)
        self._counts["finished"] -= len(batch)
        self.due, self._last = 0, None
        return ConsumedBatch(batch, staleness, self._drop_older_than(self.version + 1 - self.staleness))

    # the engines' side --------------------------------------------------------------------------------------------

    def start(self, version: int, limit: int) -> list[int]:
        """Put up to `limit` queued groups in flight under weights of `version`, the first ones first; returns them."""
        started: list[int] = []
        while self._queued and len(started) < limit:
            number = self._queued[0]
            if self._consumed_at(bisect_left(self._places, number)) - version > self.staleness:
                break
            heappop(self._queued)
            group = self._groups[number]
            self._put(group, "in_flight")
            if group.version < 0:
                group.version = version
            started.append(number)
        return started

    def startable(self, version: int) -> int:
        """Number of queued groups that `start` would put in flight under weights of `version` now."""
        at = (bisect_left(self._places, number) for number in self._queued)
        return sum(self._consumed_at(position) - version <= self.staleness for position in at)

    def finish(self, number: int) -> None:
        """All responses of a group in flight are there."""
        group = self._groups[number]
        if group.state != "in_flight":
            raise ValueError(f"group {number} is {group.state}, and cannot finish")
        self._put(group, "finished")
        group.order = self._finished
        self._finished += 1
        self._done += self._last is not None and number <= self._last
        self._awaited.discard(number)

    def requeue(self, numbers: Iterable[int]) -> None:
        """These groups in flight came to nothing, as when an engine died; they are queued again, at their old places."""
        for number in numbers:
            self._check_in_flight(number)
            self._queue(number)

    def suspend(self, numbers: Iterable[int]) -> None:
        """These groups in flight were stopped, and what there is of their responses is kept; they are queued to go on."""
        for number in numbers:
            self._check_in_flight(number)
            self._put(self._groups[number], "queued")
            heappush(self._queued, number)
            self.suspended += 1

    def _check_in_flight(self, number: int) -> None:
        if self._groups[number].state != "in_flight":
            raise ValueError(f"group {number} is {self._groups[number].state}, and cannot be put back")

    # figures and checkpoints --------------------------------------------------------------------------------------

    def count(self, state: State) -> int:
        """Unconsumed groups in `state`."""
        return self._counts[state]

    @property
    def unconsumed(self) -> list[int]:
        """Numbers of all groups that were not consumed, in order."""
        return list(self._places)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, JSON-able: what is in flight will have to be started again, what is finished not.

        `finished` has number, version and order of each finished group.
        """
        groups = [[number, self._groups[number].deferred, self._groups[number].version] for number in self._places]
        finished = [[n, t.version, t.order] for n, t in sorted(self._groups.items()) if t.state == "finished"]
        return {"made": self._made, "version": self.version, "tickets": groups, "finished": finished}

    def load_state_dict(self, state: dict[str, Any], kept: Container[int] = ()) -> None:
        """Continue from `state_dict()`'s answer: every unconsumed group that is not finished is queued; those whose responses
        are `kept` are queued to go on."""
        self._made, self.version, self.due = state["made"], state["version"], 0
        self._groups, self._places, self._queued, self._counts = {}, [], [], dict.fromkeys(self._counts, 0)
        self._enter(
            {
                number: _GroupState(deferred=deferred, version=version[0] if number in kept else -1)
                for number, deferred, *version in state["tickets"]  # earlier versions wrote none
            }
        )
        for number, version, order in state.get("finished", []):
            group = self._groups[number]
            self._put(group, "finished")
            group.version, group.order = version, order
            self._finished = max(self._finished, order + 1)
        self._queued = [number for number in self._places if self._groups[number].state == "queued"]

    # the rule -----------------------------------------------------------------------------------------------------

    def _consumed_at(self, place: int) -> int:
        """The version at which the group at `place` is consumed at the latest."""
        if self.due and place < self.due + self.over_sample:
            return self.version
        return self.version + 1 + max(0, place - self.due - self.over_sample) // self.batch_size

    def _window(self) -> list[int]:
        """The groups that the batch that is due is chosen from."""
        return self._places[: self.due + self.over_sample] if self.due else []

    def _owed(self) -> list[int]:
        """Groups of the window that the batch must have: those that were passed over before."""
        return [number for number in self._window() if self._groups[number].deferred][: self.due]

    def _batch(self) -> list[int]:
        """The batch that is ready: groups that were passed over before, then the first that finished."""
        owed = self._owed()
        finished = {number for number in self._window() if self._groups[number].state == "finished"}
        others = sorted(finished - set(owed), key=lambda number: self._groups[number].order)
        return sorted([*owed, *others[: self.due - len(owed)]])

    def _drop_older_than(self, version: int) -> list[int]:
        oldest = version - self.continues
        old = [n for n, group in self._groups.items() if -1 < group.version < oldest]
        for number in old:
            self._queue(number)
        self.aborted += len(old)
        return old

    def _enter(self, groups: dict[int, _GroupState]) -> None:
        """Take in queued groups with higher numbers than all others."""
        self._groups |= groups
        self._places += groups
        self._queued += groups  # which leaves it a heap
        self._counts["queued"] += len(groups)
        self._last = None

    def _queue(self, number: int) -> None:
        """Back to its old place, as if it had not been started."""
        group = self._groups[number]
        if group.state != "queued":
            self._put(group, "queued")
            heappush(self._queued, number)
        group.version, group.order = -1, -1
        self.requeued += 1

    def _put(self, group: _GroupState, state: State) -> None:
        self._counts[group.state] -= 1
        self._counts[state] += 1
        group.state = state
