"""An estimate on shards of a batch, with one number per row from the driver: in each configuration, bit for bit, that of the
whole batch in one process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import Shard, token_weights
from megarl.config import Config
from megarl.data.batch import Batch
from megarl.data.branches import JoinedEpisodes
from megarl.data.sample import Sample
from megarl.experience.estimation import TokenOutcome, estimate_tokens
from megarl.experience.experience import (
    Experience,
    RowFacts,
    lay_loss_weights,
    loss_row_weights,
    mini_batch_rows,
    reward_statistics,
    set_loss_weights,
)
from megarl.experience.step_parts import StepPart
from megarl.experience.step_tokens import TOKEN_COLUMNS, older_tokens
from megarl.experience.token_choices import set_token_columns
from megarl.options.distillation.run import Teachers
from tests.algorithms.sharded import Meeting, put_together, split_groups
from tests.config import smallest
from tests.experience.estimates import estimate, steer_entropy

config = partial(
    smallest.config,
    rollout={"prompts_per_step": 5, "samples_per_prompt": 4, "max_new_tokens": 150},
    rewards=[{"name": "environment", "weight": 2.0}, {"name": "a:judge", "weight": 0.5}],
)
EPISODE = "rollout.episode={kind: environment, tools: ['a:B']}"
PPO = ["algorithm.name=ppo", "algorithm.kl.coef=0.0"]
KL = "algorithm.kl={coef: 0.2, estimator: k1, apply_to: reward, target: 0.5, horizon: 10}"
CASES: dict[str, list[str]] = {
    "grpo": ["algorithm.name=grpo"],
    "gae, whitened": [*PPO, "algorithm.gae_lambda=0.95", "algorithm.gamma=0.99"],
    "gae, bootstrapped": [*PPO, "algorithm.gae_lambda=0.95", "algorithm.truncated_responses=bootstrap"],
    "KL in the reward, steered": ["algorithm.advantage=reinforce_plus_plus", KL],
    "correction, normalised": [
        "algorithm.advantage=rloo",
        "algorithm.rollout_correction=[{mode: tis_token, normalise: true}, {mode: reject_sequence, low: 0.9, high: 1.1}]",
        KL,
    ],
    "correction of sequences": ["algorithm.rollout_correction={mode: mis_sequence, normalise: true}"],
    "engine's log-probs": ["algorithm.advantage=reinforce", KL, "algorithm.rollout_correction.mode=bypass"],
    "process rewards": ["algorithm.advantage=grpo_process", "reward_model={path: nowhere, per_step: true}"],
    "sources apart": ["algorithm.advantage=gdpo", "algorithm.kl.coef=0"],
    "turns": ["algorithm.advantage=turn_rloo", "algorithm.gamma=0.9", "algorithm.kl.coef=0"],
    "states of turns": ["algorithm.advantage=gigpo", "algorithm.gamma=0.9", "algorithm.kl.coef=0", EPISODE],
    "a moving baseline, without truncated responses": [
        "algorithm.advantage=reinforce_moving_baseline",
        "algorithm.truncated_responses=exclude",
        "algorithm.shaping={overlong_tokens: 40, length_penalty: 0.003, normalise: true, clip: 1.5}",
    ],
    "truncated responses masked": ["algorithm.advantage=gpg", "algorithm.truncated_responses=mask"],
    "greedy baseline": ["algorithm.advantage=remax", "algorithm.shaping={length_penalty: 0.003, normalise: true}"],
    "token baseline": ["algorithm.advantage=optimal_token_baseline", "algorithm.kl.coef=0"],
    "entropy, steered": ["algorithm.entropy={coef: 0.1, target: 0.25, delta: 0.005}"],
    "a teacher": ["teacher.path=wise", "algorithm.distillation={coef: 2.0, reward_coef: 3.0, gamma: 0.5}"],
    "a teacher alone": ["algorithm.name=opd", "teacher.path=wise"],
}
TOKENS = {
    "clip_cov": ["algorithm={policy_loss: clip_cov, policy_loss_args: {share: 0.05, low: 0.001, high: 4}}"],
    "kl_cov": ["algorithm={policy_loss: kl_cov, policy_loss_args: {share: 0.05, coef: 0.5}, mini_batches: 2}"],
    "top entropies": ["algorithm.entropy.top_share=0.2"],
    "right responses": ["algorithm.positive_nll={coef: 0.1, threshold: 0.5}"],
}
EPISODES, SPLITS = 20, (1, 2, 3, 5)
OWN = """
import torch
from megarl.algorithms import AdvantageOutputs

def centred(inputs):
    scores = inputs.shard.rows(inputs.scores)
    [tokens] = inputs.shard.total(inputs.mask.sum()[None]).tolist()
    return AdvantageOutputs(advantages=torch.where(inputs.mask, (inputs.scores - scores.mean())[:, None] / tokens, 0))
"""


def samples(branches: bool) -> list[Sample]:
    """Episodes in groups of mixed order, one of them alone; with tool tokens in every response, some truncated, one empty, and
    every third in two branches if `branches`."""
    generator = torch.Generator().manual_seed(7)
    lengths = (150 * torch.rand(EPISODES, generator=generator) ** 2).long().tolist()
    groups = torch.arange(EPISODES).remainder(5)[torch.randperm(EPISODES, generator=generator)].tolist()
    made: list[Sample] = []
    for number, (length, group) in enumerate(zip(lengths, groups, strict=True)):
        group = 9 if number == 4 else group
        length = 0 if number == 6 else length
        for branch in range(2 if branches and number % 3 == 0 else 1):
            tokens = length // (branch + 1)
            mask = [int(t % 11 < 8) for t in range(tokens)]
            turns = sum(mask[t] and not (t and mask[t - 1]) for t in range(tokens)) if not branches else 0
            made.append(
                Sample(
                    f"{number}" + f"+{branch}" * bool(branch), f"g{group}", "r", [1], [5] * tokens, mask,
                    torch.rand(tokens, generator=generator).neg().tolist(),
                    [6 if t < tokens // 3 else 7 for t in range(tokens)], "length" if number % 4 == 1 else "stop",
                    rewards={"environment": number / 7, "a:judge": (number % 3) / 3} | ({"odd": 1.0} if number == 2 else {}),
                    turn_rewards=[(number + turn) % 3 / 7 for turn in range(turns)],
                    turn_states=[f"s{(number + turn) % 4}" for turn in range(turns)],
                    branch_of=f"{number}" if branch else "",
                )
            )  # fmt: skip
    return made


def with_columns(batch: Batch) -> Batch:
    """What passes, a critic, a teacher and a process reward model would give; each value of a row's own draw."""
    shape, names = batch.mask.shape, ("old", "reference", "entropy", "values", "steps", "ends", "teacher", "collision", "after")
    drawn = {name: torch.zeros(shape) for name in names}
    for row, sample in enumerate(batch.samples):
        generator = torch.Generator().manual_seed(sum(map(ord, sample.sample_id)))
        for column in drawn.values():
            length = int(batch.lengths[row])
            column[row, :length] = torch.rand(length, generator=generator)
    within = torch.arange(shape[1]) < batch.lengths[:, None]
    batch.columns |= {
        "old_log_probs": (batch.columns["rollout_log_probs"] + 0.2 * (drawn["old"] - 0.5)) * within,
        "reference_log_probs": -drawn["reference"],
        "old_entropy": drawn["entropy"],
        "old_collision": drawn["collision"] / 2,
        "values": drawn["values"],
        "values_after": drawn["after"] * batch.last_tokens,
        "teacher_log_probs": -drawn["teacher"],
        "step_ends": (((drawn["ends"] < 0.2) | batch.last_tokens) & within).float(),
    }
    batch.columns["step_rewards"] = drawn["steps"] * batch.columns["step_ends"]
    return batch


def rewards_of(batch: Batch) -> list[float]:
    return [(int(sample.episode_id) % 5) / 3 for sample in batch.samples]


def greedy_of(batch: Batch) -> list[tuple[Sample, float]]:
    first = {sample.group_id: sample for sample in reversed(batch.samples)}
    return [(sample, number / 3) for number, sample in enumerate(first.values())]


def parts_of(settings: Config) -> list[StepPart]:
    return [Teachers(settings)] if "wise" in str(settings) else []


def same_experience(one: Experience, other: Experience) -> None:
    assert one.state_dict() == other.state_dict()
    assert one.entropy_coef == other.entropy_coef


def estimated_in_shards(
    settings: Config, experience: Experience, whole: Batch, parts: int
) -> tuple[dict[str, float], Tensor, list[tuple[Batch, Tensor]]]:
    """Metrics, the tokens that are left of each episode, and each shard's own batch with its rows' numbers in the whole."""
    episodes = JoinedEpisodes(whole)
    rewards = rewards_of(episodes.batch)
    greedy = greedy_of(episodes.batch)
    known = RowFacts.of(Batch([sample for sample, _ in greedy])), [reward for _, reward in greedy]
    needs_greedy = settings.algorithm.estimator_needs.greedy
    inputs = experience.row_inputs(RowFacts.of(episodes.batch), rewards, known if needs_greedy else None)
    numbers = split_groups(whole.groups, parts, parts)

    def one(own: Tensor, shard: Shard) -> tuple[Batch, TokenOutcome, Tensor]:
        batch = with_columns(Batch([whole.samples[row] for row in own.tolist()]))
        own_settings, own_rows = pickle.loads(pickle.dumps((settings, inputs.of_rows(own_episodes(own)))))
        if settings.rollout.schedule.mask_older_tokens:
            older_tokens(batch, 7, mask=True, shard=shard)
        joined = JoinedEpisodes(batch)
        outcome = estimate_tokens(own_settings, joined.batch, own_rows, shard)
        left = joined.batch.mask.sum(1)
        joined.split()
        return batch, outcome, left

    def own_episodes(own: Tensor) -> list[int]:
        mine = {*own.tolist()}
        return [episode for episode, rows in enumerate(episodes.rows) if rows[0] in mine]

    meeting = Meeting(split_groups(episodes.batch.groups, parts, parts))
    by_episode = {tuple(rows.tolist()): own for rows, own in zip(meeting.row_numbers, numbers, strict=True)}
    answers = meeting.run(lambda rows, shard: one(by_episode[tuple(rows.tolist())], shard))
    first, *others = [outcome for _, outcome, _ in answers]
    for other in others:
        assert other.metrics == first.metrics
        assert (other.baseline, other.kl, other.kl_rows, other.entropy) == (
            first.baseline,
            first.kl,
            first.kl_rows,
            first.entropy,
        )
    left = put_together([rows_left[:, None] for _, _, rows_left in answers], meeting.row_numbers, 1).squeeze(1)
    metrics = experience.take_outcome(inputs, first) | experience.steer_entropy_by(first.entropy)
    return metrics, left, [(batch, own) for (batch, _, _), own in zip(answers, numbers, strict=True)]


def same_columns(shards: Sequence[tuple[Batch, Tensor]], whole: Batch, names: Sequence[str]) -> None:
    rows = [own for _, own in shards]
    width = whole.mask.shape[1]
    assert torch.equal(put_together([batch.mask for batch, _ in shards], rows, width), whole.mask)
    for name in names:
        assert torch.equal(put_together([batch.columns[name] for batch, _ in shards], rows, width), whole.columns[name]), name


OF_ONE_BRANCH = {"turns", "states of turns"}
"""A history that goes on from an earlier point has no turns in order."""


@pytest.mark.parametrize(
    ("case", "branches"), [*((case, False) for case in CASES), *((case, True) for case in CASES if case not in OF_ONE_BRANCH)]
)
def test_shards_estimate_what_the_whole_batch_does(case: str, branches: bool) -> None:
    settings = config(*CASES[case])
    for parts in SPLITS:
        whole = with_columns(Batch(samples(branches)))
        one, other = Experience(settings, parts_of(settings)), Experience(settings, parts_of(settings))
        for _ in range(2):  # the second step begins with what the first remembered
            metrics, left, shards = estimated_in_shards(settings, other, whole, parts)
            expected = with_columns(Batch(whole.samples))
            episodes = JoinedEpisodes(expected)
            greedy = greedy_of(episodes.batch) if settings.algorithm.estimator_needs.greedy else None
            assert (
                estimate(one, episodes.batch, rewards_of(episodes.batch), greedy) | steer_entropy(one, episodes.batch)
                == metrics
            )
            episodes.split()
            same_experience(one, other)
            assert torch.equal(left, episodes.batch.mask.sum(1))
            same_columns(shards, expected, [*expected.columns])
            assert expected.columns["advantages"].abs().sum() > 0


def test_an_own_estimator_gets_a_shard_and_asks_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    settings = config("algorithm.advantage=mine.py:centred", "algorithm.kl.coef=0", "algorithm.advantage_normalisation=batch")
    whole = with_columns(Batch(samples(False)))
    _, _, shards = estimated_in_shards(settings, Experience(settings), whole, 3)
    estimate(Experience(settings), whole, rewards_of(whole))
    same_columns(shards, whole, ["advantages"])


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("case", TOKENS)
def test_loss_weights_and_tokens_of_a_mini_batch_are_those_of_the_whole(case: str, branches: bool) -> None:
    settings = config(*TOKENS[case], "rollout.schedule={partial_responses: continue, mask_older_tokens: true}")
    for parts in SPLITS:
        whole = with_columns(Batch(samples(branches)))
        _, left, shards = estimated_in_shards(settings, Experience(settings), whole, parts)
        counted = older_tokens(whole, 7, mask=True)
        episodes = JoinedEpisodes(whole)
        estimate(Experience(settings), episodes.batch, rewards_of(episodes.batch))
        episodes.split()
        for number, chosen in enumerate(mini_batch_rows(episodes.batch, 2, seed=3)):
            rows = [row for episode in chosen for row in episodes.rows[episode]]
            set_loss_weights(episodes.batch, chosen, settings)
            episodes.split(["weights"])
            set_token_columns(whole, rows, settings, rewards=rewards_of(whole), update_number=number)
            in_step = torch.isin(torch.arange(len(episodes.batch)), torch.tensor(chosen))
            aggregation, most = settings.algorithm.aggregation, settings.rollout.max_new_tokens
            wanted = token_weights(episodes.batch.mask & in_step[:, None], aggregation, norm_length=most)
            assert torch.equal(episodes.batch.columns["weights"], wanted)
            weights = loss_row_weights(left, chosen, settings)
            of_rows = torch.zeros(len(whole))
            for episode, places in enumerate(episodes.rows):
                of_rows[places] = weights[episode]
            set_in_shards(shards, rows, of_rows, settings, number)
            same_columns(shards, whole, ["weights", *({*TOKEN_COLUMNS} & {*whole.columns})])
        assert {*TOKEN_COLUMNS} & {*whole.columns}

        def count(own: Tensor, shard: Shard, whole: Batch = whole) -> dict[str, float]:
            return older_tokens(Batch([whole.samples[row] for row in own.tolist()]), 7, mask=False, shard=shard)

        assert Meeting([own for _, own in shards]).run(count) == [counted] * parts


def set_in_shards(
    shards: Sequence[tuple[Batch, Tensor]], rows: Sequence[int], of_rows: Tensor, settings: Config, number: int
) -> None:
    """The columns of optimizer step `number` over `rows` of the whole, with the weights of all rows, in each shard."""
    batches = {tuple(own.tolist()): batch for batch, own in shards}

    def one(own: Tensor, shard: Shard) -> None:
        batch = batches[tuple(own.tolist())]
        lay_loss_weights(batch, of_rows[own])
        mine = [place for place, row in enumerate(own.tolist()) if row in rows]
        set_token_columns(batch, mine, settings, rewards=rewards_of(batch), update_number=number, shard=shard)

    Meeting([own for _, own in shards]).run(one)


def test_statistics_of_rewards_are_those_of_the_groups() -> None:
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 5.0])
    figures = reward_statistics(scores, torch.tensor([3, 3, 1, 1, 7]))
    assert (figures.mean, figures.uniform_groups) == (pytest.approx(1.6), pytest.approx(2 / 3))
    assert figures.std == pytest.approx(float(scores.std(correction=0)))
    tied: Any = reward_statistics(torch.full((4,), 0.1), torch.tensor([0, 0, 1, 1]))
    assert tied.uniform_groups == 1.0
