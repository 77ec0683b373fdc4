"""Batch arithmetic: from prompts per step to sequences per data-parallel rank, derived once and printed at start.

Pure functions of the config; what cannot be divided evenly is refused with the nearest values that can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megarl.config.algorithm import AlgorithmConfig
from megarl.config.layout import divisors
from megarl.config.questions import ConfiguredRole
from megarl.config.rollout import RolloutConfig
from megarl.config.sections import CriticConfig, DataConfig, PolicyConfig, ReferenceConfig
from megarl.errors import ConfigError


@dataclass(frozen=True)
class BatchArithmetic:
    """The numbers that make up one training step.

    `micro_batches_per_rank_at_most` is the count per mini-batch if every sequence had the full prompt and response
    length; packing shorter ones needs fewer.
    """

    prompts_per_step: int
    samples_per_prompt: int
    sequences_per_step: int
    mini_batches: int
    sequences_per_mini_batch: int
    data_parallel: int
    sequences_per_rank: int
    longest_sequence_tokens: int
    max_tokens_per_micro_batch: int
    micro_batches_per_rank_at_most: int
    optimizer_steps_per_step: int

    def rows(self) -> list[tuple[str, str]]:
        """(what, how many and from what) in the order in which one follows from the other."""
        return [
            ("prompts per step", f"{self.prompts_per_step}"),
            ("sequences per step", f"{self.sequences_per_step} = {self.prompts_per_step} x {self.samples_per_prompt}"),
            ("mini-batches", f"{self.mini_batches}"),
            (
                "sequences per mini-batch",
                f"{self.sequences_per_mini_batch} = {self.sequences_per_step} / {self.mini_batches}",
            ),
            (
                "sequences per DP rank",
                f"{self.sequences_per_rank} = {self.sequences_per_mini_batch} / {self.data_parallel}",
            ),
            (
                "micro-batches per DP rank",
                f"at most {self.micro_batches_per_rank_at_most} (packs of {self.max_tokens_per_micro_batch} tokens, "
                f"sequences of up to {self.longest_sequence_tokens})",
            ),
            ("optimizer steps per step", f"{self.optimizer_steps_per_step}"),
        ]

    def table(self) -> str:
        """The rows as aligned plain text, one a line."""
        width = max(len(what) for what, _ in self.rows())
        return "\n".join(f"{what:<{width}}  {how_many}" for what, how_many in self.rows())


class SampledRun(Protocol):
    """The part of a `Config` that batch arithmetic reads."""

    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def algorithm(self) -> AlgorithmConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def policy(self) -> PolicyConfig: ...
    @property
    def critic(self) -> CriticConfig: ...
    @property
    def reference(self) -> ReferenceConfig: ...
    @property
    def roles(self) -> tuple[ConfiguredRole, ...]: ...
    @property
    def uses_critic(self) -> bool: ...


def batch_arithmetic(config: SampledRun) -> BatchArithmetic:
    """Derive what one step of `config` is made of.

    Raises:
        ConfigError: mini-batches or data-parallel ranks do not divide the sequences, or the longest sequence does not
            fit into a micro-batch; the sentence names the nearest values that do.
    """
    rollout, algorithm = config.rollout, config.algorithm
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    if sequences % algorithm.mini_batches:
        raise ConfigError.of(
            "algorithm.mini_batches",
            algorithm.mini_batches,
            f"does not divide the {sequences} sequences of a step (rollout.prompts_per_step = {rollout.prompts_per_step} times "
            f"rollout.samples_per_prompt = {rollout.samples_per_prompt})",
            allowed=_around(algorithm.mini_batches, divisors(sequences)),
            rule="does not divide the sequences of a step",
        )
    per_mini_batch = sequences // algorithm.mini_batches
    for role, dp in _trained_roles(config):
        _check_even(config, f"{role}.layout.dp", dp, per_mini_batch, "mini-batch", algorithm.mini_batches)
    for role, dp in _scoring_roles(config):
        _check_even(config, f"{role}.layout.dp", dp, sequences, "step", 1)
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    pack_tokens = config.policy.max_tokens_per_micro_batch
    _check_fits("policy", pack_tokens, longest)
    if config.uses_critic:
        _check_fits("critic", config.critic.max_tokens_per_micro_batch, longest)
    per_rank = per_mini_batch // config.policy.layout.dp
    return BatchArithmetic(
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        sequences_per_step=sequences,
        mini_batches=algorithm.mini_batches,
        sequences_per_mini_batch=per_mini_batch,
        data_parallel=config.policy.layout.dp,
        sequences_per_rank=per_rank,
        longest_sequence_tokens=longest,
        max_tokens_per_micro_batch=pack_tokens,
        micro_batches_per_rank_at_most=math.ceil(per_rank / (pack_tokens // longest)),
        optimizer_steps_per_step=algorithm.mini_batches * algorithm.epochs,
    )


def _trained_roles(config: SampledRun) -> list[tuple[str, int]]:
    critic = [("critic", config.critic.layout.dp)] if config.uses_critic else []
    return [("policy", config.policy.layout.dp), *critic]


def _scoring_roles(config: SampledRun) -> list[tuple[str, int]]:
    frozen = (role for role in config.roles if role.trained is None)
    return [(role.section or role.name, role.layout.dp) for role in frozen if role.layout is not None]


def _check_even(config: SampledRun, field: str, dp: int, sequences: int, of_what: str, mini_batches: int) -> None:
    if sequences % dp == 0:
        return
    rollout = config.rollout
    unit = mini_batches * dp // math.gcd(rollout.samples_per_prompt, mini_batches * dp)
    prompts = _around_by(rollout.prompts_per_step, lambda count: count % unit == 0)
    raise ConfigError.of(
        field,
        dp,
        f"does not divide the {sequences} sequences of a {of_what}",
        allowed=f"{_around(dp, divisors(sequences))}, or set rollout.prompts_per_step to {prompts}",
        rule=f"does not divide the sequences of a {of_what}",
    )


def _check_fits(role: str, pack_tokens: int, longest: int) -> None:
    if pack_tokens < longest:
        raise ConfigError.of(
            f"{role}.max_tokens_per_micro_batch",
            pack_tokens,
            f"is less than the {longest} tokens that one sequence can have (data.max_prompt_tokens + rollout.max_new_tokens)",
            allowed=f"at least {longest}",
            rule="is less than the tokens that one sequence can have",
        )


def _around(value: int, choices: list[int]) -> str:
    """The nearest choices below and above `value`."""
    below = [choice for choice in choices if choice < value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return " or ".join(map(str, below + above))


def _around_by(value: int, fits: Callable[[int], bool]) -> str:
    below = next((count for count in range(value - 1, 0, -1) if fits(count)), None)
    above = next(count for count in range(value + 1, 10**9) if fits(count))
    return f"{below} or {above}" if below else f"{above}"
