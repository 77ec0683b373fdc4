"""Between a phase of a step and megatron-core's schedule there are few calls, and each is of megarl's own files."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megarl
from megarl.algorithms import LossSettings
from megarl.config import parse_config
from megarl.config.layout import Layout
from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.experience.objectives import PolicyObjective
from megarl.models.flops import FlopsModel
from megarl.planning.roles import role_shape
from megarl.runs.training_side import POLICY
from tests.families import build_folder
from tests.world import World

HOPS = 5
"""The calls may not become more: the role's, the process's, the rank's, the model's, and the pass."""


def calls(rank: int, world_size: int, folder: Path) -> dict[str, list[str]]:
    """The functions of megarl on the stack where megatron-core's schedule begins, by what the driver asked for."""
    from megarl import platform
    from megarl.megatron import step
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.workers.rank import Rank
    from megarl.workers.rank_actor import RankProcess
    from megarl.workers.role_specs import role_specs
    from megarl.workers.roles import Roles

    initialize_layout(Layout(), seed=1)
    of_rank = Rank("policy", 0, Layout(), 1, platform.detect())
    of_rank.roles[POLICY] = RankModel(ModelOptions(str(folder), Layout()), OptimizerOptions(lr=1e-3))
    process = RankProcess.__new__(RankProcess)
    process.rank = of_rank

    class Here:
        """A group of the one rank of this process, called as Ray would."""

        name, layout, platform = "policy", Layout(), "cpu"

        def submit(self, method: Any, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
            return [process.call(method.__name__, *arguments) for arguments in per_rank]

        def wait(self, submitted: Sequence[Any], **limits: Any) -> Sequence[Any]:
            return submitted

        def per_rank(self, replicas: Sequence[Any]) -> Sequence[Any]:
            return replicas

    config = parse_config(
        {
            "model": {"path": str(folder), "dtype": "float32", "layer_spec": "reference"},
            "data": {"train": {"source": "reasoning_gym", "name": "chain_sum"}},
            "rewards": [{"name": "exact_number"}],
        }
    )
    flops = FlopsModel.of(role_shape(config.roles[0]))
    roles = Roles(config, role_specs(config), {POLICY: Here()}, "reference", flops, sampling=config.sampling, updates=1)  # type: ignore[dict-item]
    sample = Sample("1", "1", "1", [1, 2, 3], [4, 5], [1, 1], [-1.0, -1.0], [0, 0], "stop")
    batch = Batch([sample])
    for name in ("weights", "advantages"):
        batch.columns[name] = batch.mask.float()
    loss, begun = PolicyObjective("clip", LossSettings()), list[list[traceback.FrameSummary]]()
    schedule = step.get_forward_backward_func
    step.get_forward_backward_func = lambda: lambda **how: (begun.append(traceback.extract_stack()), schedule()(**how))[1]
    try:
        roles.forward(POLICY, batch, ["log_probs", "entropy"])
        update = roles.start_update(POLICY, batch, [0], ["weights", "advantages", "rollout_log_probs"], loss)
        roles.finish_updates([update])
    finally:
        step.get_forward_backward_func = schedule
    home = str(Path(megarl.__file__).parent)
    of_us = [[one for one in stack if one.filename.startswith(home)] for stack in begun]
    named = [[f"{Path(one.filename).stem}.{one.name}" for one in stack] for stack in of_us]
    without_timer = [[name for name in stack if not name.startswith("trace.")] for stack in named]
    return dict(zip(("forward", "update"), without_timer, strict=True))


def test_few_calls_lie_between_a_phase_and_megatron_core(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "llama")
    found = world.call(calls, tmp_path / "llama", size=1)[0]
    assert found["forward"] == ["roles.forward", "rank_actor.call", "rank.forward", "rank_model.forward", "step.forward"]
    assert {name: len(stack) for name, stack in found.items()} == {"forward": HOPS, "update": HOPS}
