"""What senders put before a rank of an engine is taken at the same time, answered one by one, and believed from nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from megarl.errors import EngineError
from megarl.weights.intake import OPEN, Intake, PutBefore, give_up
from megarl.weights.intake_ranks import THREADS, RankIntake
from megarl.weights.staging import serialize

TOKEN = "the server's"


class Engine:
    """An engine of one rank, in a thread, that takes payloads by a function."""

    def __init__(self, take: Callable[[Any], Future[None] | None], give_up: Callable[[], None] = lambda: None) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.where = ("127.0.0.1", self.store.port)
        self.intake = Intake(1, self.where, TOKEN, 20)
        self.given_up = threading.Event()
        self.store.set(OPEN, "1")
        self.rank = threading.Thread(target=self._run, args=(take, give_up), daemon=True)
        self.rank.start()

    def _run(self, take: Callable[[Any], Future[None] | None], give_up: Callable[[], None]) -> None:
        def note() -> None:
            give_up()
            self.given_up.set()

        RankIntake(self.intake, 0, torch.device("cpu")).take_all(take, note)

    def put(self, content: Any, timeout_s: float = 20, token: str = TOKEN) -> PutBefore:
        return PutBefore("http://engine", self.where, token, [serialize(content)], timeout_s)

    def ends(self) -> str:
        """What the rank says when it leaves."""
        self.store.set(OPEN, "")
        self.intake.put(self.store, 0, b"")
        self.rank.join(20)
        assert not self.rank.is_alive()
        return self.store.get(self.intake.left(0)).decode()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * THREADS) as threads:
        yield threads


def test_messages_are_taken_at_the_same_time_each_answered_when_it_is_taken(pool: ThreadPoolExecutor) -> None:
    together, later, taken = threading.Barrier(THREADS), Future[None](), list[int]()

    def take(number: int) -> Future[None] | None:
        if number == THREADS:
            return later
        together.wait(20)  # none goes on before as many have come
        taken.append(number)
        return None

    engine = Engine(take)
    waits = engine.put(THREADS)
    for put in [pool.submit(engine.put(number).result) for number in range(THREADS)]:
        put.result(20)
    assert sorted(taken) == list(range(THREADS))
    assert not waits.ended()
    later.set_result(None)
    waits.result()
    assert not engine.ends()
    assert engine.given_up.is_set()


def test_a_message_that_cannot_be_taken_is_an_error_of_its_sender_alone(pool: ThreadPoolExecutor) -> None:
    def take(number: int) -> None:
        if number == 1:
            raise ValueError("x has 3 rows here, which have no place")

    engine = Engine(take)
    engine.put(0).result()
    with pytest.raises(EngineError, match="http://engine could not take the weights: x has 3 rows here"):
        engine.put(1).result()
    engine.put(2).result()
    assert engine.ends() == "x has 3 rows here, which have no place"


def test_who_announces_something_after_the_rank_was_told_to_leave_is_not_waited_for() -> None:
    """The message was still in the rank's queue when another sender died and the update was abandoned."""
    announced = list[Future[None]]()

    def take(number: int) -> Future[None]:
        assert engine.given_up.wait(20)
        announced.append(Future())
        return announced[-1]

    def give_up() -> None:
        while announced:
            announced.pop().set_exception(RuntimeError("the update was given up"))

    engine = Engine(take, give_up)
    waits = engine.put(0)
    assert engine.ends() == "the update was given up"
    with pytest.raises(EngineError, match="the update was given up"):
        waits.result()


def test_nothing_is_unpickled_that_was_put_there_without_the_servers_token() -> None:
    taken = list[Any]()
    engine = Engine(taken.append)
    with pytest.raises(EngineError, match="was not put there by a sender of this run"):
        engine.put(1, token="a guess").result()
    name = engine.intake.message(0, engine.store.add("intake/1/0/count", 1) - 1)
    engine.store.set(name, engine.store.get(OPEN) + b"not even a code")
    engine.put(2).result()
    assert taken == [2]
    assert "was not put there" in engine.ends()


def test_who_sends_without_an_open_update_or_to_an_engine_that_has_failed_is_not_kept_waiting() -> None:
    never = Future[None]()
    engine = Engine(lambda _: never)
    waits = engine.put(1)
    give_up(engine.store, "rank 7 is out of memory")
    began = time.monotonic()
    with pytest.raises(EngineError, match="rank 7 is out of memory"):
        waits.result()
    with pytest.raises(EngineError, match=r"did not take the weights within 0\.1 s|out of memory"):
        engine.put(2, timeout_s=0.1).result()
    assert time.monotonic() - began < 10
    never.set_result(None)
    engine.ends()
    with pytest.raises(EngineError, match="no weight update open: sending must run between begin_weight_update"):
        engine.put(3)


def test_an_engine_whose_store_is_gone_is_an_error_of_its_senders() -> None:
    with pytest.raises(EngineError, match="the store of http://engine does not answer"):
        PutBefore("http://engine", ("127.0.0.1", 1), TOKEN, [serialize(1)], 0.5)
