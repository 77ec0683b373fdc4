"""Checks of the section `algorithm` against itself and the rest of the config: one sentence per contradiction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.algorithms.catalogue import COVARIANCE_BOUNDS, ESTIMATORS, LOSS_NEEDS, WEIGHTS, Argument
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.estimator_checks import check_estimator
from megarl.config.schema import Config
from megarl.errors import ConfigError, describe_value
from megarl.option_list import functions, part


def check_algorithm(config: Config) -> None:
    """Raise ConfigError for the first pair of fields that contradict each other."""
    algorithm, needed = config.algorithm, config.algorithm.estimator_needs
    if algorithm.advantage in ESTIMATORS:
        _check_arguments("advantage", algorithm.advantage, algorithm.advantage_args, needed.arguments)
    if algorithm.policy_loss in LOSS_NEEDS:
        of_loss = algorithm.loss_needs.choice + algorithm.loss_needs.arguments
        _check_arguments("policy_loss", algorithm.policy_loss, algorithm.policy_loss_args, of_loss)
    low, high = (
        algorithm.policy_loss_args.get(name, bound) for name, bound in zip(("low", "high"), COVARIANCE_BOUNDS, strict=True)
    )
    if algorithm.loss_needs.choice and low >= high:
        allowed = f"less than algorithm.policy_loss_args.high = {high}"
        raise ConfigError.of("algorithm.policy_loss_args.low", low, allowed=allowed)
    check_estimator(config)
    if algorithm.advantage_normalisation.startswith("group") and config.rollout.samples_per_prompt < 2:
        reason = "compares advantages in groups, and rollout.samples_per_prompt = 1 gives a group one response"
        raise config.refusal("algorithm.advantage_normalisation", reason, allowed="'none', 'batch' or 'batch_rms'")
    _check_kl(config)
    _check_unread(config)
    if algorithm.loss_needs.pairs:
        part("online_pairs", "checks", f"algorithm.policy_loss = '{algorithm.policy_loss}'").check_pairs(config)
    _check_correction(config)
    _check_entropy(config)
    if algorithm.truncated_responses == "bootstrap" and not needed.values:
        reason = f"needs the values of a critic, and algorithm.advantage = '{algorithm.advantage}' has none"
        allowed = "'keep', 'mask' or 'exclude', or set algorithm.advantage to one that needs values, such as 'gae'"
        raise config.refusal("algorithm.truncated_responses", reason, allowed=allowed)
    if algorithm.shaping.overlong_tokens > config.rollout.max_new_tokens:
        allowed = f"at most rollout.max_new_tokens = {config.rollout.max_new_tokens}"
        raise config.refusal("algorithm.shaping.overlong_tokens", allowed=allowed)
    if algorithm.clip_low >= 1 and algorithm.loss_needs.lower_bound:
        reason = f"leaves algorithm.policy_loss = '{algorithm.policy_loss}' no lower bound"
        raise config.refusal("algorithm.clip_low", reason, allowed="at least 0 and less than 1")
    if config.critic.warmup_steps and not config.uses_critic:
        reason = f"needs a critic, and algorithm.advantage = '{algorithm.advantage}' trains none"
        allowed = "0, or set algorithm.advantage to one that needs values, such as 'gae'"
        raise config.refusal("critic.warmup_steps", reason, allowed=allowed)


def _check_arguments(what: str, name: str, arguments: Mapping[str, Any], known: tuple[Argument, ...]) -> None:
    """Check the arguments of the built-in estimator or loss `name`: each of a name that it takes and a value that it allows."""
    field, by_name = f"algorithm.{what}_args", {param.name: param for param in known}
    if arguments and not known:
        reason = f"is for a function of your own, and algorithm.{what} = '{name}' is built in"
        raise ConfigError.of(field, arguments, reason, allowed="{}")
    for argument, value in arguments.items():
        if argument not in by_name:
            raise ConfigError.of(field, argument, f"algorithm.{what} = '{name}' does not take", choices=tuple(by_name))
        if not by_name[argument].allows(value):
            raise ConfigError.of(f"{field}.{argument}", value, allowed=by_name[argument].allowed)
    for param in known:
        if param.required and param.name not in arguments:
            raise ConfigError.needs(f"algorithm.{what} = '{name}'", f"{field}.{param.name}", f"set it to {param.allowed}")


def _check_entropy(config: Config) -> None:
    algorithm, entropy = config.algorithm, config.algorithm.entropy
    if entropy.target is None:
        for field in ("delta", "max_coef"):
            if getattr(entropy, field) != getattr(AlgorithmConfig().entropy, field):
                what = "a target that the bonus is steered to"
                raise ConfigError.needs_set(f"algorithm.entropy.{field}", what, "algorithm.entropy.target")
    elif entropy.coef > entropy.max_coef:
        allowed = f"at most algorithm.entropy.max_coef = {entropy.max_coef}"
        raise config.refusal("algorithm.entropy.coef", allowed=allowed)
    if entropy.reads_pass and algorithm.bypasses_old_log_probs:
        field = "target" if entropy.target is not None else "top_share"
        remedy = f"remove the correction 'bypass', or algorithm.entropy.{field}"
        raise ConfigError.needs(f"algorithm.entropy.{field}", "the pass that the correction 'bypass' leaves out", remedy)
    if algorithm.positive_nll.threshold and not algorithm.positive_nll.coef:
        raise ConfigError.needs_set("algorithm.positive_nll.threshold", "a weight", "algorithm.positive_nll.coef")


def _check_correction(config: Config) -> None:
    algorithm, field = config.algorithm, "algorithm.rollout_correction"
    corrections = algorithm.rollout_correction
    for number, correction in enumerate(corrections):
        at = f"{field}[{number}]"
        if correction.mode == "bypass":
            in_reward = algorithm.kl.coef > 0 and algorithm.kl.apply_to == "reward"
            in_advantage = any(adds(config) for adds in functions("questions", "adds_to_advantages"))
            if not (algorithm.loss_needs.ratio or in_reward or in_advantage):
                reason = f"is for a ratio, and algorithm.policy_loss = '{algorithm.policy_loss}' has none"
                raise config.refusal(f"{at}.mode", reason, allowed="another correction, or none")
            if algorithm.estimator_needs.reads_policy:
                reason = f"leaves out the pass that algorithm.advantage = '{algorithm.advantage}' needs"
                raise config.refusal(f"{at}.mode", reason, allowed="another correction, or none")
            if len(corrections) > 1:
                reason = "leaves no log-probs of the trainer to correct for"
                raise config.refusal(f"{at}.mode", reason, allowed="the only correction")
        elif correction.low >= correction.high:
            raise config.refusal(f"{at}.low", allowed=f"less than {at}.high = {correction.high}")
        if correction.normalise and correction.mode not in WEIGHTS:
            reason = f"is for importance weights, which mode = '{correction.mode}' has not"
            raise config.refusal(f"{at}.normalise", reason, allowed="false")
    weights = [number for number, correction in enumerate(corrections) if correction.mode in WEIGHTS]
    if len(weights) > 1:
        other, reason = corrections[weights[0]].mode, "is a second importance weight of the same tokens"
        allowed = f"'mask_sequence' or 'reject_sequence' beside '{other}'"
        raise config.refusal(f"{field}[{weights[1]}].mode", reason, allowed=allowed)


def _check_unread(config: Config) -> None:
    """Refuse a constant that is not at its default where nothing reads it."""
    algorithm, default = config.algorithm, AlgorithmConfig()
    aggregation = f"algorithm.aggregation = '{algorithm.aggregation}'"
    estimator = f"algorithm.advantage = '{algorithm.advantage}'"
    normalisation = algorithm.advantage_normalisation
    unnormalised = f"{estimator} with algorithm.advantage_normalisation = '{normalisation}'"
    loss = f"algorithm.policy_loss = '{algorithm.policy_loss}'"
    of_estimator, of_loss = algorithm.estimator_needs.settings, algorithm.loss_needs.settings
    by_length = algorithm.advantage in ESTIMATORS and "length_alpha" in algorithm.advantage_args
    unread = dict(zip(("clip_low", "clip_high"), algorithm.loss_needs.clip, strict=True))
    for field, is_read, reader in (
        ("gamma", "gamma" in of_estimator, estimator),
        ("gae_lambda", "lam" in of_estimator and not by_length, f"{estimator} with length_alpha" if by_length else estimator),
        ("advantage_eps", "eps" in of_estimator or normalisation != "none", unnormalised),
        ("unbiased_std", "unbiased" in of_estimator or normalisation in ("batch", "group"), unnormalised),
        ("clip_low", "clip_low" in of_loss, loss),
        ("clip_high", "clip_high" in of_loss, loss),
        ("dual_clip", "dual_clip" in of_loss, loss),
        ("norm_length", algorithm.aggregation == "seq_mean_token_sum_norm", aggregation),
    ):
        unset = unread.get(field, getattr(default, field))
        if not is_read and getattr(algorithm, field) != unset:
            raise config.refusal(f"algorithm.{field}", f"{reader} does not read", allowed=describe_value(unset))
    old_kl = algorithm.old_policy_kl
    if "kl_coef" not in of_loss and old_kl.coef != default.old_policy_kl.coef:
        raise config.refusal("algorithm.old_policy_kl.coef", f"{loss} does not read", allowed="1.0")
    if old_kl.target is not None and ("kl_coef" not in of_loss or config.optimizer_steps_per_step < 2 or not old_kl.coef):
        what = "algorithm.policy_loss = 'kl_penalty', a coefficient above 0 and several updates in a step"
        setting = "algorithm.policy_loss, algorithm.old_policy_kl.coef and algorithm.mini_batches or algorithm.epochs"
        raise ConfigError.needs_set("algorithm.old_policy_kl.target", what, setting)
    if algorithm.kl.target is None and algorithm.kl.horizon != default.kl.horizon:
        what = "a target that the coefficient is steered to"
        raise ConfigError.needs_set("algorithm.kl.horizon", what, "algorithm.kl.target")


def _check_kl(config: Config) -> None:
    kl, advantage = config.algorithm.kl, config.algorithm.advantage
    in_reward = kl.coef > 0 and kl.apply_to == "reward"
    if in_reward and not config.algorithm.estimator_needs.token_penalty:
        reason = f"penalises each token, which algorithm.advantage = '{advantage}' has no place for"
        raise config.refusal("algorithm.kl.apply_to", reason, allowed="'loss', or set algorithm.kl.coef to 0")
    if in_reward and kl.estimator != "k1":
        reason = "is no penalty in the reward: its mean gradient vanishes where the policy is the reference"
        raise config.refusal("algorithm.kl.estimator", reason, allowed="'k1' with algorithm.kl.apply_to = 'reward'")
    if kl.coef and kl.apply_to == "loss" and kl.estimator == "k1" and not kl.unbiased:
        allowed = "'k2' or 'k3', or set algorithm.kl.unbiased or algorithm.kl.apply_to = 'reward'"
        raise config.refusal("algorithm.kl.estimator", "is no penalty in the loss: its mean gradient is 0", allowed=allowed)
    if kl.target is not None and not in_reward:
        setting = "algorithm.kl.apply_to to 'reward' and algorithm.kl.coef above 0"
        raise ConfigError.needs_set("algorithm.kl.target", "a KL penalty in the reward", setting)
    if kl.unbiased and kl.apply_to != "loss":
        setting = "algorithm.kl.apply_to to 'loss'"
        raise ConfigError.needs_set("algorithm.kl.unbiased", "the KL penalty in the loss", setting)
