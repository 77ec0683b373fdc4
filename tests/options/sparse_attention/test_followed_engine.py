"""A trainer that attends to the keys that an engine chose has its log-probs, whatever its own indexers would choose."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.config.layout import Layout
from megarl.data.batch import Batch
from megarl.data.columns import of_episode
from megarl.data.sample import Sample
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from tests.families import build_folder
from tests.world import World

PROMPTS = [[5, 6, 7, 8, 17, 4], [100, 9, 10, 11, 12, 13, 4, 5, 6], [40, 41]]


class Followed(NamedTuple):
    """Distances of log-probs from the engine's with replay and without, and counts of the replay."""

    replayed: torch.Tensor
    live: torch.Tensor
    counts: Any


def sample_of(name: str, prompt: list[int], one: Generation) -> Sample:
    """A generation as a sample of the group that its prompt is."""
    mask = [1] * len(one.response_ids)
    extra = of_episode(one.extra, len(prompt), mask, one.weight_versions)
    facts = (one.response_ids, mask, one.log_probs, one.weight_versions, "length")
    return Sample(name, name.partition("/")[0], "row", prompt, *facts, extra=extra)


def follow(rank: int, world_size: int, folder: Path) -> Followed:
    """Sample with an engine that chooses the keys that score lowest, and compute the log-probs of its responses."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.options.sparse_attention.rank_questions import taken_replays
    from tests.themes.e2e.crooked_indexers import CrookedIndexers

    params = SamplingParams(max_new_tokens=9, ignore_eos=True, extra=frozenset({"chosen_keys"}))
    engine = CrookedIndexers(folder, initial_version=0)
    groups = asyncio.run(engine.generate(EngineRequest(PROMPTS, params, n=2)))
    samples = [
        sample_of(f"{group}/{number}", PROMPTS[group], one)
        for group, of_group in enumerate(groups)
        for number, one in enumerate(of_group)
    ]
    initialize_layout(Layout(), seed=1)
    role, batch = RankModel(ModelOptions(str(folder), Layout())), Batch(samples)
    units = batch.unit_rows(range(len(batch)), share_prefix=True)
    plan = [[[(unit, tuple(range(len(size.response_tokens)))) for unit, size in enumerate(units.sizes)]]]
    distances = []
    for extra in (False, True):
        [share] = batch.shares(units, plan, [], extra=extra)
        values = role.forward([*share])
        of_rows = [values[row][:, 0].double() - torch.tensor(one.rollout_log_probs) for row, one in enumerate(samples)]
        distances.append(torch.cat(of_rows).abs())
        counts = taken_replays(role)
    return Followed(distances[1], distances[0], counts)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_engine_that_chooses_other_keys_is_followed(world: World, tmp_path: Path, family: str) -> None:
    build_folder(family, tmp_path / "model")
    [found] = world.call(follow, tmp_path / "model", size=1)
    assert found.replayed.max() < 1e-5
    assert found.live.mean() > 0.01
    assert found.counts.known == found.counts.queries > 0
    assert found.counts.keys == 5 * found.counts.known
    assert found.counts.differing > 0.3 * found.counts.keys
