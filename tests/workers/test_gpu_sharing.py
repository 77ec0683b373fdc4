"""Trainer and engines that share a device: no order of calls lets both have it, or engines answer without weights."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from megarl.config import Config, parse_config
from megarl.core.session import Session
from megarl.errors import EngineError
from megarl.planning.gpus import PROCESS_BYTES
from megarl.planning.turns import GENERATING, RESIDENT, TRAINING, UPDATING, Kept, OfEngine, bytes_beside_engines, takes_turns
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.trainers.rl import train as train_module
from megarl.workers.gpu_sharing import GpuSharing, Owner
from tests.rollout.tiny import TINY, load, save_tiny, sync, weights_of

CALLS = ("train", "update", "generate")
MEMORY = {"all": 10, "policy": 2, "none": 0}
OF_ENGINE = {"all": 11, "weights": 3, "none": 0}


class Memory:
    """A device of 12 units: engines take 3 for weights, no more than a promise until they are sent, and 8 for their cache,
    which leaves the policy no room."""

    def __init__(self) -> None:
        self.trainer: Kept = "all"
        self.engine: OfEngine = "all"
        self.shared = True
        self.fails: str | None = None

    def sleep(self) -> None:
        """A second sleep in a row would be a server's end."""
        self._act("sleep")
        assert self.engine != "none"
        self.engine, self.shared = "none", False

    def wake(self) -> None:
        """So would a second wake."""
        self._act("wake")
        assert self.engine == "none"
        self.engine = "weights"
        self._fits()

    def wake_caches(self) -> None:
        """Take the rest; twice is as good as once."""
        self._act("wake_caches")
        assert self.engine != "none"
        self.engine = "all"
        self._fits()

    def keep(self, what: Kept) -> None:
        """Bring the trainer to have so much."""
        self._act("keep")
        self.shared = self.shared and what == "all"
        self.trainer = what
        self._fits()

    def _act(self, name: str) -> None:
        if self.fails == name:
            raise EngineError(f"{name} failed")

    def _fits(self) -> None:
        assert self.shared or MEMORY[self.trainer] + OF_ENGINE[self.engine] <= 12


WAYS = {
    (Owner.SHARED, "train"): Owner.TRAINING,
    (Owner.SHARED, "update"): Owner.UPDATING,
    (Owner.TRAINING, "train"): Owner.TRAINING,
    (Owner.TRAINING, "update"): Owner.UPDATING,
    (Owner.UPDATING, "train"): Owner.TRAINING,
    (Owner.UPDATING, "update"): Owner.UPDATING,
    (Owner.UPDATING, "generate"): Owner.GENERATING,
    (Owner.GENERATING, "train"): Owner.TRAINING,
    (Owner.GENERATING, "update"): Owner.UPDATING,
}
COUNTED = {Owner.TRAINING: TRAINING, Owner.UPDATING: UPDATING, Owner.GENERATING: GENERATING}
"""The turn by whose `RESIDENT` a plan counts."""
HAS = {owner: (RESIDENT[turn].trainer, RESIDENT[turn].engine) for owner, turn in COUNTED.items()}


def test_no_turn_has_both_of_trainer_and_engines() -> None:
    """And a plan counts by this table, as the next test holds the run to it."""
    assert HAS == {Owner.TRAINING: ("all", "none"), Owner.UPDATING: ("policy", "weights"), Owner.GENERATING: ("none", "all")}


def test_every_sequence_of_calls_leaves_the_memory_that_its_turn_needs_or_is_refused_and_changes_nothing() -> None:
    for calls in itertools.product(CALLS, repeat=6):
        memory, now = Memory(), Owner.SHARED
        turns = GpuSharing(memory.sleep, memory.wake, memory.wake_caches, memory.keep)
        for call in calls:
            before = (memory.trainer, memory.engine)
            if (now, call) in WAYS:
                getattr(turns, call)()
                now = WAYS[now, call]
                assert (memory.trainer, memory.engine) == HAS[now], calls
            else:
                with pytest.raises(EngineError, match=r"the GPU cannot go from .* directly to"):
                    getattr(turns, call)()
                assert (memory.trainer, memory.engine) == before, calls
            assert turns.now is now


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("sleep", ["train"]),
        ("wake", ["train", "update"]),
        ("keep", ["update"]),
        ("wake_caches", ["train", "update", "generate"]),
    ],
)
def test_after_a_move_that_failed_in_the_middle_nobody_may_use_the_device(fails: str, calls: list[str]) -> None:
    memory = Memory()
    memory.fails, turns = fails, GpuSharing(memory.sleep, memory.wake, memory.wake_caches, memory.keep)
    for call in calls[:-1]:
        getattr(turns, call)()
    with pytest.raises(EngineError, match=f"{fails} failed"):
        getattr(turns, calls[-1])()
    for call in CALLS:
        with pytest.raises(EngineError, match="the state of the GPU is unknown"):
            getattr(turns, call)()


class OneEngine:
    """An engine in this process; nothing of the trainer is moved, as where there is no CUDA."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine

    def sleep(self) -> None:
        """The engine's own."""
        asyncio.run(self.engine.sleep())

    def wake(self) -> None:
        """The engine's own."""
        asyncio.run(self.engine.wake())

    def wake_caches(self) -> None:
        """The engine's own."""
        asyncio.run(self.engine.wake_cache())

    def keep(self, what: Kept) -> None:
        """Nothing is moved."""


def test_an_engine_answers_in_no_turn_before_it_was_given_weights(tmp_path: Path) -> None:
    engine = EmbeddedEngine(save_tiny(tmp_path / "model", TINY), initial_version=0)
    one = OneEngine(engine)
    turns, weights = GpuSharing(one.sleep, one.wake, one.wake_caches, one.keep), weights_of(load(tmp_path / "model", seed=1))

    def answers() -> set[int]:
        (group,) = asyncio.run(engine.generate(EngineRequest([[5, 6]], SamplingParams(max_new_tokens=2))))
        return set(group[0].weight_versions)

    def refuses() -> bool:
        with pytest.raises(EngineError, match="no weights of a known version"):
            answers()
        return True

    assert answers() == {0}
    for version in (1, 2):
        turns.train()
        assert refuses()
        with pytest.raises(EngineError, match="sleeps; wake it before"):
            asyncio.run(engine.begin_update(version))
        with pytest.raises(EngineError, match=r"the GPU cannot go from .* directly to the engines"):
            turns.generate()
        turns.update()
        assert refuses()  # it is awake, without weights
        asyncio.run(sync(engine, weights, version))
        turns.generate()
        assert answers() == {version}
    turns.update()  # another engine came back: all begin anew
    assert refuses()


@pytest.mark.parametrize(("platform", "first"), [("cuda", "engines"), ("cpu", "policy")])
def test_engines_that_share_gpus_start_and_sleep_before_anything_is_loaded(
    platform: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Recorded:
        """Stands for the cluster, the roles and the rollouts of a run."""

        takes_turns = platform == "cuda"

        def __getattr__(self, name: str) -> Any:
            return MagicMock()

        def __enter__(self) -> Recorded:
            return self

        def __exit__(self, *raised: object) -> None:
            """Nothing was started."""

        def load(self, role: str) -> None:
            calls.append(role)

        def begin_start(self) -> list[Any]:
            return []

        def finish_start(self, starting: list[Any], roles: Any) -> None:
            calls.append("engines")

    for name in ("open_cluster", "open_roles", "Rollouts", "check_transport"):
        monkeypatch.setattr(train_module, name, lambda *_, **__: Recorded())
    Session(config_of("colocated", "sync"), MagicMock(parts=[]), train_module.start_processes).start(tmp_path)
    assert calls == (["engines", "policy"] if first == "engines" else ["policy", "engines"])


def config_of(placement: str, mode: str, **rollout: Any) -> Config:
    """A config of GRPO without a reference."""
    task = {"source": "reasoning_gym", "name": "chain_sum", "limit": 64}
    tree = {"model": {"path": "m", "dtype": "bfloat16"}, "data": {"train": task}, "rewards": [{"name": "exact_number"}]}
    tree |= {"resources": {"placement": placement}, "algorithm": {"kl": {"coef": 0.0}}}
    return parse_config(tree | {"rollout": {"schedule": {"mode": mode}, **rollout}})


def test_only_synchronous_runs_on_shared_gpus_take_turns() -> None:
    assert takes_turns(config_of("colocated", "sync"), "cuda")
    assert not takes_turns(config_of("colocated", "sync"), "cpu")
    assert not takes_turns(config_of("separate", "sync"), "cuda")
    assert not takes_turns(config_of("colocated", "async"), "cuda")
    assert not takes_turns(config_of("colocated", "sync", engine_args={"enable_memory_saver": False}), "cuda")
    assert not takes_turns(config_of("colocated", "sync", weight_transport="process_group"), "cuda")


def test_the_trainer_keeps_nothing_but_its_processes_beside_engines_that_generate() -> None:
    assert bytes_beside_engines(config_of("colocated", "sync")) == PROCESS_BYTES
