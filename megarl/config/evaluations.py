"""Named evaluation sets: their rows, how responses to them are sampled, and what judges these."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from megarl.config.row_template import Template, with_prompt_key
from megarl.config.section import Count, NonNegative, Positive, Section
from megarl.config.sections import RewardConfig
from megarl.config.sources import SourceConfig, held_out_defaults
from megarl.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


class EvaluationConfig(Section):
    """One evaluation set."""

    name: str
    """Name of the set; its figures are `eval/NAME/…`."""
    rows: SourceConfig
    """Rows to evaluate on; generated tasks default to 200 rows from seed 1000000."""
    samples_per_prompt: Positive = 1
    """Number of responses to each prompt, the k of avg@k, pass@k and maj@k."""
    temperature: NonNegative = 0.0
    """Sampling temperature. 0: the likeliest token each time (greedy)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with at least this probability. 1: all tokens."""
    top_k: Count = 0
    """Sample from this many most likely tokens. 0: all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from tokens with at least this share of the likeliest one's probability. 0: all tokens."""
    max_new_tokens: Positive | None = None
    """Maximum length of a response in tokens. null: `rollout.max_new_tokens`."""
    stop: Annotated[tuple[str, ...] | None, Field(strict=False)] = None
    """Texts that end a response. null: `rollout.stop`; []: none."""
    stop_token_ids: Annotated[tuple[int, ...] | None, Field(strict=False)] = None
    """Token ids that end a response, beside the model's own end tokens. null: `rollout.stop_token_ids`; []: none."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)] | None = None
    """Sources of reward that judge this set. null: those of `rewards`."""
    prompt: Template | None = None
    """Template that makes the prompt of several columns of a row. null: `data.prompt`, or with a `prompt_key` none."""
    prompt_key: str | None = None
    """Key of the prompt in a row. null: `data.prompt_key`."""
    answer_key: str | None = None
    """Key of the correct answer in a row. null: `data.answer_key`."""
    source_key: str | None = None
    """Key of a row that names the data source it is from; figures are given for each source, too. null: none."""

    @model_validator(mode="before")
    @classmethod
    def _keep_apart_from_training_rows(cls, tree: Any) -> Any:
        return with_prompt_key(held_out_defaults(tree, "rows"))


def check_rewards(field: str, rewards: Sequence[RewardConfig], *, of_steps: bool) -> None:
    """Refuse bounds of failures where the first failure stops the run, and of an evaluation what only steps read.

    `of_steps`: the sources judge training steps.
    """
    for index, reward in enumerate(rewards):
        if reward.ahead is not None and not of_steps:
            raise ConfigError.of(f"{field}[{index}].ahead", reward.ahead, "an evaluation does not read", allowed="null")
        for name in ("max_error_share", "strict_steps"):
            value, unset = getattr(reward, name), RewardConfig.model_fields[name].default
            if value == unset:
                continue
            if reward.on_error == "stop":
                what = "failures that do not stop the run"
                raise ConfigError.needs_set(
                    f"{field}[{index}].{name}", what, f"{field}[{index}].on_error to zero or drop_group"
                )
            if name == "strict_steps" and not of_steps:
                reason = "an evaluation does not read"
                raise ConfigError.of(f"{field}[{index}].{name}", value, reason, allowed=f"{unset}")


def check_evaluations(sets: Sequence[EvaluationConfig], *, has_rewards: bool, single_turn: bool) -> None:
    """Check sets on their own; `has_rewards`: the run has functions that judge, `single_turn`: episodes are single turns.

    Raises:
        ConfigError: one sentence.
    """
    names = [evaluation.name for evaluation in sets]
    for index, evaluation in enumerate(sets):
        field = f"evaluations[{index}]"
        if not _NAME.fullmatch(evaluation.name):
            raise ConfigError.of(f"{field}.name", evaluation.name, allowed="letters, digits, '_', '-' and '.' only")
        if evaluation.name in names[:index]:
            raise ConfigError.of(f"{field}.name", evaluation.name, "names an earlier set, too", allowed="another name")
        if evaluation.samples_per_prompt > 1 and not evaluation.temperature:
            reason = f"makes the {evaluation.samples_per_prompt} responses to a prompt equal"
            allowed = f"above 0, or {field}.samples_per_prompt 1"
            raise ConfigError.of(f"{field}.temperature", evaluation.temperature, reason, allowed=allowed)
        check_rewards(f"{field}.rewards", evaluation.rewards or (), of_steps=False)
        if not (has_rewards if evaluation.rewards is None else evaluation.rewards):
            raise ConfigError.needs(field, "functions that judge responses", f"set rewards or {field}.rewards")
        if evaluation.max_new_tokens is not None and not single_turn:
            remedy = "remove it, or set rollout.episode.kind to 'single'"
            raise ConfigError.needs(f"{field}.max_new_tokens", "single turns", remedy)
