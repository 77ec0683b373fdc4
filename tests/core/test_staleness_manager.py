"""The staleness manager under random interleavings: staleness is bounded, no group is lost or repeated, none waits for ever."""

from __future__ import annotations

import copy
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.staleness_manager import StalenessManager


class Run:
    """A run with random luck: engines that work, die, miss updates and come back; and a book kept apart from the manager's."""

    def __init__(
        self, seed: int, batch_size: int, staleness: int, over_sample: int, engines: int, *, continues: bool = False
    ) -> None:
        self.continues = continues
        self.kept: dict[int, int] = {}  # group that is queued to go on: version it was started under
        self.luck = random.Random(seed)
        self.shape = (batch_size, staleness, over_sample)
        self.manager = StalenessManager(*self.shape, continues=continues)
        self.version = 0
        self.engines: dict[int, int | None] = dict.fromkeys(range(engines), 0)  # version; None: down
        self.in_flight: dict[int, tuple[int, int]] = {}  # group: (engine, version it was started under)
        self.finished: dict[int, int] = {}  # group: version it was started under
        self.consumed: list[int] = []
        self.deferred: dict[int, int] = {}  # group: full batches that were made of others it could have been in
        self.has_skipped = False
        self.manager.open_step(0)

    def start(self, engine: int, limit: int) -> int:
        version = self.engines[engine]
        if version is None:
            return 0
        self.manager.add(self.manager.room)
        numbers = self.manager.start(version, limit)
        assert len(numbers) <= limit
        assert not set(numbers) & (self.in_flight.keys() | self.finished.keys() | set(self.consumed))
        self.in_flight |= {number: (engine, self.kept.pop(number, version)) for number in numbers}
        return len(numbers)

    def finish(self, number: int) -> None:
        self.finished[number] = self.in_flight.pop(number)[1]
        self.manager.finish(number)

    def die(self, engine: int) -> None:
        self.engines[engine] = None
        lost = [number for number, (where, _) in self.in_flight.items() if where == engine]
        for number in lost:
            _, began = self.in_flight.pop(number)
            if self.continues and self.luck.random() < 0.5:  # something of it was kept
                self.kept[number] = began
                self.manager.suspend([number])
            else:
                self.manager.requeue([number])

    def drop(self, numbers: list[int]) -> None:
        for number in numbers:
            assert (number in self.in_flight) + (number in self.finished) + (number in self.kept) == 1
            self.in_flight.pop(number, None), self.finished.pop(number, None), self.kept.pop(number, None)

    def train(self) -> bool:
        """Consume a batch if there is one, and go on to the next step, or ask for a few groups more at this version."""
        if not self.manager.ready():
            return False
        due, (batch_size, staleness, over_sample) = self.manager.due, self.shape
        before = self.manager.unconsumed
        taken = self.manager.pop_batch()
        assert len(taken.numbers) == due
        for number, age in zip(taken.numbers, taken.staleness, strict=True):
            started = self.finished.pop(number)
            assert started >= self.version - staleness - self.continues
            assert age == self.version - started
        if not over_sample:
            assert taken.numbers == before[:due], "consumed in the order in which they were made"
            assert self.has_skipped or not taken.dropped
        if due == batch_size:
            assert set(taken.numbers) >= self.deferred.keys(), "a group is passed over by one full batch at most"
            left = set(before[: due + over_sample]) - set(taken.numbers)
            self.deferred = dict.fromkeys(left, 1)
        self.deferred = {n: times for n, times in self.deferred.items() if n not in taken.numbers}
        self.consumed += taken.numbers
        self.drop(taken.dropped)
        return True

    def next_step(self) -> None:
        """What follows a batch: a new version, which an engine may miss; or none; or a few more groups for this one."""
        what = self.luck.random()
        if what < 0.15:
            self.drop(self.manager.open_step(self.version, self.luck.randint(1, self.shape[0])))
            return
        if what < 0.9:
            skips = self.luck.random() < 0.1  # more than the manager reckons with: it must drop what is too old
            self.has_skipped |= skips
            self.version += 1 + skips
            for engine, version in self.engines.items():
                if version is not None and self.luck.random() < 0.9:
                    self.engines[engine] = self.version
                else:
                    self.die(engine)
        self.drop(self.manager.open_step(self.version))

    def restore(self) -> None:
        """Save, lose everything that is in flight, and go on from the checkpoint."""
        state = json.loads(json.dumps(self.manager.state_dict()))
        self.manager = StalenessManager(*self.shape, continues=self.continues)
        self.kept |= {n: began for n, (_, began) in self.in_flight.items() if self.continues and self.luck.random() < 0.5}
        self.manager.load_state_dict(state, self.kept)
        self.in_flight.clear()
        self.engines = dict.fromkeys(self.engines, self.version)
        self.drop(self.manager.open_step(self.version))

    def act(self) -> None:
        what, engine = self.luck.random(), self.luck.choice(list(self.engines))
        if what < 0.35:
            self.start(engine, self.luck.randint(1, 4))
        elif what < 0.75 and self.in_flight:
            self.finish(self.luck.choice(list(self.in_flight)))
        elif what < 0.9:
            idle = self.train() or not self.manager.due
            if idle and self.luck.random() < 0.7:  # else training goes on, and the engines with it
                self.next_step()
        elif what < 0.95:
            self.die(engine)
        elif what < 0.99:
            self.engines[engine] = self.version
        else:
            self.restore()

    def check(self) -> None:
        """The two books agree, every group is in exactly one place, and what is counted as it happens is what there is."""
        manager = self.manager
        counted_anew = copy.copy(manager)
        counted_anew._last = None
        assert manager.ready() == counted_anew.ready()
        assert len(manager._queued) == manager.count("queued")
        assert (manager.count("in_flight"), manager.count("finished")) == (len(self.in_flight), len(self.finished))
        assert len(set(self.consumed)) == len(self.consumed)
        assert not set(self.consumed) & set(manager.unconsumed)
        made = len(self.consumed) + len(manager.unconsumed)
        assert set(self.consumed) | set(manager.unconsumed) == set(range(made)), "no group is lost"


@settings(max_examples=3000, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 5),
    staleness=st.integers(0, 3),
    extra=st.integers(0, 3),
    engines=st.integers(1, 3),
    continues=st.booleans(),
)
def test_whatever_happens_staleness_is_bounded_and_every_group_is_consumed_once(
    seed: int, batch_size: int, staleness: int, extra: int, engines: int, continues: bool
) -> None:
    run = Run(seed, batch_size, staleness, min(extra, batch_size), engines, continues=continues)
    for _ in range(40):
        run.act()
        run.check()
    # From any state, engines that work bring the run on: nothing waits for something that never comes.
    for _ in range(3):
        if not run.manager.due:
            run.version += 1
            run.engines = dict.fromkeys(run.engines, run.version)
            run.drop(run.manager.open_step(run.version))
        run.engines = dict.fromkeys(run.engines, run.version)
        while not run.manager.ready():
            started = run.start(0, 100)
            assert started or run.in_flight, "nothing can be started and nothing is under way, yet the batch is not ready"
            while run.in_flight and not run.manager.ready():
                run.finish(run.luck.choice(list(run.in_flight)))
        assert run.train()
        run.check()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_as_much_is_started_as_the_bound_allows(staleness: int) -> None:
    manager = StalenessManager(4, staleness)
    manager.add(100)
    manager.open_step(0)
    assert manager.start(0, 100) == list(range(4 * (staleness + 1)))
    for number in range(4):
        manager.finish(number)
    assert manager.pop_batch().staleness == [0] * 4
    assert manager.start(0, 100) == []  # the batch after those in flight would see too old a start
    manager.open_step(1)
    assert manager.start(1, 100) == list(range(4 * (staleness + 1), 4 * (staleness + 2)))


def test_the_first_to_finish_make_the_batch_and_the_next_waits_for_the_others() -> None:
    manager = StalenessManager(3, 0, over_sample=2)
    manager.open_step(0)
    manager.add(manager.room)
    assert manager.start(0, 100) == [0, 1, 2, 3, 4]
    for number in (4, 1, 3):
        manager.finish(number)
    taken = manager.pop_batch()
    assert (taken.numbers, taken.dropped, manager.aborted, manager.requeued) == ([1, 3, 4], [0, 2], 2, 2)
    manager.open_step(1)
    manager.add(manager.room)
    assert manager.start(1, 100) == [0, 2, 5, 6, 7]
    for number in (5, 6, 7):
        manager.finish(number)
    assert not manager.ready()
    manager.finish(0), manager.finish(2)
    assert manager.pop_batch().numbers == [0, 2, 5]


def test_what_was_passed_over_goes_on_where_it_will_not_be_too_old() -> None:
    manager = StalenessManager(2, 1, over_sample=1)
    manager.open_step(0)
    manager.add(manager.room)
    manager.start(0, 3)
    manager.finish(1), manager.finish(2)
    assert manager.pop_batch().dropped == []
    assert manager.open_step(1) == []
    manager.finish(0)
    manager.add(manager.room)
    manager.start(1, 2)
    manager.finish(3)
    taken = manager.pop_batch()
    assert (taken.numbers, taken.staleness) == ([0, 3], [1, 0])


def test_what_cannot_have_happened_is_refused() -> None:
    manager = StalenessManager(1, 0)
    manager.open_step(3)
    manager.add(1)
    with pytest.raises(ValueError, match="1 groups are due"):
        manager.pop_batch()
    with pytest.raises(ValueError, match="group 0 is queued"):
        manager.finish(0)
    with pytest.raises(ValueError, match="group 0 is queued"):
        manager.requeue([0])
    with pytest.raises(ValueError, match="from 3 to 2"):
        manager.open_step(2)
    with pytest.raises(ValueError, match="batch_size"):
        StalenessManager(1, 0, over_sample=2)
