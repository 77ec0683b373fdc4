"""The engines of other sites that are members of a run: they join, are given weights and work, and leave.

The thread that watches over all engines that come and go (`members.py`) calls `look`, and alone changes who is a member. What
takes long, a version that is written or an engine that hands over its work, is done by others.
"""

from __future__ import annotations

import ipaddress
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Set
from pathlib import Path
from typing import Any

import ray
import torch

from megarl.config import Config
from megarl.config.engine_kinds import capabilities_of
from megarl.data.columns import asked_columns
from megarl.errors import ConfigError, DeadlineError, EngineError, MegarlError, WorkerError
from megarl.models.registry import load_hf_config, sees
from megarl.options.elastic_engines.peers import answer, ask, having_weights
from megarl.options.elastic_engines.section import SitesConfig
from megarl.options.elastic_engines.sites.far_engine import FarCalls, FarEngine, FarState
from megarl.options.elastic_engines.sites.gate import FIELD, FOLDER, Gate, token_of, write_address
from megarl.options.elastic_engines.sites.model_facts import model_facts
from megarl.options.elastic_engines.sites.weight_store import WeightStore, told_bytes, zstandard
from megarl.options.elastic_engines.sites.wire import LONGEST_POLL_S, SENT_OPTIONS, SiteFacts
from megarl.rollout.engines.protocol import Engine, EnginePlace
from megarl.rollout.engines.registry import check_engine
from megarl.version import __version__
from megarl.workers.rollouts import Rollouts

SILENT_S = 2 * LONGEST_POLL_S
"""After which an engine that is not heard of is lost."""
MOST_REFUSED = 256
"""Engines that failed, of which it is kept why."""
FAREWELL_S = 3.0
"""For sites to fetch their last order."""
BYTES_PER_TOKEN = 64
"""Of an answer in JSON, at most: an id, a log-prob with all its digits and a version."""


class FarMembers:
    """The engines that have joined from other sites, and where others may."""

    def __init__(
        self, config: Config, rollouts: Rollouts, most: int, taken: Callable[[], Collection[int]], say: Callable[[str], None]
    ) -> None:
        """`most`: engines of a run; `taken`: numbers of those that are not from other sites.

        Raises:
            ConfigError: it cannot listen, or zstandard is not installed.
            ModelError: the model's folder cannot be read.
        """
        settings: SitesConfig = config.rollout.sites  # type: ignore[attr-defined]
        zstandard()
        self.life = secrets.token_hex(8)
        self.store = WeightStore(Path(config.run_folder) / FOLDER / "weights")
        self._config, self._rollouts, self._most, self._taken, self._say = config, rollouts, most, taken, say
        if columns := sorted(asked_columns(config)):
            raise ConfigError(f"{FIELD} is set, but the run asks engines for {columns[0]}, which other sites do not send")
        if sees(config.model.path):
            raise ConfigError(f"{FIELD} is set, but model.path is made for pictures, which are not sent to other sites")
        kind = check_engine(config, "cpu")
        options = kind.options(config, EnginePlace(0, 1, "cpu", Path(".")))
        plain = {name: value for name, value in options.items() if name in SENT_OPTIONS}
        self._facts = SiteFacts(__version__, model_facts(config.model.path), config.model.path, config.rollout.engine, plain, 0)
        self._vocabulary = int(load_hf_config(config.model.path)["vocab_size"])
        self._engines: dict[str, FarEngine] = {}
        self._refused: dict[str, str] = {}
        self._asking: list[FarEngine] = []
        self._lock = threading.Lock()
        self._writing: threading.Thread | None = None
        self._closing = threading.Event()
        rollout, token = config.rollout, token_of(config, settings)
        samples = rollout.samples_per_prompt * capabilities_of(rollout).batch_samples
        self._gate = Gate(self, settings, token, (1 << 20) + samples * rollout.max_new_tokens * BYTES_PER_TOKEN, say)
        if is_every_address(settings.host):
            settings = settings.model_copy(update={"host": ray.util.get_node_ip_address()})
        write_address(config, settings, self._gate.port, token)
        say(f"engines of other sites may join at {settings.host}:{self._gate.port}")

    # what the server asks (`gate.Members`) ------------------------------------------------------------------------

    def facts(self) -> SiteFacts:
        """Facts that a site is told before it joins."""
        facts, room = self._facts, self._most - len(self._taken()) - len(self.numbers)
        return SiteFacts(facts.megarl, facts.model, facts.path, facts.engine, facts.options, max(0, room))

    def ask_to_join(self, engine: FarEngine) -> None:
        """Have `look` give it a number."""
        with self._lock:
            self._asking.append(engine)

    def of(self, key: str) -> FarEngine | None:
        """The engine with this key; None: there is none (any more)."""
        return self._engines.get(key)

    def refused(self, key: str) -> str | None:
        """Why the engine that had this key is not to come again; None: it may."""
        return self._refused.get(key)

    # what the watch over all engines asks -------------------------------------------------------------------------

    @property
    def numbers(self) -> set[int]:
        """Numbers of the engines that are members."""
        return {engine.number for engine in [*self._engines.values()] if engine.number is not None and not engine.has_left}

    def told(self) -> list[dict[str, Any]]:
        """Rows of `engines.json`."""
        return [
            {
                "number": one.number, "node": one.site, "node_id": node_id(one),
                "stage": "leaving" if one.is_leaving else "there" if one.state is not None else "starting",
                "full_bytes": one.full_bytes, "difference_bytes": one.difference_bytes,
            }
            for one in self._engines.values()
        ]  # fmt: skip

    def look(
        self, leaving: Set[str], hand_over: Callable[[FarEngine], None], lose: Callable[[FarState, Exception], None]
    ) -> None:
        """See to every engine; those of the sites `leaving` are to leave. `hand_over` takes long, and is to return at once."""
        with self._lock:
            asking, self._asking = self._asking, []
        for engine in asking:
            self._admit(engine)
        now = time.monotonic()
        for engine in [*self._engines.values()]:
            if now - engine.heard_at > SILENT_S and not engine.has_left:
                engine.is_silent = engine.is_silent or not engine.error
                engine.lose(f"its site {engine.site} was not heard of for {SILENT_S:.0f} s")
            if engine.error and not engine.is_leaving:
                if engine.state is not None:
                    lose(engine.state, WorkerError(engine.error))
                else:
                    self._say(f"engine {engine.number} failed: {engine.error}")
                self._forget(engine)
            elif engine.has_left:
                self._forget(engine)
            elif (engine.leaves or leaving & {engine.site, node_id(engine)}) and not engine.is_leaving:
                engine.is_leaving = True
                hand_over(engine)
            elif not engine.is_leaving and engine.version is not None:
                self._open(engine)
        self._write_if_needed()

    def end(self, engine: FarEngine, why: str) -> None:
        """An engine has handed over what it worked on: it may go."""
        engine.has_left = True
        engine.give("end", words=[why])
        fetched = f"{told_bytes(engine.difference_bytes)} of differences and {told_bytes(engine.full_bytes)} of full weights"
        self._say(f"engine {engine.number} left {engine.site}; it has fetched {fetched}")

    def close(self) -> None:
        """Tell the sites that the run is over, and listen no more."""
        self._closing.set()
        for engine in [*self._engines.values()]:
            engine.has_left = True
            engine.give("end", words=["the run has ended"])
        ends_at = time.monotonic() + FAREWELL_S
        while any(engine.has_orders for engine in self._engines.values()) and time.monotonic() < ends_at:
            time.sleep(0.05)
        self._gate.close()
        if self._writing is not None:
            self._writing.join()

    # ----------------------------------------------------------------------------------------------------------------

    def _admit(self, engine: FarEngine) -> None:
        if not engine.admitted.set_running_or_notify_cancel():  # the site was told meanwhile to try again
            return
        free = {*range(self._most)} - {*self._taken()} - self.numbers
        if not free:
            engine.admitted.set_exception(WorkerError("the run has as many engines as rollout.max_engines allows"))
            return
        engine.number, engine.heard_at = min(free), time.monotonic()
        self._engines[engine.key] = engine
        engine.admitted.set_result(engine.number)

    def _forget(self, engine: FarEngine) -> None:
        """Let go of its number; one that has left is kept until it has fetched its last order."""
        if not engine.has_left or not engine.has_orders or time.monotonic() - engine.heard_at > SILENT_S:
            if engine.error and not engine.is_silent:
                self._refused = {**dict([*self._refused.items()][-MOST_REFUSED:]), engine.key: engine.error}
            del self._engines[engine.key]

    def _open(self, engine: FarEngine) -> None:
        """Have the scheduler give it work with the weights that it has, if they are other ones than before."""
        scheduler = self._rollouts.scheduler
        state = engine.state
        if state is not None and state.version == engine.version and state.is_open.is_set():
            return
        if state is None:
            assert engine.number is not None, "it was admitted"
            calls = FarCalls(engine, self._vocabulary, lambda: self._rollouts.version)
            keeps_turns = capabilities_of(self._config.rollout).keeps_turns
            state = FarState(engine.number, calls, keeps_turns=keeps_turns, is_dispensable=True)
            self._say(f"engine {engine.number} came from {engine.site}, weights of version {engine.version}")
        engine.state, version = state, engine.version

        async def open_it(state: FarState = state) -> None:
            if scheduler.engines[state.number] is not state:
                state.busy = scheduler.engines[state.number].busy
                scheduler.engines[state.number] = state
            state.version, state.fell_behind = version, False
            state.is_open.set()
            scheduler.order.changed(state)
            scheduler.changed.set()
            scheduler.dispatch()

        scheduler.thread.run(open_it())

    # weights --------------------------------------------------------------------------------------------------------

    def _write_if_needed(self) -> None:
        newest = self.store.newest
        is_behind = newest is None or newest.version != self._rollouts.version
        is_idle = self._writing is None or not self._writing.is_alive()
        if self._engines and is_behind and is_idle and having_weights(self._rollouts, self._rollouts.version)[1]:
            self._writing = threading.Thread(target=self._write, name="sites-weights", daemon=True)
            self._writing.start()

    def _write(self) -> None:
        version = self._rollouts.version
        _, having = having_weights(self._rollouts, version)
        if not having:
            return
        source = min(having, key=lambda one: one.load)
        try:
            self.store.add(version, self._weights_of(source.number, version))
        except (MegarlError, OSError) as error:  # the next look tries again, from another engine perhaps
            if isinstance(error, OSError):
                self._say(f"weights for other sites could not be written: {error}")
            return
        for engine in [*self._engines.values()]:
            engine.tell()

    def _weights_of(self, number: int, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights of an engine, which goes on sampling.

        Raises:
            MegarlError: it does not give them (any more).
        """
        ends_at = time.monotonic() + self._config.rollout.deadlines.update_s
        giver, start = self._rollouts.engines[number], 0
        while True:
            if self._closing.is_set():
                raise EngineError("the run ends")
            following, given = ask(giver, version, start)
            try:
                start = answer(following, ends_at)
            except ray.exceptions.RayError as error:
                raise EngineError(str(error)) from None
            yield from answer(given, ends_at)
            if start is None:
                return
            if time.monotonic() > ends_at:
                raise DeadlineError("an engine did not give its weights in time (rollout.deadlines.update_s)")


def is_every_address(host: str) -> bool:
    """Return whether listening at `host` is listening at all addresses of the machine, of which sites are told one."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def node_id(engine: FarEngine) -> str:
    """The text that stands for a node's id in `engines.json`."""
    return f"site {engine.site}"


def gives_weights(kind: type[Engine]) -> bool:
    """Return whether engines of this kind give their weights to others."""
    return kind.give_weights is not Engine.give_weights
