"""What the turns of a colocated run move: all engines through their scheduler, and all of the trainer's ranks."""

from __future__ import annotations

import megarl.platform
from megarl.config import Config
from megarl.errors import EngineError
from megarl.rollout.scheduler import Scheduler
from megarl.trainers.device_turns import DeviceTurns, Kept
from megarl.trainers.roles import Roles


class ColocatedDevice:
    """`device_turns.Device` of a run."""

    def __init__(self, config: Config, scheduler: Scheduler, roles: Roles) -> None:
        self._deadlines, self._scheduler, self._roles = config.rollout.deadlines, scheduler, roles

    def sleep(self) -> None:
        """What is under way is begun anew after the next update; engines that fail are restarted as ever."""
        scheduler = self._scheduler
        scheduler.stop_all()
        scheduler.empty()
        self._call("sleep", [slot.number for slot in scheduler.slots if slot.restarting is None])

    def wake(self) -> None:
        """An engine that was restarted meanwhile does not sleep, which is as good."""
        self._call("wake", self._scheduler.without_weights)

    def keep(self, what: Kept) -> None:
        """All ranks of all groups move what they have; where there is no CUDA nothing is moved."""
        self._roles.keep_on_device(what)

    def _call(self, method: str, engines: list[int]) -> None:
        answers = self._scheduler.call(method, dict.fromkeys(engines, ()), self._deadlines.update_s)
        failed = [engine for engine, answer in answers.items() if isinstance(answer, Exception)]
        health = self._scheduler.call("health", dict.fromkeys(failed, ()), 10.0)
        for engine, answer in health.items():
            if isinstance(answer, Exception):
                self._scheduler.fail(engine, answer)
            elif method == "sleep":
                raise EngineError(f"engine {engine} did not give up its memory: {answers[engine]}")


def turns_of(config: Config, scheduler: Scheduler, roles: Roles) -> DeviceTurns | None:
    """The turns of a run whose trainer and engines share GPUs and never work at the same time; None for any other."""
    rollout = config.rollout
    takes_turns = rollout.engine == "sglang" and rollout.schedule.mode == "sync" and rollout.sync == "tensors"
    if megarl.platform.detect().name != "cuda" or config.resources.placement != "colocated" or not takes_turns:
        return None
    if rollout.engine_args.get("enable_memory_saver") is False:
        return None
    return DeviceTurns(ColocatedDevice(config, scheduler, roles))
