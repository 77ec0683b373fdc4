"""What a supervised, reward-model or preference run is: the sections it shares with reinforcement learning, and its own.

The same rules as in `schema.py`: frozen, strict, one line under each leaf.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megarl.config import checks
from megarl.config.fp8 import check_fp8
from megarl.config.profile_config import ProfileConfig, check_profile
from megarl.config.schema import (
    ModelConfig,
    PolicyConfig,
    ReferenceConfig,
    ResourcesConfig,
    RunConfig,
    SourceConfig,
    TrackersConfig,
)
from megarl.config.section import NonNegative, Positive, Section
from megarl.errors import ConfigError

PREFERENCE_LOSSES = ("dpo", "cdpo", "ipo", "kto")
PAIR_LOSSES = ("dpo", "cdpo", "ipo", "reward_model")


class ObjectiveConfig(Section):
    """What is minimised (METHODS section 7)."""

    name: Literal["sft", "reward_model", "process_reward_model", "dpo", "cdpo", "ipo", "kto"] = "sft"
    """Cross-entropy on responses, a scalar head on pairs or on steps, or a preference loss against the reference."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the reference in the preference losses."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs assumed to be the wrong way round (cdpo)."""
    length_normalised: bool = False
    """Divide log-ratios by the response's length (ipo)."""
    rpo_alpha: NonNegative = 0.0
    """Weight of the chosen response's mean cross-entropy, added to a pair loss (iterative RPO)."""
    desirable_weight: NonNegative = 1.0
    """Weight of desirable responses (kto)."""
    undesirable_weight: NonNegative = 1.0
    """Weight of undesirable responses (kto)."""
    aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """How token losses become one number (sft)."""


class SupervisedDataConfig(Section):
    """Rows with responses, pairs of responses, or judged steps."""

    train: SourceConfig
    """Rows to train on."""
    eval: SourceConfig | None = None
    """Held-out rows; null: no evaluation."""
    rows_per_step: Positive = 32
    """Rows (for pairs: pairs) per optimizer step, over all data-parallel ranks."""
    prompt_key: str = "prompt"
    """Key of the prompt: text, or a list of chat messages."""
    response_key: str = "response"
    """Key of the response (sft, kto)."""
    messages_key: str | None = None
    """Key of a whole conversation, whose assistant turns are trained on (sft); null: prompt and response."""
    chosen_key: str = "chosen"
    """Key of the better response of a pair."""
    rejected_key: str = "rejected"
    """Key of the worse response of a pair."""
    label_key: str = "label"
    """Key of the label: true or false (kto), one number per step (process_reward_model)."""
    steps_key: str = "steps"
    """Key of the list of steps (process_reward_model)."""
    equal_pairs: Literal["error", "drop"] = "error"
    """What a pair with two equal sides is: an error, or a row that is dropped and counted."""
    system_prompt: str | None = None
    """System message put before every prompt; null: none."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Apply the tokenizer's chat template: where it has one, always (its absence is an error), or never."""
    max_tokens: Positive = 1024
    """Longest prompt with response, in tokens."""
    overlong: Literal["error", "drop"] = "error"
    """What a longer row is: an error, or a row that is dropped and counted."""


class SupervisedConfig(Section):
    """A run that trains on given responses: `megarl sft`, `megarl reward-model` and `megarl preference`."""

    run: RunConfig = RunConfig()
    """How long the run is, where it writes, and when it saves and evaluates."""
    model: ModelConfig
    """The model that training starts from, and how it is computed."""
    policy: PolicyConfig = PolicyConfig()
    """The model being trained, with or without a scalar head."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model that preference losses compare with."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is minimised."""
    data: SupervisedDataConfig
    """Rows to train on and to evaluate on."""
    resources: ResourcesConfig = ResourcesConfig()
    """Where processes run."""
    trackers: TrackersConfig = TrackersConfig()
    """Where metrics go besides `metrics.jsonl`."""
    profile: ProfileConfig = ProfileConfig()
    """Steps that torch's profiler records."""

    @model_validator(mode="after")
    def _fields_agree(self) -> SupervisedConfig:
        checks.check_source("data.train", self.data.train)
        if self.data.eval is not None:
            checks.check_source("data.eval", self.data.eval)
        longest = self.data.max_tokens * (2 if self.objective.name in PAIR_LOSSES else 1)
        if self.policy.max_tokens_per_micro_batch < longest:
            raise ConfigError(
                f"policy.max_tokens_per_micro_batch is {self.policy.max_tokens_per_micro_batch}, but one row may have "
                f"{longest} tokens (data.max_tokens, twice for a pair); it may be {longest} or more"
            )
        if self.data.rows_per_step % self.policy.layout.dp:
            raise ConfigError(
                f"policy.layout.dp is {self.policy.layout.dp}, but it must divide data.rows_per_step = "
                f"{self.data.rows_per_step}"
            )
        checks.check_run(self.run, evaluates=self.data.eval is not None)
        check_profile(self.profile, self.run.steps, [self.policy.layout])
        checks.check_offload(self.model, {"policy": self.policy}, valued=("policy",) if self.has_value_head else ())
        check_fp8(self.model, trained={"policy": self.policy}, frozen=["the reference"] if self.uses_reference else [])
        if self.reference.reset_every:
            raise ConfigError("reference.reset_every is for reinforcement learning; it may be 0")
        return self

    @property
    def uses_reference(self) -> bool:
        """Whether the loss compares with a frozen model."""
        return self.objective.name in PREFERENCE_LOSSES

    @property
    def has_value_head(self) -> bool:
        """Whether the trained model scores instead of predicting tokens."""
        return self.objective.name in ("reward_model", "process_reward_model")

    def batch_rows(self) -> list[tuple[str, str]]:
        """(what, how many) of one training step, as it is printed before the run starts."""
        dp, rows = self.policy.layout.dp, self.data.rows_per_step
        of_each = {"dpo": "pairs", "cdpo": "pairs", "ipo": "pairs", "reward_model": "pairs"}.get(self.objective.name, "rows")
        return [
            (f"{of_each} per step", f"{rows}"),
            (f"{of_each} per DP rank", f"{rows // dp} = {rows} / {dp}"),
            ("tokens per micro-batch", f"at most {self.policy.max_tokens_per_micro_batch}"),
        ]

    @property
    def run_folder(self) -> str:
        """`<run.folder>/<run.name>`."""
        return f"{self.run.folder}/{self.run.name}"
