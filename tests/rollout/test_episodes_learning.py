"""What episodes teach: nothing of a step depends on tokens that the policy did not sample; and an engine's own episode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import ADVANTAGES, AGGREGATIONS, CORRECTIONS, POLICY_LOSSES
from megarl.data.batch import Batch
from megarl.data.sample import Prompt, Sample
from megarl.data.stream import pack
from megarl.data.supervised import units_of
from megarl.experience.experience import Experience, set_loss_weights
from megarl.experience.objectives import PolicyObjective, ValueObjective
from megarl.experience.step_tokens import loss_arguments
from megarl.experience.token_choices import set_token_columns
from megarl.rollout.engines.embedded import EmbeddedEngine
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from tests.config import smallest
from tests.data.chat_tokenizers import byte_tokenizer, ids_of
from tests.experience.estimates import estimate
from tests.rollout.episode_parts import HERE, Script, Settings, opened
from tests.rollout.tiny import TINY, load, reference_log_probs, save_tiny

pytestmark = pytest.mark.needs_option("tools")

END = ids_of("<|end|>")[0]
config = partial(
    smallest.config,
    rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 400},
    rewards=[{"name": "exact_number"}],
)
REWARDS = [1.0, 0.0, 3.0, 2.0]


def samples_with_tools() -> list[Sample]:
    """Two groups of two chats with no, one, two and three tool calls."""
    call = ids_of('<tool_call>{"name": "slow", "arguments": {"seconds": 0}}</tool_call>')
    episode, context = opened(byte_tokenizer(), Settings(tools=[f"{HERE}:slow"]), 400)
    samples = []
    for number in range(4):
        prompt = Prompt(f"g{number // 2}", f"g{number // 2}", [7, 8, 9], "")
        script = Script([([*call, END], "stop")] * number + [([*ids_of("so it is"), END], "stop")])
        samples.append(asyncio.run(episode(prompt, number, script, context)))
        samples[-1].rewards["exact_number"] = REWARDS[number]
        samples[-1].turn_states = [f"{turn} calls" for turn in range(number + 1)]
    return samples


def learn(samples: Sequence[Sample], noise: Tensor, *overrides: str) -> dict[str, Any]:
    """Everything a step computes from `samples`, with `noise` [B, T] added to every column of the tokens it did not sample."""
    settings = config(*overrides)
    batch = Batch(samples)
    generator = torch.Generator().manual_seed(1)
    for name in ("old_log_probs", "old_collision", "reference_log_probs", "values", "values_after", "step_rewards"):
        batch.columns[name] = -torch.rand(batch.mask.shape, generator=generator)
    batch.columns["rollout_log_probs"] = batch.columns["old_log_probs"] + 0.01 * torch.rand(
        batch.mask.shape, generator=generator
    )
    current = -torch.rand(batch.mask.shape, generator=generator)
    for column in (*batch.columns.values(), current):
        column += torch.where(batch.mask, 0.0, noise)
    batch.columns["values_after"] *= batch.last_tokens
    batch.columns["step_ends"] = torch.ones(batch.mask.shape)
    metrics = estimate(Experience(settings), batch, REWARDS, [(samples[0], 0.5), (samples[2], 1.5)])
    rows = list(range(len(batch)))
    set_loss_weights(batch, rows, settings)
    set_token_columns(batch, rows, settings, rewards=REWARDS, update_number=0)
    answer: dict[str, Any] = {"metrics": metrics, "advantages": batch.columns["advantages"]}
    names = [name for name in batch.columns if name != "values_after"]
    stream = pack(units_of(batch, rows, names, share_prefix=True))
    scored = torch.cat([current[row][places] for row, places, _ in stream.owners])
    output = torch.stack([scored, scored * 0.1], dim=1).requires_grad_()
    algorithm = settings.algorithm
    given = {"also_given": algorithm.loss_needs.further, "arguments": loss_arguments(algorithm)}
    objective = PolicyObjective(algorithm.policy_loss, kl_coef=0.1, entropy_coef=0.1, **given)
    answer["loss"], answer["policy"] = objective(output, stream)
    answer["loss"].backward()
    answer["gradient"] = output.grad
    if "returns" in stream.columns:
        answer["value_loss"], answer["critic"] = ValueObjective(0.2)(scored[:, None], stream)
    assert len(scored) == sum(sum(sample.sampled_mask) for sample in samples if sum(batch.mask[samples.index(sample)]))
    return answer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)


FURTHER = {
    "grpo_process": ["reward_model.path=somewhere", "reward_model.per_step=true"],
    "pass_at_k": ["algorithm.advantage_args={k: 1}"],
    "gigpo": ["rollout.episode={kind: environment, tools: ['a:B']}"],
}
"""What some estimators must be given."""
OPTIONS = [
    *[["algorithm.advantage=" + name, *FURTHER.get(name, [])] for name in ADVANTAGES],
    *[["algorithm.policy_loss=" + name] for name in POLICY_LOSSES],
    *[["algorithm.aggregation=" + name] for name in AGGREGATIONS],
    *[[f"algorithm.rollout_correction={{mode: {name}, low: 0.1, high: 3}}"] for name in CORRECTIONS],
    ["algorithm.name=reinforce_plus_plus", "algorithm.kl.apply_to=reward", "algorithm.kl.coef=0.1", "algorithm.kl.target=0.1"],
    ["algorithm.name=ppo", "algorithm.kl.apply_to=reward", "algorithm.kl.coef=0.1", "algorithm.truncated_responses=bootstrap"],
    ["algorithm.shaping.length_penalty=0.01", "algorithm.shaping.normalise=true"],
]


@pytest.mark.parametrize("overrides", OPTIONS, ids=lambda overrides: overrides[0].partition(".")[2])
def test_nothing_of_a_step_depends_on_what_a_tool_said(overrides: list[str]) -> None:
    samples = samples_with_tools()
    shape = Batch(samples).mask.shape
    assert 0 < sum(map(sum, (sample.sampled_mask for sample in samples))) < shape.numel()
    quiet = learn(samples, torch.zeros(shape), *overrides)
    loud = learn(samples, 5 * torch.randn(shape, generator=torch.Generator().manual_seed(2)), *overrides)
    assert same(quiet, loud)
    mask = Batch(samples).mask
    assert bool((quiet["advantages"][~mask] == 0).all())
    assert bool((quiet["advantages"][mask] != 0).any())
    moved = [replace_told(sample) for sample in samples]  # other tokens of the same number
    assert same(quiet, learn(moved, torch.zeros(shape), *overrides))
    broken = learn(samples, torch.full(shape, torch.nan), *overrides)  # 0 * nan is nan: a mask that multiplies is not enough
    assert same(quiet, broken)


def replace_told(sample: Sample) -> Sample:
    ids = [token if sampled else 7 for token, sampled in zip(sample.response_ids, sample.sampled_mask, strict=True)]
    return Sample(**{**sample.to_dict(), "response_ids": ids})


def test_a_length_penalty_is_for_the_policy_s_own_tokens() -> None:
    samples = samples_with_tools()
    batch = Batch(samples)
    experience = Experience(config("algorithm.shaping.length_penalty=0.5", "algorithm.advantage=dr_grpo"))
    estimate(experience, batch, [0.0] * 4)
    own = [sum(sample.sampled_mask) for sample in samples]
    expected = [-0.5 * (own[row] - (own[row - row % 2] + own[row - row % 2 + 1]) / 2) for row in range(4)]
    assert batch.columns["advantages"][:, 0].tolist() == expected


def test_an_engine_s_episode_has_the_log_probs_of_the_whole_conversation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The embedded engine in an environment: at every sampled token the log-prob is that of one pass over all tokens."""
    path = save_tiny(tmp_path_factory.mktemp("tiny"), TINY)
    engine = EmbeddedEngine(path, initial_version=4)
    stops = tuple(range(60, 512))  # most of what it says ends a turn
    episode, context = opened(byte_tokenizer(), Settings("environment", [f"{HERE}:Counting"]), 120)

    async def sample(ids: list[int], max_new_tokens: int, media: Any = None, /) -> Generation:
        params = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=stops)
        return (await engine.generate(EngineRequest([ids], params, keys=[f"{len(ids)}"])))[0][0]

    result = asyncio.run(episode(Prompt("r", "g", [5], ""), 0, sample, context))
    assert len(result.turns) == 5
    assert result.rewards == {"environment": 2.5}
    reference = reference_log_probs(load(path), result.prompt_ids, result.response_ids, 1.0)
    mask = torch.tensor(result.sampled_mask, dtype=torch.bool)
    difference = torch.tensor(result.rollout_log_probs)[mask] - reference[mask]
    assert difference.abs().max() < 1e-4
    assert set(result.weight_versions) == {4}
