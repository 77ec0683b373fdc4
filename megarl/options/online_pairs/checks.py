"""Checks of policy losses that compare two responses of a prompt: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.errors import ConfigError


def check_pairs(config: Config) -> None:
    """Raise ConfigError for what a loss that compares two responses of a prompt cannot have."""
    algorithm, loss = config.algorithm, f"algorithm.policy_loss = '{config.algorithm.policy_loss}'"
    needed = algorithm.estimator_needs
    if not (needed.group and needed.per_response):
        reason = f"ranks no responses of a prompt, which {loss} takes the best and the worst of"
        raise ConfigError.of(
            "algorithm.advantage", algorithm.advantage, reason, allowed="'dr_grpo', 'grpo', 'rloo', 'opo' or 'gpg'"
        )
    if algorithm.aggregation != "seq_mean_token_sum":
        reason = f"weighs tokens of a response by its length, and {loss} is a mean over pairs"
        raise ConfigError.of("algorithm.aggregation", algorithm.aggregation, reason, allowed="'seq_mean_token_sum'")
    if algorithm.rollout_correction:
        reason = f"corrects single responses by a ratio, and {loss} reads none"
        raise ConfigError.of(
            "algorithm.rollout_correction[0].mode", algorithm.rollout_correction[0].mode, reason, allowed="'none'"
        )
    if algorithm.entropy.top_share != 1:
        reason = f"leaves out tokens, and {loss} compares whole responses"
        raise ConfigError.of("algorithm.entropy.top_share", algorithm.entropy.top_share, reason, allowed="1.0")
    for limit, value in config.rollout.sampling_limits.items():
        reason = f"samples from fewer tokens than {loss} compares log-probs over"
        raise ConfigError.of(f"rollout.{limit}", value, reason, allowed=str(type(config.rollout).model_fields[limit].default))
    share, prompts = algorithm.mini_batches * config.policy.layout.dp, config.rollout.prompts_per_step
    if prompts % algorithm.mini_batches or prompts < share:
        reason = f"gives {loss} one pair each, which algorithm.mini_batches and policy.layout.dp do not share"
        allowed = f"a multiple of {algorithm.mini_batches} and at least {share}"
        raise ConfigError.of("rollout.prompts_per_step", prompts, reason, allowed=allowed)
