"""From rewards to advantages on the driver: every option changes exactly what it says, by the number it says."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.algorithms.catalogue import ESTIMATORS
from megarl.data.batch import Batch
from megarl.data.sample import Sample
from megarl.errors import ConfigError
from megarl.experience.experience import Experience, group_rewards, is_tied
from tests.config import smallest
from tests.experience.estimates import estimate, steer_entropy

config = partial(
    smallest.config,
    rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 6},
    rewards=[{"name": "exact_number"}],
)
REWARDS = [1.0, 0.0, 3.0, 2.0]
LENGTHS = [2, 4, 6, 3]


def batch() -> Batch:
    """Two groups of two responses of 2, 4, 6 (truncated) and 3 tokens, whose engine log-probs are off by known amounts."""
    samples = [
        Sample(
            sample_id=f"{number}", group_id=f"g{number // 2}", row_id=f"g{number // 2}", prompt_ids=[1],
            response_ids=[5] * length, sampled_mask=[1] * length, rollout_log_probs=[-1.0] * length,
            weight_versions=[0] * length, finish_reason="length" if length == 6 else "stop",
        )
        for number, length in enumerate(LENGTHS)
    ]  # fmt: skip
    made = Batch(samples)
    offsets = torch.tensor([0.0, 1.0, -1.0, 0.1])[:, None]
    made.columns["old_log_probs"] = (made.columns["rollout_log_probs"] + offsets) * made.mask
    made.columns["reference_log_probs"] = (made.columns["old_log_probs"] - 0.5) * made.mask
    return made


def advantages(*overrides: str) -> tuple[Batch, dict[str, float], Experience]:
    made, experience = batch(), Experience(config(*overrides))
    return made, estimate(experience, made, REWARDS), experience


def greedy(made: Batch, **rewards: float) -> list[tuple[Sample, float]]:
    """A greedy response to every prompt, by group id: as long as the first of the group."""
    first = {sample.group_id: sample for sample in reversed(made.samples)}
    return [(first[group], reward) for group, reward in rewards.items()]


def of_row(made: Batch, row: int) -> list[float]:
    return made.columns["advantages"][row][made.mask[row]].tolist()


def test_the_group_mean_is_subtracted_without_any_option() -> None:
    made, metrics, _ = advantages("algorithm.advantage=dr_grpo")
    assert [of_row(made, row)[0] for row in range(4)] == [0.5, -0.5, 0.5, -0.5]
    assert metrics["reward/shaped_mean"] == 1.5


def test_penalties_come_before_normalisation_and_clipping() -> None:
    made, metrics, experience = advantages(
        "algorithm.advantage=reinforce", "algorithm.kl.coef=0.0",
        "algorithm.shaping={overlong_tokens: 4, length_penalty: 0.25, normalise: true, clip: 1.0}",
    )  # fmt: skip
    overlong = [0.0, -0.5, -1.0, -0.25]
    raw = [r + o - 0.25 * n for r, o, n in zip(REWARDS, overlong, LENGTHS, strict=True)]
    mean = sum(raw) / 4
    std = math.sqrt(sum((x - mean) ** 2 for x in raw) / 4)
    expected = [max(-1.0, min(1.0, (x - mean) / (std + 1e-6))) for x in raw]
    for row, value in enumerate(expected):
        assert of_row(made, row) == pytest.approx([value] * LENGTHS[row], abs=1e-5)
    assert metrics["reward/shaped_mean"] == pytest.approx(sum(expected) / 4, abs=1e-5)
    assert experience.state_dict()["normaliser"]["count"] == 4


def test_the_scale_of_rewards_survives_a_checkpoint() -> None:
    settings = config("algorithm.advantage=reinforce", "algorithm.kl.coef=0.0", "algorithm.shaping.normalise=true")
    whole, first, second = Experience(settings), Experience(settings), Experience(settings)
    for experience in (whole, first):
        estimate(experience, batch(), REWARDS)
    second.load_state_dict(first.state_dict())
    later = [5.0, 1.0, 0.0, 2.0]
    expected, resumed = batch(), batch()
    estimate(whole, expected, later)
    estimate(second, resumed, later)
    assert torch.equal(expected.columns["advantages"], resumed.columns["advantages"])
    fresh = batch()
    estimate(Experience(settings), fresh, later)
    assert not torch.equal(expected.columns["advantages"], fresh.columns["advantages"])


def test_truncated_responses_can_leave_every_baseline_and_running_mean() -> None:
    """Rewards 3, 2, 1, 0 in one group, of which the third is cut: the mean of the others is 5/3."""
    made = batch()
    for sample in made.samples:
        sample.group_id = "g0"
    made = Batch(made.samples)
    shaping = "algorithm.shaping={normalise: true}"
    experience = Experience(config("algorithm.advantage=reinforce", "algorithm.kl.coef=0.0", shaping, EXCLUDE))
    estimate(experience, made, [3.0, 2.0, 1.0, 0.0])
    assert made.mask.any(1).tolist() == [True, True, False, True]
    assert experience.state_dict()["normaliser"]["count"] == 3
    assert experience.state_dict()["normaliser"]["mean"] == pytest.approx(5 / 3)
    made = Batch(made.samples)
    estimate(Experience(config("algorithm.advantage=dr_grpo", "algorithm.kl.coef=0.0", EXCLUDE)), made, [3.0, 2.0, 1.0, 0.0])
    assert [of_row(made, row)[:1] for row in range(4)] == [[pytest.approx(x - 5 / 3)] if x != 1 else [] for x in (3, 2, 1, 0)]
    alone, metrics, _ = advantages("algorithm.advantage=dr_grpo", EXCLUDE)
    assert not alone.mask[2:].any()  # the other response of the group has nothing left to be compared with
    assert metrics["reward/lone_responses"] == 1


EXCLUDE = "algorithm.truncated_responses=exclude"


@pytest.mark.parametrize("advantage", ["gae", "dr_grpo", "own"])
def test_the_config_says_how_advantages_are_normalised(advantage: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from megarl.algorithms import AdvantageOutputs\n"
        "def f(inputs): return AdvantageOutputs(advantages=inputs.mask * inputs.scores[:, None])\n"
    )
    name = f"{tmp_path / 'mine.py'}:f" if advantage == "own" else advantage
    for mode in ("none", "batch", "batch_rms"):
        made = batch()
        made.columns["values"] = torch.zeros(made.mask.shape)
        settings = config(f"algorithm.advantage={name}", "algorithm.kl.coef=0.0", f"algorithm.advantage_normalisation={mode}")
        estimate(Experience(settings), made, REWARDS)
        values = made.columns["advantages"][made.mask] if advantage != "dr_grpo" else made.columns["advantages"][:, 0]
        assert (abs(float(values.mean())) < 1e-6) is (mode == "batch" or advantage == "dr_grpo")
        assert (float(values.std()) == pytest.approx(1, abs=1e-4)) is (mode == "batch")
        assert (float(values.square().mean()) == pytest.approx(1, abs=1e-4)) is (mode == "batch_rms")


def test_kl_in_the_reward_is_compared_within_the_group() -> None:
    """β = 0.2 and 0.5 nats a token: R is 1 − 0.2, 0 − 0.4, 3 − 0.6, 2 − 0.3."""
    made, _, _ = advantages("algorithm.advantage=rloo", "algorithm.kl={coef: 0.2, apply_to: reward}")
    assert [of_row(made, row)[0] for row in range(4)] == pytest.approx([1.2, -1.2, 0.7, -0.7], abs=1e-6)


def test_truncated_responses_leave_the_mask_but_still_count_in_their_group() -> None:
    made, _, _ = advantages("algorithm.advantage=dr_grpo", "algorithm.truncated_responses=mask")
    assert made.mask.any(1).tolist() == [True, True, False, True]
    assert of_row(made, 3) == [-0.5] * 3


def test_importance_weights_are_truncated_and_denominators_kept() -> None:
    made, metrics, _ = advantages("algorithm.rollout_correction={mode: tis_token, high: 2.0}")
    weights = [made.columns["correction"][row, 0].item() for row in range(4)]
    assert weights == pytest.approx([1.0, 2.0, math.exp(-1), math.exp(0.1)], abs=1e-6)
    assert made.mask.sum() == sum(LENGTHS)
    assert metrics["correction/changed_responses"] == 0.25


def test_a_token_weight_and_a_rejection_act_together() -> None:
    both = "algorithm.rollout_correction=[{mode: tis_token, high: 1.05}, {mode: reject_sequence, low: 0.9, high: 1.2}]"
    made, metrics, _ = advantages(both, "algorithm.advantage=reinforce")
    assert made.mask.any(1).tolist() == [True, False, False, True]
    assert made.columns["correction"][3, 0].item() == pytest.approx(1.05)
    assert metrics["correction/changed_responses"] == 0.75


def test_rejected_responses_leave_every_denominator() -> None:
    correction = "algorithm.rollout_correction={mode: reject_sequence, low: 0.9, high: 1.2}"
    made, _, _ = advantages(correction, "algorithm.advantage=reinforce")
    assert made.mask.any(1).tolist() == [True, False, False, True]
    made, metrics, _ = advantages(correction)  # what is left of each group is alone in it
    assert not made.mask.any()
    assert metrics["reward/lone_responses"] == 2


def test_kl_in_the_reward_is_subtracted_at_every_token_from_there_on() -> None:
    made, _, _ = advantages(
        "algorithm.advantage=reinforce",
        "algorithm.kl={coef: 0.2, estimator: k1, apply_to: reward}",
        "algorithm.shaping.clip=null",
    )
    assert of_row(made, 0) == pytest.approx([1.0 - 0.2, 1.0 - 0.1], abs=1e-6)


def test_the_kl_weight_is_steered_towards_its_target_and_saved() -> None:
    overrides = [
        "algorithm.advantage=reinforce",
        "algorithm.kl={coef: 0.2, estimator: k1, apply_to: reward, target: 0.5, horizon: 10}",
    ]
    _, metrics, experience = advantages(*overrides)
    assert metrics["kl/coef"] == 0.2  # what this step used
    # the mean KL of a response, 0.5 x 15/4 nats, is far above the target: the largest step, 1 + 0.2 x 4/10
    assert experience.state_dict()["kl"]["coef"] == pytest.approx(0.2 * 1.08)
    estimate(experience, batch(), REWARDS)
    resumed = Experience(config(*overrides))
    resumed.load_state_dict(experience.state_dict())
    assert resumed.kl is not None
    assert resumed.kl.coef == pytest.approx(0.2 * 1.08 * 1.08)


def test_the_kl_of_rejected_responses_is_not_what_the_weight_is_steered_by() -> None:
    """Kept are rows 0 and 3, whose KL is 0.5 x 2 and 0.5 x 3 nats: on target, so that β stays."""
    made, experience = (
        batch(),
        Experience(
            config(
                "algorithm.advantage=reinforce",
                "algorithm.rollout_correction={mode: reject_sequence, low: 0.9, high: 1.2}",
                "algorithm.kl={coef: 0.2, apply_to: reward, target: 1.25, horizon: 10}",
            )
        ),
    )
    estimate(experience, made, REWARDS)
    assert made.mask.any(1).tolist() == [True, False, False, True]
    assert experience.state_dict()["kl"]["coef"] == pytest.approx(0.2, rel=1e-6)


def test_the_penalty_to_the_old_policy_is_steered_by_the_last_update_and_saved() -> None:
    overrides = ["algorithm.policy_loss=kl_penalty", "algorithm.mini_batches=2", "algorithm.old_policy_kl={target: 0.01}"]
    experience, resumed = Experience(config(*overrides)), Experience(config(*overrides))
    assert experience.steer_old_policy_kl(0.1) == {"policy/kl_old_coef": 1.0}
    assert experience.steer_old_policy_kl(None) == {}
    resumed.load_state_dict(experience.state_dict())
    assert resumed.steer_old_policy_kl(0.001) == {"policy/kl_old_coef": 2.0}
    assert resumed.old_policy_kl == 1.0
    assert Experience(config(*overrides[:2])).steer_old_policy_kl(0.1) == {}


def test_the_entropy_bonus_is_steered_by_the_tokens_of_the_step_and_saved() -> None:
    """Entropy 0.25 at sampled tokens and 9 at the others: at the target, so that the bonus of the step is the first weight."""
    overrides = ["algorithm.entropy={coef: 0.1, target: 0.25, delta: 0.005}"]
    experience, resumed = Experience(config(*overrides)), Experience(config(*overrides))
    made = batch()
    made.mask[1] = False
    made.columns["old_entropy"] = torch.where(made.mask, 0.25, 9.0)
    assert steer_entropy(experience, made) == {"policy/entropy_coef": 0.1}
    assert experience.entropy_coef == 0.1
    resumed.load_state_dict(json.loads(json.dumps(experience.state_dict())))
    assert steer_entropy(resumed, made) == steer_entropy(experience, made) == {"policy/entropy_coef": 0.1 + 0.005}
    made.columns["old_entropy"] += 1e-6
    assert steer_entropy(experience, made) == {"policy/entropy_coef": 0.0}
    assert experience.entropy_coef == 0
    made.mask[:] = False
    state = experience.state_dict()
    assert steer_entropy(experience, made) == {}
    assert experience.state_dict() == state
    older = {name: value for name, value in state.items() if name != "entropy"}  # a checkpoint from before the controller
    resumed.load_state_dict(older)


def test_an_entropy_bonus_without_a_target_is_the_one_of_the_config() -> None:
    experience = Experience(config("algorithm.entropy.coef=0.2"))
    assert steer_entropy(experience, batch()) == {}
    assert experience.entropy_coef == 0.2
    assert experience.state_dict()["entropy"] is None


def test_the_estimator_is_given_the_numbers_of_the_config() -> None:
    """Of three sampled tokens λ is 1 − 1/(0.5·3) = 1/3 for the advantages; the critic is trained on the reward to come."""
    vapo = ["algorithm.name=vapo", "algorithm.advantage_args={critic_lambda: 1.0, length_alpha: 0.5}"]
    made = batch()
    made.columns["values"] = torch.full(made.mask.shape, 0.5)
    estimate(Experience(config(*vapo, "algorithm.advantage_normalisation=none")), made, REWARDS)
    assert of_row(made, 3) == pytest.approx([1.5 / 9, 1.5 / 3, 1.5])
    assert made.columns["returns"][3][:3].tolist() == pytest.approx([2.0, 2.0, 2.0])


def test_the_critic_s_explained_variance_is_that_of_the_sampled_tokens() -> None:
    made = batch()
    made.columns["values"] = torch.linspace(-1, 1, made.mask.numel()).view(made.mask.shape)
    figures = estimate(Experience(config("algorithm.name=ppo", "algorithm.kl.coef=0.0")), made, REWARDS)
    returns, values = made.columns["returns"][made.mask].numpy(), made.columns["values"][made.mask].numpy()
    assert figures["critic/explained_variance"] == pytest.approx(1 - np.var(returns - values) / np.var(returns), rel=1e-5)


def test_the_value_after_a_truncated_response_is_bootstrapped() -> None:
    made = batch()
    made.columns["values"] = torch.zeros(made.mask.shape)
    made.columns["values_after"] = torch.full(made.mask.shape, 0.0)
    made.columns["values_after"][:, 0] = 2.0
    bootstrap = "algorithm.truncated_responses=bootstrap"
    raw = "algorithm.advantage_normalisation=none"
    estimate(
        Experience(config("algorithm.name=ppo", "algorithm.kl.coef=0.0", "algorithm.gae_lambda=1.0", bootstrap, raw)),
        made,
        REWARDS,
    )
    assert of_row(made, 2) == pytest.approx([5.0] * 6)
    assert of_row(made, 3) == pytest.approx([2.0] * 3)


def test_remax_subtracts_the_greedy_reward_of_the_same_prompt() -> None:
    made, experience = batch(), Experience(config("algorithm.advantage=remax", "algorithm.kl.coef=0.0"))
    estimate(experience, made, REWARDS, greedy(made, g1=2.5, g0=1.0))
    assert [of_row(made, row)[0] for row in range(4)] == pytest.approx([0.0, -1.0, 0.5, -0.5])


SHAPED = "algorithm.shaping={overlong_tokens: 4, length_penalty: 0.25, normalise: true, clip: 1.5}"


def test_the_greedy_reward_is_shaped_as_the_others_are_and_counted_in_no_scale() -> None:
    """A greedy response that is a row's own, with its reward, leaves that row exactly 0, whatever the shaping."""
    made, experience = batch(), Experience(config("algorithm.advantage=remax", "algorithm.kl.coef=0.0", SHAPED))
    estimate(experience, made, REWARDS, [(made.samples[3], REWARDS[3]), (made.samples[0], REWARDS[0])])
    assert [of_row(made, row)[0] for row in (0, 3)] == [0.0, 0.0]
    raw = [r + o - 0.25 * n for r, o, n in zip(REWARDS, [0.0, -0.5, -1.0, -0.25], LENGTHS, strict=True)]
    mean = sum(raw) / 4
    std = math.sqrt(sum((x - mean) ** 2 for x in raw) / 4)
    shaped = [max(-1.5, min(1.5, (x - mean) / (std + 1e-6))) for x in raw]
    assert of_row(made, 2)[0] == pytest.approx(shaped[2] - shaped[3], abs=1e-5)
    assert experience.state_dict()["normaliser"]["count"] == 4


def test_shaping_reaches_the_rewards_of_steps_at_the_last_step() -> None:
    """overlong penalties 0, −0.5, −1, −0.25 and 0.25 a token, on steps that all have a reward of 1."""
    shaping = {"overlong_tokens": 4, "length_penalty": 0.25}
    algorithm = {"advantage": "grpo_process", "kl": {"coef": 0.0}, "shaping": shaping}
    settings = config(algorithm=algorithm, reward_model={"path": "nowhere", "per_step": True})
    made = batch()
    ends = torch.zeros(made.mask.shape)
    for row, length in enumerate(LENGTHS):
        ends[row, [0, length - 1]] = 1.0
    made.columns |= {"step_rewards": ends.clone(), "step_ends": ends}
    estimate(Experience(settings), made, REWARDS)
    rewards = [[1.0, 1.0 + o - 0.25 * n] for o, n in zip([0.0, -0.5, -1.0, -0.25], LENGTHS, strict=True)]
    for rows in ((0, 1), (2, 3)):
        steps = [x for row in rows for x in rewards[row]]
        mean = sum(steps) / 4
        std = math.sqrt(sum((x - mean) ** 2 for x in steps) / 3) + 1e-6
        for row in rows:
            first, last = [(x - mean) / std for x in rewards[row]]
            assert of_row(made, row) == pytest.approx([first + last] + [last] * (LENGTHS[row] - 1), abs=1e-5)


def test_old_log_probs_are_computed_only_where_something_reads_them() -> None:
    needed = {
        (): False,
        ("algorithm.epochs=2",): True,
        ("algorithm.mini_batches=2",): True,
        ("algorithm.rollout_correction.mode=mis_token",): True,
        ("algorithm.rollout_correction.mode=bypass", "algorithm.mini_batches=2"): False,
        ("algorithm.name=ppo",): True,
    }
    assert {overrides: config(*overrides).needs_old_log_probs for overrides in needed} == needed


def test_the_first_update_stands_for_a_pass_only_where_no_one_else_reads_it() -> None:
    twice = "algorithm.epochs=2"
    computed = {
        (): False,  # there is no pass
        (twice,): True,
        ("algorithm.mini_batches=2",): True,
        (twice, "algorithm.policy_loss=gspo"): True,
        (twice, "algorithm.policy_loss=clip_cov"): False,
        (twice, "algorithm.entropy.top_share=0.2"): False,
        (twice, "algorithm.rollout_correction.mode=mis_token"): False,
        (twice, "algorithm.rollout_correction.mode=bypass"): False,
        (twice, "algorithm.kl.coef=0.1", "algorithm.kl.apply_to=reward"): False,
        (twice, "algorithm.advantage=optimal_token_baseline"): False,
        (twice, "rollout.top_p=0.9"): False,
        (twice, "policy.routing.replay=old_policy"): False,
        (twice, "algorithm.name=online_dpo"): False,
    }
    assert {overrides: config(*overrides).first_update_is_a_pass for overrides in computed} == computed


def test_groups_are_found_by_their_ids() -> None:
    samples = batch().samples
    groups = group_rewards([samples[2], samples[0], samples[3], samples[1]], [1.0, 2.0, 1.0, 3.0])
    assert [[sample.sample_id for sample, _ in group] for group in groups] == [["2", "3"], ["0", "1"]]
    assert [is_tied(group) for group in groups] == [True, False]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["algorithm.rollout_correction={mode: mis_token, low: 2.0, high: 1.0}"], "algorithm.rollout_correction[0].low is 2.0"),
        (["algorithm.truncated_responses=bootstrap"], "'gae'"),
        (["algorithm.shaping.overlong_tokens=7"], "rollout.max_new_tokens = 6"),
        (["algorithm.advantage=grpo_process"], "reward_model.per_step"),
        (["algorithm.kl.target=0.1"], "algorithm.kl.target"),
        (
            ["reference.reset_every=2", "algorithm.kl.coef=0.0"],
            "reference.reset_every needs a reference model: set algo",
        ),
        (
            ["reference={reset_every: 2, layout: {tp: 1}}"],
            "reference.reset_every needs the reference in the policy's process",
        ),
        (["reference.reset_share=0.5"], "reference.reset_share needs steps after which the reference moves"),
        (
            [
                "reference={reset_every: 2, reset_share: 0.5}",
                "model.fp8=hybrid",
                "model.fp8_param=true",
                "model.fp8_recipe=tensorwise",
                "model.dtype=bfloat16",
                "model.layer_spec=transformer_engine",
            ],
            "reference.reset_share is 0.5, which would be lost in weights of FP8",
        ),
        (["rollout.samples_per_prompt=1", "rollout.prompts_per_step=4"], "it must be at least 2"),
    ],
)
def test_options_that_contradict_each_other_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(*overrides)
    assert sentence in str(raised.value)


WRONG_ANSWERS = [
    ("return None", r"must return AdvantageOutputs, but returned NoneType"),
    ("return AdvantageOutputs(advantages=inputs.scores)", r"advantages as a tensor of shape \[4, 6\], but gave shape \[4\]"),
    ("return AdvantageOutputs(advantages=[1.0])", r"advantages as a tensor of shape \[4, 6\], but gave list"),
    ("return AdvantageOutputs(advantages=zeros)", r"returns as a tensor of shape \[4, 6\], as the critic is trained on them"),
    ("return AdvantageOutputs(advantages=zeros, returns=zeros, dropped=zeros)", r"dropped as a tensor of shape \[4\]"),
    ("return inputs.values + inputs.greedy_scores['a']", r"raised TypeError.*mine\.py line 5"),
]


@pytest.mark.parametrize(("answer", "sentence"), WRONG_ANSWERS)
def test_what_a_users_estimator_does_wrong_is_one_sentence(answer: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from megarl.algorithms import AdvantageOutputs, needs\n@needs(values=True, greedy=True)\n"
        f"def f(inputs):\n    zeros = inputs.mask.float()\n    {answer}\n"
    )
    made = batch()
    made.columns["values"] = torch.zeros(made.mask.shape)
    experience = Experience(config(f"algorithm.advantage={tmp_path / 'mine.py'}:f", "algorithm.kl.coef=0.0"))
    with pytest.raises(ConfigError, match=sentence) as error:
        estimate(experience, made, REWARDS, greedy(made, g0=0.0, g1=0.0))
    assert str(error.value).startswith("algorithm.advantage: '")


EVERYTHING = '''
from megarl.algorithms import AdvantageOutputs, needs

@needs(old_log_probs=True, reference_log_probs=True, teacher_log_probs=True, entropy=True)
def f(inputs, source, scale):
    """A sum of different powers of all that it is given, so that each is seen in the result."""
    apart = inputs.old_log_probs - inputs.rollout_log_probs + 10 * (inputs.teacher_log_probs - inputs.reference_log_probs)
    rewards = scale * inputs.rewards_by_source[source][:, None] + 100 * inputs.turns + 1000 * inputs.entropy
    return AdvantageOutputs(advantages=(apart + rewards) * inputs.mask)
'''


def test_an_estimator_of_the_users_gets_what_built_in_ones_get_and_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EVERYTHING)
    own = [f"algorithm.advantage={tmp_path / 'mine.py'}:f", "algorithm.advantage_args={source: b, scale: 0.5}"]
    settings = config(*own, "algorithm.kl.coef=0.0", "teacher.path=elsewhere")
    assert settings.uses_reference
    assert settings.needs_old_log_probs
    assert [role.name for role in settings.roles] == ["policy", "reference", "teacher"]
    made = batch()
    for row, sample in enumerate(made.samples):
        sample.rewards = {"a": 9.0, "b": float(row)}
    made.samples[2].rewards["only here"] = 1.0
    made.mask[2, 2:4] = False  # a tool's tokens: two turns
    made.columns["old_entropy"] = torch.full(made.mask.shape, 0.25)
    made.columns["teacher_log_probs"] = made.columns["reference_log_probs"] + 0.5
    estimate(Experience(settings), made, REWARDS)
    for row, gap in enumerate([0.0, 1.0, -1.0, 0.1]):
        base = gap + 10 * 0.5 + 0.5 * row + 1000 * 0.25
        turns = [0, 0, 1, 1] if row == 2 else [0] * LENGTHS[row]
        assert of_row(made, row) == pytest.approx([base + 100 * turn for turn in turns], rel=1e-5)


def of_turns(rewards: list[list[float]], states: list[list[str]]) -> Batch:
    """Two groups of two responses of two turns, a token of two being told between them; a source judges whole responses."""
    samples = [
        Sample(
            sample_id=f"{number}", group_id=f"g{number // 2}", row_id="r", prompt_ids=[1], response_ids=[5] * 5,
            sampled_mask=[1, 1, 0, 1, 1], rollout_log_probs=[-1.0] * 5, weight_versions=[0] * 5, finish_reason="stop",
            rewards={"environment": sum(given), "judge": number / 10}, turn_rewards=given, turn_states=named,
        )
        for number, (given, named) in enumerate(zip(rewards, states, strict=True))
    ]  # fmt: skip
    return Batch(samples)


SOURCES = "rewards=[{name: environment, weight: 2.0}, {name: 'a:judge'}]"
TURN_REWARDS = [[1.0, 0.0], [0.0, 3.0], [1.0, 1.0], [0.0, 0.0]]
TURN_STATES = [["start", "left"], ["start", "left"], ["start", "left"], ["start", "right"]]


def test_turns_are_credited_with_their_own_and_later_rewards_discounted_by_turn() -> None:
    """The environment's rewards are weighted; what other sources gave is the last turn's."""
    made = of_turns(TURN_REWARDS, TURN_STATES)
    totals = [2 * sum(given) + 0.1 * number for number, given in enumerate(TURN_REWARDS)]
    settings = config("algorithm.advantage=turn_rloo", "algorithm.gamma=0.5", "algorithm.kl.coef=0", SOURCES)
    estimate(Experience(settings), made, totals)
    last = [2 * given[1] + 0.1 * number for number, given in enumerate(TURN_REWARDS)]
    first = [2 * given[0] + 0.5 * later for given, later in zip(TURN_REWARDS, last, strict=True)]
    for row in range(4):
        other = row + 1 - 2 * (row % 2)
        values = [first[row] - first[other], last[row] - last[other]]
        assert of_row(made, row) == pytest.approx([value for value in values for _ in range(2)], abs=1e-6)


def test_turns_of_one_state_are_compared_within_their_group() -> None:
    made = of_turns(TURN_REWARDS, TURN_STATES)
    totals = [2.0 * sum(given) for given in TURN_REWARDS]
    own = ["algorithm.advantage=gigpo", "algorithm.advantage_args={step_weight: 0.5, divide_by_std: false}"]
    environment = ["rollout.episode={kind: environment, tools: ['a:B']}", "rewards=[{name: environment, weight: 2.0}]"]
    estimate(Experience(config(*own, *environment, "algorithm.gamma=0.5", "algorithm.kl.coef=0")), made, totals)
    first, last = [[2 * a + b for a, b in TURN_REWARDS], [2 * b for _, b in TURN_REWARDS]]
    for row in range(4):
        other = row + 1 - 2 * (row % 2)
        episode = (totals[row] - totals[other]) / 2
        alone = row > 1  # nobody else of its group was in the state before its second turn
        steps = [(first[row] - first[other]) / 2, 0 if alone else (last[row] - last[other]) / 2]
        want = [episode + 0.5 * step for step in steps for _ in range(2)]
        assert of_row(made, row) == pytest.approx(want, abs=1e-6)


def test_an_episode_that_names_no_states_is_one_sentence() -> None:
    environment = ["rollout.episode={kind: environment, tools: ['a:B']}", "rewards=[{name: environment}]"]
    with pytest.raises(ConfigError, match="give the environment a method state_key"):
        estimate(
            Experience(config("algorithm.advantage=gigpo", *environment, "algorithm.kl.coef=0")),
            of_turns(TURN_REWARDS, [[]] * 4),
            [0.0] * 4,
        )


def test_every_source_is_normalised_by_itself_and_weighted() -> None:
    made = of_turns(TURN_REWARDS, TURN_STATES)
    for sample in made.samples:
        sample.rewards["a:judge"] = sample.rewards.pop("judge")
    settings = config("algorithm.advantage=gdpo", "algorithm.kl.coef=0", "algorithm.advantage_normalisation=none", SOURCES)
    estimate(Experience(settings), made, [0.0] * 4)  # their sum is not read
    environment, judge = [-1, 1, 1, -1], [-1, 1, -1, 1]  # in a pair the larger is half the difference over std = 1/√2
    for row in range(4):
        want = (2.0 * environment[row] + judge[row]) / math.sqrt(2)
        assert of_row(made, row) == pytest.approx([want] * 4, abs=1e-4)


def test_k_of_pass_at_k_comes_from_the_config() -> None:
    answers = {}
    for k in (1, 2):
        made = batch()
        for sample in made.samples:
            sample.group_id = "g0"
        made = Batch(made.samples)
        own = ["algorithm.advantage=pass_at_k", f"algorithm.advantage_args={{k: {k}}}", "rollout.samples_per_prompt=4"]
        estimate(Experience(config(*own, "algorithm.kl.coef=0")), made, [1.0, 0.0, 0.0, 0.0])
        answers[k] = [of_row(made, row)[0] for row in range(4)]
    assert answers[1] == pytest.approx([0.75 / math.sqrt(3) * 4, *[-0.25 / math.sqrt(3) * 4] * 3], abs=1e-4)
    assert answers[2] == pytest.approx([0.5 / 0.5, *[(1 / 3 - 1 / 2) / 0.5] * 3], abs=1e-4)


def test_the_optimal_token_baseline_reads_what_the_pass_of_the_policy_answers() -> None:
    made = batch()
    made.columns["old_log_probs"] = torch.tensor([0.5, 0.25, 0.5, 0.8]).log()[:, None] * made.mask
    made.columns["old_collision"] = torch.tensor([0.5, 0.25, 0.375, 0.66])[:, None] * made.mask
    estimate(Experience(config("algorithm.advantage=optimal_token_baseline", "algorithm.kl.coef=0")), made, REWARDS)
    for one, other, of_one, of_other in ((0, 1, 0.5, 0.75), (2, 3, 0.375, 0.06)):
        baseline = (REWARDS[one] * of_one + REWARDS[other] * of_other) / (of_one + of_other)
        shared = min(LENGTHS[one], LENGTHS[other])
        for row in (one, other):
            want = [REWARDS[row] - baseline] * shared + [0.0] * (LENGTHS[row] - shared)
            assert of_row(made, row) == pytest.approx(want, abs=1e-6)


def test_a_group_is_uniform_only_if_nothing_that_is_compared_differs() -> None:
    samples = of_turns([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], [[]] * 4).samples
    for sample in samples:
        sample.rewards = {"a": 1.0, "b": 0.0}
    samples[3].rewards = {"a": 0.0, "b": 1.0}
    groups = [[(sample, 1.0) for sample in samples[start : start + 2]] for start in (0, 2)]
    for name, expected in (("grpo", [True, True]), ("turn_rloo", [False, True]), ("gdpo", [True, False])):
        assert [is_tied(group, ESTIMATORS[name]) for group in groups] == expected


@pytest.mark.needs_option("distillation")
def test_a_teacher_is_asked_for_where_it_is_read_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EVERYTHING)
    own = [f"algorithm.advantage={tmp_path / 'mine.py'}:f", "algorithm.advantage_args={source: b, scale: 0.5}"]
    with pytest.raises(ConfigError, match=r"needs the log-probs of a teacher: set teacher\.path"):
        config(*own)
    with pytest.raises(ConfigError, match=r"teacher\.path needs an estimator or a loss that reads"):
        config("teacher.path=elsewhere")
    with pytest.raises(ConfigError, match=r"algorithm\.advantage_args is .*, which is for a function of your own"):
        config("algorithm.advantage_args={scale: 1}")
    with pytest.raises(ConfigError, match=r"which leaves out the pass that algorithm\.advantage"):
        config(*own, "teacher.path=elsewhere", "algorithm.rollout_correction.mode=bypass", "algorithm.mini_batches=2")
