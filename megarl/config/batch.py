"""Batch arithmetic: from prompts per step to sequences per data-parallel rank, derived once and printed at start.

Pure functions of the config; what cannot be divided evenly is refused with the nearest values that can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.config.layout import closest, divisors
from megarl.config.questions import Questions
from megarl.config.rollout import RolloutConfig
from megarl.errors import ConfigError


@dataclass(frozen=True)
class BatchArithmetic:
    """The numbers that make up one training step."""

    prompts_per_step: int
    samples_per_prompt: int
    mini_batches: int
    data_parallel: int
    longest_sequence_tokens: int
    max_tokens_per_micro_batch: int
    optimizer_steps_per_step: int

    @property
    def sequences_per_step(self) -> int:
        """All responses to a step's prompts."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def sequences_per_rank(self) -> int:
        """Sequences of a mini-batch on each data-parallel rank."""
        return self.sequences_per_step // self.mini_batches // self.data_parallel

    @property
    def micro_batches_per_rank_at_most(self) -> int:
        """The count per mini-batch if every sequence had the full prompt and response length; packing shorter ones needs
        fewer."""
        return math.ceil(self.sequences_per_rank / (self.max_tokens_per_micro_batch // self.longest_sequence_tokens))

    def rows(self) -> list[tuple[str, str]]:
        """(what, how many and from what) in the order in which one follows from the other."""
        sequences, per_mini_batch = self.sequences_per_step, self.sequences_per_step // self.mini_batches
        packs = f"of {self.max_tokens_per_micro_batch} tokens (sequences of up to {self.longest_sequence_tokens})"
        return [
            ("prompts per step", f"{self.prompts_per_step}"),
            ("sequences per step", f"{sequences} = {self.prompts_per_step} x {self.samples_per_prompt}"),
            ("mini-batches", f"{self.mini_batches}"),
            ("sequences per mini-batch", f"{per_mini_batch} = {sequences} / {self.mini_batches}"),
            ("sequences per DP rank", f"{self.sequences_per_rank} = {per_mini_batch} / {self.data_parallel}"),
            ("micro-batches per DP rank", f"at most {self.micro_batches_per_rank_at_most} {packs}"),
            ("optimizer steps per step", f"{self.optimizer_steps_per_step}"),
        ]


def batch_arithmetic(config: Questions) -> BatchArithmetic:
    """Derive what one step of `config`, a run that samples, is made of.

    Raises:
        ConfigError: mini-batches or data-parallel ranks do not divide the sequences, or the longest sequence does not
            fit into a micro-batch; the sentence names the nearest values that do.
    """
    rollout, policy, mini_batches = config.sampling, config.roles[0], config.optimizer_steps_per_step // config.epochs
    assert rollout is not None, "it samples"
    assert policy.layout is not None, "the policy has processes of its own"
    assert policy.trained is not None, "the policy is trained"
    sequences, longest = rollout.prompts_per_step * rollout.samples_per_prompt, config.longest_sequence
    if sequences % mini_batches:
        rule = "does not divide the sequences of a step"
        reason = (
            f"does not divide the {sequences} sequences of a step (rollout.prompts_per_step = {rollout.prompts_per_step} times "
            f"rollout.samples_per_prompt = {rollout.samples_per_prompt})"
        )
        allowed = closest(divisors(sequences), mini_batches)
        raise ConfigError.of("algorithm.mini_batches", mini_batches, reason, allowed=allowed, rule=rule)
    for role in config.roles:
        if role.layout is not None:
            unit = ("mini-batch", mini_batches) if role.trained is not None else ("step", 1)
            _check_even(rollout, f"{role.section or role.name}.layout.dp", role.layout.dp, *unit)
    for role in config.roles:
        pack_tokens = role.trained.max_tokens_per_micro_batch if role.trained is not None else longest
        if pack_tokens < longest:
            field, rule = f"{role.name}.max_tokens_per_micro_batch", "is less than the tokens that one sequence can have"
            sums = "(data.max_prompt_tokens + rollout.max_new_tokens)"
            reason = f"is less than the {longest} tokens that one sequence can have {sums}"
            raise ConfigError.of(field, pack_tokens, reason, allowed=f"at least {longest}", rule=rule)
    return BatchArithmetic(
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        mini_batches=mini_batches,
        data_parallel=policy.layout.dp,
        longest_sequence_tokens=longest,
        max_tokens_per_micro_batch=policy.trained.max_tokens_per_micro_batch,
        optimizer_steps_per_step=config.optimizer_steps_per_step,
    )


def _check_even(rollout: RolloutConfig, field: str, dp: int, of_what: str, mini_batches: int) -> None:
    """Check that so many data-parallel ranks divide the sequences of a step that is cut into `mini_batches`."""
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt // mini_batches
    if sequences % dp == 0:
        return
    unit = mini_batches * dp // math.gcd(rollout.samples_per_prompt, mini_batches * dp)
    above = rollout.prompts_per_step // unit * unit + unit
    prompts = _around(rollout.prompts_per_step, [count for count in (above - unit, above) if count])
    raise ConfigError.of(
        field,
        dp,
        f"does not divide the {sequences} sequences of a {of_what}",
        allowed=f"{closest(divisors(sequences), dp)}, or set rollout.prompts_per_step to {prompts}",
        rule=f"does not divide the sequences of a {of_what}",
    )


def _around(value: int, choices: list[int]) -> str:
    """Return the nearest choices below and above `value`."""
    below = [choice for choice in choices if choice < value][-1:]
    above = [choice for choice in choices if choice > value][:1]
    return " or ".join(map(str, below + above))
