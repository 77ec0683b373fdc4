"""Fields of `algorithm` and `objective`: contradictions and what nothing reads are refused, and defaults follow choices."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megarl.config import parse_config, parse_supervised_config, to_yaml
from megarl.config.doubtful import doubtful_choices, notices
from megarl.config.presets import PRESETS
from megarl.errors import ConfigError
from tests.config.smallest import config, supervised

OWN_LOSS = """
def loss(log_probs, old_log_probs, advantages, *, response, settings): ...
def estimator(inputs): ...
"""


@pytest.mark.parametrize(
    ("overrides", "estimator"),
    [
        (["algorithm.name=grpo"], "k3"),
        (["algorithm.advantage=reinforce", "algorithm.kl={apply_to: reward}"], "k1"),
        (["algorithm.name=ppo"], "k1"),
        (["algorithm.name=ppo", "algorithm.kl={apply_to: loss}"], "k3"),
        (["algorithm.name=ppo", "algorithm.kl={apply_to: loss, estimator: k2}"], "k2"),
    ],
)
def test_the_kl_estimator_follows_where_the_penalty_is(overrides: list[str], estimator: str) -> None:
    assert config(*overrides).algorithm.kl.estimator == estimator


ENVIRONMENT = "rollout.episode={kind: environment, tools: ['a:B']}"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["algorithm.advantage=pass_at_k"], r"'pass_at_k' needs algorithm\.advantage_args\.k: set it to a whole number of"),
        *[
            (["algorithm.advantage=pass_at_k", f"algorithm.advantage_args={{k: {k}}}", "rollout.samples_per_prompt=4"], why)
            for k, why in (
                ("4", r"advantage_args\.k is 4; it must be less than rollout\.samples_per_prompt = 4"),
                ("5", r"advantage_args\.k is 5; it must be less than rollout\.samples_per_prompt = 4"),
                ("0", r"advantage_args\.k is 0; it must be a whole number of at least 1"),
                ("1.5", r"advantage_args\.k is 1\.5; it must be a whole number of at least 1"),
                ("true", r"advantage_args\.k is true; it must be a whole number of at least 1"),
            )
        ],
        (["algorithm.advantage=pass_at_k", "algorithm.advantage_args={k: 2, j: 1}"], "is 'j', which .*; it must be 'k'"),
        (["algorithm.advantage=gigpo"], "'gigpo' needs the state before each turn, which an environment names"),
        (["algorithm.advantage=gigpo", "rollout.episode={kind: tools, tools: ['a:b']}"], "needs the state before each turn"),
        (["algorithm.advantage=gigpo", ENVIRONMENT, "algorithm.advantage_args={step_weight: -1}"], "a number of at least 0"),
        (["algorithm.advantage=gigpo", ENVIRONMENT, "algorithm.advantage_args={step_weight: true}"], "a number of at least 0"),
        (["algorithm.advantage=gigpo", ENVIRONMENT, "algorithm.advantage_args={divide_by_std: 1}"], "must be true or false"),
        (["algorithm.advantage=gigpo", ENVIRONMENT, "rollout.samples_per_prompt=1"], "'gigpo' no two responses of a prompt"),
        (["algorithm.advantage=gigpo", ENVIRONMENT, "algorithm.gae_lambda=0.9"], "gae_lambda is 0.9, which .* does not read"),
        *[
            (["algorithm.advantage=gdpo", f"algorithm.shaping={{{field}}}"], "changes the sum of the rewards, and .*'gdpo'")
            for field in ("overlong_tokens: 4", "length_penalty: 0.1", "normalise: true", "clip: 1")
        ],
        (["algorithm.advantage=gdpo", "algorithm.kl.apply_to=reward"], "penalises each token, which .*'gdpo' has no place for"),
        (["algorithm.advantage=turn_rloo", "algorithm.shaping.clip=1"], "clip is 1.0, which is for the reward of a response"),
        (["algorithm.advantage=turn_rloo", "algorithm.shaping.normalise=true"], "'turn_rloo' reads those of turns"),
        (["algorithm.advantage=optimal_token_baseline", "algorithm.gamma=0.9"], "gamma is 0.9, which .* does not read"),
        (
            ["algorithm.advantage=optimal_token_baseline", "algorithm.rollout_correction={mode: bypass}", "algorithm.epochs=2"],
            "leaves out the pass that .*'optimal_token_baseline' needs",
        ),
        (["algorithm.advantage=rloo", "algorithm.advantage_args={k: 2}"], "is for a function of your own"),
    ],
)  # fmt: skip
def test_what_an_estimator_contradicts_is_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        config(*overrides)
    assert "\n" not in str(caught.value)


def test_arguments_of_built_in_estimators_are_kept_as_given() -> None:
    subsets = config("algorithm.advantage=pass_at_k", "algorithm.advantage_args={k: 3}", "rollout.samples_per_prompt=4")
    assert subsets.algorithm.advantage_args == {"k": 3}
    turns = config(
        "algorithm.advantage=gigpo", ENVIRONMENT, "algorithm.advantage_args={step_weight: 0.5}", "algorithm.gamma=0.9"
    )
    assert (turns.algorithm.advantage_args, turns.algorithm.gamma) == ({"step_weight": 0.5}, 0.9)


def test_the_collision_probability_is_asked_for_where_it_is_read_and_nowhere_else() -> None:
    reads = config("algorithm.advantage=optimal_token_baseline")
    assert (reads.needs_collision, reads.needs_old_log_probs) == (True, True)
    assert (config().needs_collision, config().needs_old_log_probs) == (False, False)


def test_weights_of_sources_have_the_labels_that_samples_have() -> None:
    sources = "rewards=[{name: exact_number}, {name: 'a:b', weight: 0.5}, {name: exact_number, weight: 2}]"
    weights = {"exact_number": 1.0, "a:b": 0.5, "exact_number#2": 2.0}
    assert config(sources).reward_weights == weights
    assert config(sources, "reward_model={path: there, weight: 3}").reward_weights == weights | {"reward_model": 3.0}


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_only_k1_is_a_penalty_in_the_reward(estimator: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.kl.estimator is '{estimator}', which is no penalty in the reward"):
        config("algorithm.advantage=reinforce", f"algorithm.kl={{apply_to: reward, estimator: {estimator}}}")


def test_k1_in_the_loss_is_noise_unless_it_is_unbiased() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.estimator is 'k1', which is no penalty in the loss"):
        config("algorithm.kl={estimator: k1}")
    assert config("algorithm.kl={estimator: k1, unbiased: true}").algorithm.kl.unbiased
    assert config("algorithm.kl={estimator: k1, coef: 0.0}").algorithm.kl.coef == 0


@pytest.mark.parametrize(
    ("overrides", "normalisation"),
    [
        (["algorithm.name=grpo"], "group"),
        (["algorithm.name=ppo"], "batch"),
        (["algorithm.name=reinforce_plus_plus"], "batch"),
        (["algorithm.advantage=rloo"], "none"),
        (["algorithm.advantage=reinforce_plus_plus"], "batch"),
        (["algorithm.advantage=dr_grpo", "algorithm.advantage_normalisation=batch"], "batch"),
    ],
)
def test_advantages_are_normalised_as_published_unless_the_config_says(overrides: list[str], normalisation: str) -> None:
    assert config(*overrides).algorithm.advantage_normalisation == normalisation


def test_a_group_of_one_response_is_not_normalised_within_itself() -> None:
    single = ["rollout.samples_per_prompt=1", "algorithm={advantage: reinforce, advantage_normalisation: group}"]
    with pytest.raises(ConfigError, match=r"algorithm\.advantage_normalisation is 'group', which compares .* 'batch_rms'"):
        config(*single)


def test_only_losses_that_clip_ratios_from_below_need_a_lower_bound(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    own = f"{tmp_path / 'mine.py'}:loss"
    for loss in ("cispo", "gmpo", own):
        assert config(f"algorithm.policy_loss={loss}", "algorithm.clip_low=1.0").algorithm.clip_low == 1.0
    for loss in ("clip", "dual_clip", "gspo"):
        with pytest.raises(
            ConfigError, match=r"algorithm.clip_low is 1.0, which leaves algorithm.policy_loss = .* lower bound"
        ):
            config(f"algorithm.policy_loss={loss}", "algorithm.clip_low=1.0")


NOTHING_READS = [
    ("algorithm.gamma=0.9", "algorithm.gamma is 0.9, which algorithm.advantage = 'grpo' does not read; it must be 1.0"),
    ("algorithm={advantage: remax, gamma: 0.9}", "algorithm.advantage = 'remax' does not read"),
    ("algorithm={advantage: reinforce, gae_lambda: 0.9}", "algorithm.gae_lambda is 0.9"),
    ("algorithm={policy_loss: reinforce, clip_high: 0.3}", "algorithm.clip_high is 0.3"),
    ("algorithm.dual_clip=4", "algorithm.dual_clip is 4.0, which algorithm.policy_loss = 'clip' does not read"),
    (
        "algorithm={policy_loss: sapo, clip_low: 0.3}",
        "algorithm.clip_low is 0.3, which algorithm.policy_loss = 'sapo' does not",
    ),
    ("algorithm={policy_loss: gmpo, policy_loss_args: {tau_positive: 1}}", "algorithm.policy_loss = 'gmpo' is built in"),
    ("algorithm.norm_length=9", "algorithm.aggregation = 'seq_mean_token_mean' does not read; it must be null"),
    ("algorithm={advantage: rloo, advantage_eps: 1e-3}", "algorithm.advantage_normalisation = 'none' does not read"),
    ("algorithm={advantage: grpo, advantage_normalisation: batch_rms, unbiased_std: false}", "it must be true"),
    (
        "algorithm.old_policy_kl.coef=2",
        "algorithm.old_policy_kl.coef is 2.0, which algorithm.policy_loss = 'clip' does not read",
    ),
    ("algorithm={policy_loss: kl_penalty, old_policy_kl: {target: 0.01}}", "algorithm.old_policy_kl.target needs"),
    ("algorithm.kl.horizon=10", "algorithm.kl.horizon needs a target"),
    (
        "algorithm.entropy.delta=0.1",
        "algorithm.entropy.delta needs a target that the bonus is steered to: set algorithm.entropy",
    ),
    ("algorithm.entropy.max_coef=0.1", "algorithm.entropy.max_coef needs a target"),
    ("algorithm.entropy={target: 0.3, coef: 2}", "entropy.coef is 2.0; it must be at most algorithm.entropy.max_coef = 1.0"),
    ("algorithm.entropy.top_share=0", "algorithm.entropy.top_share is 0"),
    ("algorithm={entropy: {target: 0.3}, rollout_correction: {mode: bypass}}", "algorithm.entropy.target needs the pass that"),
    ("algorithm={entropy: {top_share: 0.3}, rollout_correction: {mode: bypass}}", "or algorithm.entropy.top_share"),
    (
        "algorithm.positive_nll.threshold=0.5",
        "algorithm.positive_nll.threshold needs a weight: set algorithm.positive_nll.coef",
    ),
    (
        "algorithm={policy_loss: kl_cov, clip_high: 0.3}",
        "algorithm.clip_high is 0.3, which algorithm.policy_loss = 'kl_cov' does",
    ),
    (
        "algorithm={name: vapo, gae_lambda: 0.95}",
        "algorithm.gae_lambda is 0.95, which algorithm.advantage = 'gae' with length_alpha does not read; it must be 1.0",
    ),
    ("reward_model={path: x, step_aggregation: min}", "reward_model.step_aggregation needs"),
]


@pytest.mark.parametrize(("override", "sentence"), NOTHING_READS)
def test_a_constant_that_nothing_reads_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(override)
    assert sentence in str(raised.value)


WRONG_ARGUMENTS = [
    ("{tau_positve: 2}", "policy_loss_args is 'tau_positve', which algorithm.policy_loss = 'sapo' does not take; it must be"),
    ("{tau_positve: 2}", "did you mean 'tau_positive'?"),
    ("{tau_negative: 0}", "algorithm.policy_loss_args.tau_negative is 0; it must be a number above 0"),
    ("{tau_negative: true}", "tau_negative is true; it must be a number above 0"),
    ("{tau_negative: .inf}", "it must be a number above 0"),
    ("{tau_negative: '2'}", "it must be a number above 0"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG_ARGUMENTS)
def test_a_built_in_losss_arguments_are_numbers_that_it_takes(arguments: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config("algorithm.name=sapo", f"algorithm.policy_loss_args={arguments}")
    assert sentence in str(raised.value)
    assert config("algorithm.name=sapo", "algorithm.policy_loss_args={tau_negative: 2}").algorithm.policy_loss == "sapo"


OTHER_ARGUMENTS = [
    (
        "{policy_loss: clip_cov, policy_loss_args: {share: 2}}",
        "policy_loss_args.share is 2; it must be a number above 0 and at most 1",
    ),
    (
        "{policy_loss: clip_cov, policy_loss_args: {coef: 2}}",
        "which algorithm.policy_loss = 'clip_cov' does not take; it must be",
    ),
    (
        "{policy_loss: clip_cov, policy_loss_args: {low: 6}}",
        "args.low is 6; it must be less than algorithm.policy_loss_args.high = 5",
    ),
    (
        "{policy_loss: clip_cov, policy_loss_args: {high: 0.5}}",
        "args.low is 1.0; it must be less than algorithm.policy_loss_args.hi",
    ),
    (
        "{policy_loss: kl_cov, policy_loss_args: {low: 1}}",
        "which algorithm.policy_loss = 'kl_cov' does not take; it must be 'share'",
    ),
    ("{policy_loss: kl_cov, policy_loss_args: {coef: 0}}", "policy_loss_args.coef is 0; it must be a number above 0"),
    (
        "{name: ppo, advantage_args: {critic_lambda: 1.5}}",
        "critic_lambda is 1.5; it must be a number of at least 0 and at most 1",
    ),
    (
        "{name: ppo, advantage_args: {lambda: 1}}",
        "which algorithm.advantage = 'gae' does not take; it must be 'critic_lambda' or",
    ),
    ("{advantage: rloo, advantage_args: {critic_lambda: 1}}", "algorithm.advantage = 'rloo' is built in; it must be {}"),
]


@pytest.mark.parametrize(("section", "sentence"), OTHER_ARGUMENTS)
def test_arguments_are_checked_by_the_bounds_of_each(section: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(f"algorithm={section}")
    assert sentence in str(raised.value)


def test_vapos_arguments_give_way_to_the_users_and_to_another_estimator() -> None:
    plain = config("algorithm.name=vapo").algorithm
    assert plain.advantage_args == {"critic_lambda": 1.0, "length_alpha": 0.05}
    assert (plain.positive_nll.coef, plain.clip_high, plain.kl.coef, plain.aggregation) == (0.1, 0.28, 0.0, "token_mean")
    fixed = config("algorithm={name: vapo, gae_lambda: 0.95, advantage_args: {critic_lambda: 1}}").algorithm
    assert (fixed.gae_lambda, fixed.advantage_args) == (0.95, {"critic_lambda": 1})
    assert config("algorithm={name: vapo, advantage: grpo}").algorithm.advantage_args == {}
    above = config("algorithm={name: vapo, positive_nll: {threshold: 0.5}}").algorithm.positive_nll
    assert (above.coef, above.threshold) == (0.1, 0.5)
    assert config("algorithm={name: vapo, positive_nll: {coef: 0}}").algorithm.positive_nll.coef == 0


def test_constants_are_read_by_whoever_says_so(tmp_path: Any) -> None:
    assert config("algorithm={advantage: reinforce_plus_plus, gamma: 0.9}").algorithm.gamma == 0.9
    (tmp_path / "mine.py").write_text(OWN_LOSS)
    own = config(f"algorithm.advantage={tmp_path / 'mine.py'}:estimator", "algorithm.gamma=0.9", "algorithm.name=ppo")
    assert (own.algorithm.gamma, own.algorithm.gae_lambda) == (0.9, 0.95)


def test_a_presets_constant_is_not_filled_in_where_nothing_reads_it() -> None:
    assert config("algorithm={name: ppo, advantage: reinforce}").algorithm.gae_lambda == 1.0


def test_shaping_of_whole_rewards_is_refused_for_step_rewards() -> None:
    model = ["reward_model={path: x, per_step: true}", "algorithm.advantage=grpo_process"]
    with pytest.raises(ConfigError, match=r"algorithm.shaping.normalise is true, which is for the reward of a response"):
        config(*model, "algorithm.shaping.normalise=true")
    assert config(*model, "algorithm.shaping.length_penalty=0.1").algorithm.shaping.length_penalty == 0.1


ONLINE_DPO = [
    (["algorithm.advantage=gae"], "algorithm.advantage is 'gae', which ranks no responses of a prompt"),
    (["algorithm.advantage=grpo_process", "reward_model={path: x, per_step: true}"], "ranks no responses of a prompt"),
    (["algorithm.aggregation=token_mean"], "algorithm.aggregation is 'token_mean', which weighs tokens of a response"),
    (["algorithm.rollout_correction={mode: tis_token}"], "algorithm.rollout_correction[0].mode is 'tis_token', which corrects"),
    (["algorithm.mini_batches=4", "rollout={prompts_per_step: 2, samples_per_prompt: 4}"], "it must be a multiple of 4 and"),
    (["algorithm.entropy.top_share=0.2"], "algorithm.entropy.top_share is 0.2, which leaves out tokens"),
    (["rollout.top_p=0.9"], "rollout.top_p is 0.9, which samples from fewer tokens"),
    (["algorithm.clip_high=0.3"], "algorithm.clip_high is 0.3"),
    (["algorithm.policy_loss_args={beat: 1}"], "policy_loss_args is 'beat', which algorithm.policy_loss = 'dpo' does not take"),
    (["algorithm.policy_loss_args={beta: 0}"], "algorithm.policy_loss_args.beta is 0"),
    (["rollout.samples_per_prompt=1"], "it must be at least 2"),
]


@pytest.mark.needs_option("online_pairs")
@pytest.mark.parametrize(("overrides", "sentence"), ONLINE_DPO)
def test_what_pairs_cannot_have_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config("algorithm.name=online_dpo", *overrides)
    assert sentence in str(raised.value)


@pytest.mark.needs_option("online_pairs")
def test_online_dpo_loads_a_reference_though_it_has_no_kl_of_its_own() -> None:
    resolved = config("algorithm.name=online_dpo", "algorithm.policy_loss_args={beta: 0.3}", "algorithm.epochs=2")
    assert (resolved.algorithm.policy_loss, resolved.algorithm.kl.coef, resolved.uses_reference) == ("dpo", 0.0, True)
    assert not [doubt for doubt in doubtful_choices(resolved) if "updates" in doubt]
    assert config("algorithm={name: online_dpo, policy_loss: ipo}").algorithm.loss_needs.pairs


OBJECTIVES = [
    ("objective={name: dpo, label_smoothing: 0.1}", "objective.label_smoothing is 0.1, which objective.name = 'dpo' does not"),
    ("objective={name: kto, rpo_alpha: 1}", "objective.rpo_alpha is 1.0"),
    ("objective={name: sft, rpo_alpha: 1}", "objective.rpo_alpha is 1.0"),
    ("objective={name: dft, beta: 1}", "objective.beta is 1.0, which objective.name = 'dft' does not read"),
    ("objective={name: simpo, length_normalised: true}", "it must be false"),
    ("objective={name: dpo, mixture: {ipo: 1}}", "objective.mixture is a section (ipo), which objective.name = 'dpo' does not"),
    ("objective={name: mixture}", "objective.name = 'mixture' needs a pair loss in objective.mixture"),
    ("objective={name: mixture, mixture: {sft: 1}}", "needs a pair loss in objective.mixture"),
    ("objective={name: mixture, mixture: {dpo: 1, sft: 1}, rpo_alpha: 1}", "it must be 0.0: set the weight of sft instead"),
    ("objective={name: mixture, mixture: {dpo: 1}, target_margin: 1}", "objective.name = 'mixture' does not read"),
    ("objective={name: mixture, mixture: {cdpo: 1, bco_pair: 1}}", "needs objective.label_smoothing"),
    ("objective={name: mixture, mixture: {dpo: 0}}", "objective.mixture"),
    ("objective={name: mixture, mixture: {kto: 1}}", "objective.mixture"),
    ("objective={name: reward_model, beta: 0.2}", "objective.beta is 0.2"),
    ("objective={name: dpo, desirable_weight: 2}", "objective.desirable_weight is 2.0"),
    ("objective={name: dpo, aggregation: seq_mean_token_mean}", "it must be token_mean"),
    ("objective.name=cdpo", "objective.name = 'cdpo' needs objective.label_smoothing"),
    ("objective.name=robust_dpo", "objective.name = 'robust_dpo' needs objective.label_smoothing"),
    ("objective={name: orpo, rpo_alpha: 1}", "objective.rpo_alpha is 1.0, which objective.name = 'orpo' does not read"),
    ("objective={name: dpo, target_margin: 1}", "objective.target_margin is 1.0, which objective.name = 'dpo' does not read"),
    ("objective={name: simpo, label_smoothing: 0.1}", "objective.label_smoothing is 0.1"),
    ("objective={name: simpo, target_margin: -1}", "objective.target_margin is -1"),
    ("data.margin_key=m", "data.margin_key needs the loss of a reward model"),
    ("reference.reset_every=2", "reference.reset_every needs a reference model: set objective.name to a loss with a reference"),
    ("reference.reset_share=0.5", "reference.reset_share needs steps after which the reference moves"),
    ("reference.reset_share=0", "reference.reset_share is 0"),
]


@pytest.mark.parametrize(("override", "sentence"), OBJECTIVES)
def test_a_constant_that_the_objective_does_not_read_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        supervised(override)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("name", "beta", "roles"),
    [
        ("dpo", 0.1, ["policy", "reference"]),
        ("robust_dpo", 0.1, ["policy", "reference"]),
        ("simpo", 2.0, ["policy"]),
        ("orpo", 0.1, ["policy"]),
    ],
)
def test_a_loss_without_a_reference_loads_none_and_has_a_beta_of_its_own(name: str, beta: float, roles: list[str]) -> None:
    smoothing = ["objective.label_smoothing=0.1"] if name == "robust_dpo" else []
    resolved = supervised(f"objective.name={name}", *smoothing)
    assert resolved.objective.beta == beta
    assert [role.name for role in resolved.roles] == roles
    assert ("pairs per step", "32") in resolved.batch_rows()
    assert parse_supervised_config(yaml.safe_load(to_yaml(resolved))) == resolved
    assert supervised(f"objective.name={name}", *smoothing, "objective.beta=0.1").objective.beta == 0.1


@pytest.mark.parametrize(
    ("mixture", "roles"),
    [
        ("{dpo: 0.8, bco_pair: 0.2, sft: 1}", ["policy", "reference"]),
        ("{simpo: 1, sft: 0.1}", ["policy"]),
        ("{orpo: 1, apo_zero: 1}", ["policy", "reference"]),
    ],
)
def test_a_mixture_of_pair_losses_reads_what_its_losses_read(mixture: str, roles: list[str]) -> None:
    resolved = supervised(f"objective={{name: mixture, mixture: {mixture}}}")
    assert [role.name for role in resolved.roles] == roles
    assert ("pairs per step", "32") in resolved.batch_rows()
    assert parse_supervised_config(yaml.safe_load(to_yaml(resolved))) == resolved
    if "simpo" in mixture:
        assert supervised(f"objective={{name: mixture, mixture: {mixture}, target_margin: 1}}").objective.target_margin == 1


def test_dft_averages_tokens_as_sft_does() -> None:
    resolved = supervised("objective={name: dft, aggregation: seq_mean_token_mean}")
    assert [role.name for role in resolved.roles] == ["policy"]
    assert ("rows per step", "32") in resolved.batch_rows()


def test_kto_needs_two_rows_to_mismatch() -> None:
    with pytest.raises(ConfigError, match=r"data\.rows_per_step is 1, which leaves objective.name = 'kto' no other row"):
        supervised("objective.name=kto", "data.rows_per_step=1")


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ("{mode: none}", []),
        ("{mode: none, high: 3}", []),
        ("{mode: tis_token}", [("tis_token", 0.0, 2.0)]),
        ("{mode: mis_token, high: 4}", [("mis_token", 0.5, 4.0)]),
        ("[{mode: tis_token, low: 0.1}, {mode: mask_sequence}]", [("tis_token", 0.1, 2.0), ("mask_sequence", 0.999, 1.001)]),
        ("[{mode: mis_sequence}, {mode: reject_sequence}]", [("mis_sequence", 0.1, 10.0), ("reject_sequence", 0.999, 1.001)]),
    ],
)
def test_every_correction_has_bounds_of_its_own(given: str, resolved: list[tuple[str, float, float]]) -> None:
    corrections = config(f"algorithm.rollout_correction={given}").algorithm.rollout_correction
    assert [(one.mode, one.low, one.high) for one in corrections] == resolved


CORRECTIONS = [
    ("{mode: tis_tokn}", "algorithm.rollout_correction[0].mode is 'tis_tokn'"),
    ("{high: 3}", "algorithm.rollout_correction[0].mode is missing"),
    ("{mode: tis_token, hihg: 3}", "algorithm.rollout_correction[0].hihg is not a config field"),
    ("{mode: mis_token, low: 5}", "algorithm.rollout_correction[0].low is 5.0"),
    ("[{mode: tis_token}, {mode: mis_sequence}]", "rollout_correction[1].mode is 'mis_sequence', which is a second importance"),
    ("[{mode: bypass}, {mode: reject_sequence}]", "leaves no log-probs of the trainer to correct for"),
    ("{mode: reject_sequence, normalise: true}", "algorithm.rollout_correction[0].normalise is true"),
    ("3", "algorithm.rollout_correction is 3"),
]


@pytest.mark.parametrize(("given", "sentence"), CORRECTIONS)
def test_corrections_that_cannot_be_are_one_sentence(given: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(f"algorithm.rollout_correction={given}")
    assert sentence in str(raised.value)


def test_a_loss_without_a_ratio_has_nothing_to_take_to_the_engine() -> None:
    with pytest.raises(ConfigError, match=r"rollout_correction\[0\]\.mode is 'bypass', which is for a ratio"):
        config("algorithm.policy_loss=reinforce", "algorithm.rollout_correction.mode=bypass")


@pytest.mark.parametrize(
    ("overrides", "clip"),
    [
        (["algorithm.policy_loss=gspo"], (3e-4, 4e-4)),
        (["algorithm.policy_loss=cispo"], (1.0, 4.0)),
        (["algorithm.name=gmpo"], (0.4, 0.4)),
        (["algorithm.name=gspo", "algorithm.policy_loss=gmpo"], (0.4, 0.4)),
        (["algorithm.name=dapo"], (0.2, 0.28)),
        (["algorithm.name=dapo", "algorithm.policy_loss=dual_clip"], (0.2, 0.28)),
        (["algorithm.name=gspo", "algorithm.policy_loss=clip"], (0.2, 0.2)),
        (["algorithm.name=cispo", "algorithm.policy_loss=reinforce"], (0.2, 0.2)),
        (["algorithm.policy_loss=gspo", "algorithm.clip_high=1e-3"], (3e-4, 1e-3)),
    ],
)
def test_clipping_follows_the_loss(overrides: list[str], clip: tuple[float, float]) -> None:
    algorithm = config(*overrides).algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == clip


NEEDS = {"online_dpo": pytest.mark.needs_option("online_pairs")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in sorted(PRESETS)])
def test_every_preset_is_a_config_without_doubts(name: str) -> None:
    teacher = ["teacher.path=wise"] if "distillation" in PRESETS[name] else []
    resolved = config(f"algorithm.name={name}", *teacher)
    assert doubtful_choices(resolved) == []
    assert parse_config(yaml.safe_load(to_yaml(resolved))) == resolved


DOUBTS = [
    (["rollout.schedule.mode=async"], "rollout.schedule.mode = 'async' trains tokens of older weights"),
    (["rollout.schedule.mode=one_step_off_policy"], "such as {mode: tis_token}"),
    (["algorithm.policy_loss=reinforce", "algorithm.mini_batches=2", "algorithm.epochs=2"], "the first of a step's 4 updates"),
    (
        [
            "rollout.schedule.mode=async",
            "algorithm.rollout_correction.mode=tis_token",
            "rollout.top_p=0.9",
            "rollout.top_k=5",
            "rollout.min_p=0.1",
        ],
        "the tokens that rollout.top_p = 0.9 and rollout.top_k = 5 and rollout.min_p = 0.1 kept are those of older weights",
    ),
    (["algorithm.policy_loss=kl_cov"], "algorithm.policy_loss = 'kl_cov' has no gradient from its penalty in the first of a"),
    (["algorithm.policy_loss=gspo", "algorithm.clip_high=0.2"], "algorithm.clip_high = 0.2 never clips the sequence ratio"),
]


@pytest.mark.parametrize(("overrides", "sentence"), DOUBTS)
def test_a_doubtful_choice_is_one_sentence(overrides: list[str], sentence: str) -> None:
    (found,) = doubtful_choices(config(*overrides))
    assert sentence in found


def test_a_critic_at_its_default_learning_rate_is_told_of_and_one_that_was_set_or_is_not_there_is_not() -> None:
    ppo = ["algorithm.name=ppo", "policy.optimizer.lr=1e-3"]
    (notice,) = notices(config(*ppo))
    assert notice.startswith("critic.optimizer.lr is 1e-06, its default, whatever policy.optimizer.lr is")
    assert notices(config(*ppo, "critic.optimizer.lr=2e-6")) == notices(config()) == []


def test_what_mends_a_doubtful_choice_silences_it() -> None:
    for correction in ("tis_token", "bypass"):
        mended = config("rollout.schedule.mode=async", f"algorithm.rollout_correction.mode={correction}")
        assert doubtful_choices(mended) == []
    assert doubtful_choices(config("algorithm.policy_loss=reinforce")) == []
    assert doubtful_choices(config("rollout.top_p=0.9", "rollout.top_k=5")) == []
    assert doubtful_choices(config("algorithm={policy_loss: kl_cov, mini_batches: 2}")) == []
