"""Giving engines the policy's weights: one update of several engines, of which any may fail without stopping the others."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.errors import EngineError, MegarlError
from megarl.reshard.delta import base_for
from megarl.rollout.scheduler import Scheduler
from megarl.trainers.colocated import turns_of
from megarl.trainers.roles import POLICY, Roles
from megarl.workers.group import wait_for


class WeightUpdates:
    """The policy's connections to the engines, and which version each engine has confirmed."""

    def __init__(self, config: Config, scheduler: Scheduler, engines: Sequence[Any], roles: Roles) -> None:
        """`engines` are Ray's handles, by the scheduler's numbers."""
        self.rollout, self.scheduler, self.engines, self.roles = config.rollout, scheduler, engines, roles
        self.folder = Path(config.run_folder).resolve() / "weights"
        self._turns = turns_of(config, scheduler, roles)
        if self._turns is not None:
            roles.before_use = self._turns.train
        self._connected: set[int] = set()
        self._confirmed: dict[int, int] = {}

    def give(self, engines: Sequence[int], version: int) -> None:
        """Send the policy, as `version`, to these engines; the scheduler sees to those that fail on the way.

        Responses under way stay in the engines, which do not sample meanwhile, and continue under the new weights.

        Raises:
            EngineError: an engine is well, and yet its weights are not those that were sent.
        """
        scheduler, deadline_s = self.scheduler, self.rollout.deadlines.update_s
        if self._turns is not None:
            self._turns.update()
        for engine in engines:
            if scheduler.slots[engine].version is None:  # it may be another process than before
                self._forget(engine)
        by_disk = self.rollout.sync == "disk"
        failed = {} if by_disk else self._connect([engine for engine in engines if engine not in self._connected])
        bases = {
            engine: base_for(self._confirmed.get(engine), version, self.rollout.delta_every)
            for engine in engines
            if engine not in failed
        }
        known = bases.keys() & self._confirmed.keys()
        verify = version % self.rollout.verify_every == 0 or known != bases.keys()  # always what an engine gets first
        scheduler.hold(list(bases))
        failed |= _errors(scheduler.call("begin_update", {e: (version, base) for e, base in bases.items()}, deadline_s))
        going = {engine: base for engine, base in bases.items() if engine not in failed}
        if going and by_disk:
            failed |= self._load(going, version)
            failed |= self._end({engine: (version,) for engine in going if engine not in failed})
        elif going:
            remembered = version if self.rollout.delta_every else None
            pushed = self.roles.push(deadline_s, going, remembered, verify)
            failed |= {e: EngineError(pushed[e].error or "") for e in going if pushed[e].error is not None}
            failed |= self._end({e: (version, pushed[e].checksums) for e in going if e not in failed})
        for engine, error in failed.items():
            self._forget(engine)
            scheduler.call("abandon_update", {engine: ()}, 10.0)  # so that the engine, if it is well, can take another
            scheduler.fail(engine, error)
        complete = [engine for engine in going if engine not in failed]
        self._confirmed |= dict.fromkeys(complete, version)
        if self._turns is not None:
            self._turns.generate()
        scheduler.resume(complete, version)

    def _load(self, engines: Collection[int], version: int) -> dict[int, Exception]:
        """Write the policy as a folder and have these engines read it; by engine why it did not."""
        folder = self.folder / f"version-{version}"
        self.roles.export(POLICY, str(folder))
        try:
            calls = dict.fromkeys(engines, (str(folder),))
            return _errors(self.scheduler.call("load_update", calls, self.rollout.deadlines.update_s))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _end(self, ends: dict[int, tuple[Any, ...]]) -> dict[int, Exception]:
        """End the updates; by engine why it did not. Raises the EngineError of an engine that refuses and is well."""
        refused = _errors(self.scheduler.call("end_update", ends, self.rollout.deadlines.update_s))
        health = _errors(self.scheduler.call("health", dict.fromkeys(refused, ()), 10.0))
        for engine, error in refused.items():
            if engine not in health:
                raise error
        return refused

    def _forget(self, engine: int) -> None:
        self._connected.discard(engine)
        self._confirmed.pop(engine, None)

    def _connect(self, engines: Sequence[int]) -> dict[int, Exception]:
        """Connect the policy's ranks to engines that are new or came back; by engine why it was not reached."""
        targets: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        deadline_s = self.rollout.deadlines.update_s
        for engine in engines:
            try:
                asked = [self.engines[engine].endpoint.remote()]
                [endpoint] = wait_for(asked, phase="sync", deadline_s=deadline_s, whose=[f"engine {engine}"])
                targets[engine] = endpoint or self.engines[engine]
            except MegarlError as error:
                failed[engine] = error
        if targets:
            self.roles.open_senders(targets, self.rollout.sync, deadline_s, len(self.engines))
            self._connected |= targets.keys()
        return failed


def _errors(answers: dict[int, Any]) -> dict[int, Exception]:
    return {engine: answer for engine, answer in answers.items() if isinstance(answer, Exception)}
