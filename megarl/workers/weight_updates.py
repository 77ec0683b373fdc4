"""Giving engines the policy's weights: one update of several engines, of which any may fail without stopping the others."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.engine_kinds import capabilities_of
from megarl.errors import EngineError, MegarlError
from megarl.rollout.scheduling.engine_handle import EngineHandle
from megarl.rollout.scheduling.scheduler import Scheduler
from megarl.rollout.scheduling.several_engines import failures
from megarl.runs.training_side import POLICY
from megarl.weights.delta import base_for
from megarl.weights.digests import SentDigests
from megarl.weights.machines import Machines
from megarl.workers.gpu_sharing import turns_of
from megarl.workers.group import wait_for
from megarl.workers.roles import Roles

ABANDON_S = 10.0


class WeightUpdates:
    """The policy's connections to the engines, and which version each engine has confirmed."""

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        engines: Sequence[Any],
        roles: Roles,
        machines: Machines | None = None,
    ) -> None:
        """`engines` are Ray's handles, by the scheduler's numbers; `machines`: where they and the ranks are, if not on one."""
        self.machines = machines
        self.rollout, self.scheduler, self.engines, self.roles = config.rollout, scheduler, engines, roles
        self.folder = Path(config.run_folder).resolve() / "weights"
        self.turns = turns_of(config, scheduler, roles, self.update_engines)
        if self.turns is not None:
            roles.before_use = self.turns.before_use
        self._by_folder = capabilities_of(config.rollout).weights == "folder"
        self._sends_adapters = config.sends_adapters
        self.connected: set[int] = set()
        self._confirmed: dict[int, int] = {}
        self._sent_bytes = 0
        self.under_way: Sequence[int] = ()
        """Engines that are given weights now."""

    def update_engines(self, engines: Sequence[int], version: int) -> None:
        """Send the policy, as `version`, to these engines; the scheduler sees to those that fail on the way.

        Responses under way stay in the engines, which do not sample meanwhile, and continue under the new weights.

        Raises:
            EngineError: an engine is well, and yet its weights are not those that were sent.
        """
        if not engines:
            return
        scheduler, deadline_s = self.scheduler, self.rollout.deadlines.update_s
        turns = self.turns if self.turns is not None and self.turns.moves(engines) else None
        if turns is not None:
            turns.sharing.update()  # those that generated until now have no weights any more
            bare = [number for number in turns.engines if scheduler.engines[number].version is None]
            engines = [number for number in sorted({*engines, *bare}) if scheduler.engines[number].is_up]
        self.under_way = engines
        for engine in engines:
            if scheduler.engines[engine].version is None:  # it may be another process than before
                self.forget(engine)
        failed = {} if self._by_folder else self._connect([engine for engine in engines if engine not in self.connected])
        bases = {engine: self._base_for(engine, version) for engine in engines if engine not in failed}
        known = bases.keys() & self._confirmed.keys()
        # always what an engine gets first, and adapters, which are small
        verify = version % self.rollout.verify_every == 0 or known != bases.keys() or self._sends_adapters
        scheduler.hold([*bases])
        begun = scheduler.on_each(
            bases, lambda e, engine: engine.begin_update(version, bases[e], deadline_s=deadline_s), deadline_s
        )
        failed |= failures(begun)
        going = {engine: base for engine, base in bases.items() if engine not in failed}
        if going and self._by_folder:
            failed |= self._load(going, version)
            failed |= self._end(version, {engine: None for engine in going if engine not in failed})
        elif going:
            remembered = version if self.rollout.delta_every else None
            pushed = self.roles.push(deadline_s, going, remembered, verify=verify)
            self._sent_bytes += pushed.nbytes
            failed |= {e: EngineError(why) for e, why in pushed.errors.items()}
            failed |= self._end(version, {e: pushed.sent.get(e) for e in going if e not in failed})
        for engine, error in failed.items():
            self.forget(engine)
            # so that the engine, if it is well, can take another
            scheduler.on_each([engine], lambda _, handle: handle.abandon_update(deadline_s=ABANDON_S), ABANDON_S)
            scheduler.fail(engine, error)
        complete = [engine for engine in going if engine not in failed]
        self._confirmed |= dict.fromkeys(complete, version)
        self.under_way = ()
        if turns is not None:
            turns.sharing.generate()
        scheduler.resume(complete, version)

    def take_sent_bytes(self) -> int:
        """Bytes of weights and adapters that ranks have sent to engines since the last call; not those written as folders."""
        taken, self._sent_bytes = self._sent_bytes, 0
        return taken

    def _base_for(self, engine: int, version: int) -> int | None:
        """The version on which an engine's update builds; None: it is sent, or must show that it has, all weights."""
        confirmed = self._confirmed.get(engine)
        return confirmed if self._sends_adapters else base_for(confirmed, version, self.rollout.delta_every)

    def _load(self, engines: Collection[int], version: int) -> dict[int, Exception]:
        """Write the policy as a folder and have these engines read it; by engine why it did not."""
        folder = self.folder / f"version-{version}"
        self.roles.export(POLICY, str(folder), merged=True)
        deadline_s = self.rollout.deadlines.update_s
        try:
            return failures(
                self.scheduler.on_each(
                    engines, lambda _, engine: engine.load_update(str(folder), deadline_s=deadline_s), deadline_s
                )
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _end(self, version: int, sent: Mapping[int, SentDigests | None]) -> dict[int, Exception]:
        """End the updates; by engine why it did not. Raises the EngineError of an engine that refuses and is well.

        Of ranks whose sums are not those of what was sent, boxes are compared one by one, so that the error names them.
        """
        deadline_s = self.rollout.deadlines.update_s

        async def end(number: int, engine: EngineHandle) -> Sequence[int]:
            sums = sent[number]
            if sums is not None:
                return await engine.end_update_by_sums(version, sums, deadline_s=deadline_s)
            await engine.end_update(version, None, deadline_s=deadline_s)
            return ()

        answers = self.scheduler.on_each(sent, end, deadline_s)
        refused = failures(answers)
        if doubtful := {e: ranks for e, ranks in answers.items() if not isinstance(ranks, Exception) and ranks}:
            boxes = self.roles.sent_checksums(doubtful, deadline_s)
            refused |= failures(
                self.scheduler.on_each(
                    doubtful, lambda e, engine: engine.end_update(version, boxes[e], deadline_s=deadline_s), deadline_s
                )
            )
        health = self.scheduler.failing(refused)
        for engine, error in refused.items():
            if engine not in health:
                raise error
        return refused

    def forget(self, engine: int) -> None:
        """Connect to an engine anew at its next update, and send it all weights."""
        self.connected.discard(engine)
        self._confirmed.pop(engine, None)

    def _connect(self, engines: Sequence[int]) -> dict[int, Exception]:
        """Connect the policy's ranks to engines that are new or came back; by engine why it was not reached."""
        targets: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        deadline_s = self.rollout.deadlines.update_s
        for engine in engines:
            try:
                references = [self.engines[engine].endpoint.remote()]
                [endpoint] = wait_for(references, phase="sync", deadline_s=deadline_s, whose=[f"engine {engine}"])
                targets[engine] = endpoint or self.engines[engine]
            except MegarlError as error:
                failed[engine] = error
        if targets:
            self.roles.open_senders(targets, self.rollout.weight_transport, deadline_s, len(self.engines), self.machines)
            self.connected |= targets.keys()
        return failed
