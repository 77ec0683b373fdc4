"""The config of a supervised, reward-model or preference run: the sections it shares with reinforcement learning, and its
own.  The same rules as in `schema.py`: frozen, strict, one line under each field."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from megarl.config.option_sections import with_options
from megarl.config.profile import ProfileConfig
from megarl.config.questions import ConfiguredRole, Questions
from megarl.config.section import NonNegative, Positive, Section, TemplateChoice
from megarl.config.sections import ModelConfig, PictureFields, PolicyConfig, ReferenceConfig, ResourcesConfig
from megarl.config.sources import SourceConfig

PAIR_PREFERENCES = ("dpo", "cdpo", "robust_dpo", "ipo", "apo_zero", "apo_down", "bco_pair", "simpo", "orpo")
LABELLED_LOSSES = ("kto", "bco")
PREFERENCE_LOSSES = (*PAIR_PREFERENCES, *LABELLED_LOSSES)
PAIR_LOSSES = (*PAIR_PREFERENCES, "mixture", "reward_model")
TOKEN_LOSSES = ("sft", "dft")
SHIFTED_LOSSES = ("bco_pair", "bco")
"""The losses that compare rewards with the mean of those of earlier steps."""
REFERENCE_FREE = ("simpo", "orpo")
"""The preference losses that compare with no reference, so none is loaded."""
SIMPO_BETA = 2.0
"""`objective.beta` of `simpo` if the config does not say: mean log-probs are smaller than the sums of the other losses."""
OBJECTIVE_FIELDS: dict[str, tuple[str, ...]] = {
    "beta": PREFERENCE_LOSSES,
    "label_smoothing": ("cdpo", "robust_dpo"),
    "target_margin": ("simpo",),
    "length_normalised": tuple(name for name in PAIR_PREFERENCES if name not in REFERENCE_FREE),
    "rpo_alpha": tuple(name for name in PAIR_PREFERENCES if name != "orpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "aggregation": TOKEN_LOSSES,
}
"""By field of `objective`, the losses that read it."""


class ObjectiveConfig(Section):
    """The loss (docs/methods.md#objectives)."""

    name: Literal[
        "sft", "dft", "reward_model", "process_reward_model", "dpo", "cdpo", "robust_dpo", "ipo", "apo_zero", "apo_down",
        "bco_pair", "simpo", "orpo", "mixture", "kto", "bco"
    ] = "sft"  # fmt: skip
    """`sft`: cross-entropy on responses. `dft`: the same, weighted by probability. `reward_model`: scalar head on pairs.
    `process_reward_model`: scalar head on steps. The others: preference losses."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Beta of the preference losses: how strongly the policy is kept near the reference (simpo: scale of the reward; orpo:
    weight of the odds ratio). Default: 0.1, and 2.0 for simpo."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels (cdpo, robust_dpo)."""
    target_margin: NonNegative = 0.5
    """Gamma: by how much the chosen response's reward should exceed the other one's (simpo)."""
    length_normalised: bool = False
    """Divide log-ratios by the length of the response (pair losses with a reference)."""
    rpo_alpha: NonNegative = 0.0
    """Weight of the chosen response's mean cross-entropy, added to a pair loss (iterative RPO)."""
    mixture: dict[
        Literal["dpo", "cdpo", "robust_dpo", "ipo", "apo_zero", "apo_down", "bco_pair", "simpo", "orpo", "sft"],
        Annotated[float, Field(gt=0)],
    ] = Field(default_factory=dict)
    """Weights of the losses whose sum is minimised (mixture): pair losses by name, and `sft`, the mean cross-entropy of the
    chosen response."""
    desirable_weight: NonNegative = 1.0
    """Weight of desirable responses (kto)."""
    undesirable_weight: NonNegative = 1.0
    """Weight of undesirable responses (kto)."""
    aggregation: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """How token losses are averaged into one number (sft, dft)."""

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the losses that are computed: of a mixture its parts."""
        return (*self.mixture,) if self.name == "mixture" else (self.name,)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_name(cls, tree: Any) -> Any:
        return {"beta": SIMPO_BETA} | tree if isinstance(tree, dict) and tree.get("name") == "simpo" else tree


class SupervisedFields(Section):
    """Sources of rows with responses, and the meaning of their keys."""

    train: SourceConfig
    """Rows to train on."""
    eval: SourceConfig | None = None
    """Rows to evaluate on. null: no evaluation."""
    rows_per_step: Positive = 32
    """Number of rows (or pairs) per optimizer step, over all data-parallel ranks."""
    prompt_key: str = "prompt"
    """Key of the prompt in a row, text or a list of chat messages. Keys here may be dotted: `a.b` is key `b` inside `a`."""
    response_key: str = "response"
    """Key of the response (sft, dft, kto, bco): text, or a list of chat messages that begins with the assistant's."""
    messages_key: str | None = None
    """Key of a whole conversation; its assistant turns are trained on (sft, dft), or the last one (kto, bco). null: prompt and
    response; in rows without a response `messages` or `conversations`."""
    turns: Literal["together", "each", "last"] = "together"
    """Samples of a conversation (sft, dft): one with all its assistant turns `together`, one for `each`, behind the prompt that
    it has in generation, or the `last` turn alone."""
    tools_key: str = "tools"
    """Key of the JSON schemas (or their JSON text) of tools that the conversation may call; rows may lack it."""
    chosen_key: str = "chosen"
    """Key of the better response of a pair."""
    rejected_key: str = "rejected"
    """Key of the worse response of a pair."""
    label_key: str = "label"
    """Key of the label: true, false, 1 or 0 (kto, bco), one number per step (process_reward_model)."""
    steps_key: str = "steps"
    """Key of the list of steps (process_reward_model)."""
    margin_key: str | None = None
    """Key of the margin of a pair, a number of at least 0: by how much the chosen score should be above the other one
    (reward_model). null: no margin."""
    equal_pairs: Literal["error", "drop"] = "error"
    """What to do with pairs whose two sides are equal: stop with an `error`, or `drop` and count them."""
    system_prompt: str | None = None
    """System message before every prompt. null: none."""
    chat_template: TemplateChoice = "auto"
    """Apply the tokenizer's chat template. `auto`: if it has one. `always`: fail if it has none. `never`: plain text. A path
    that ends in `.jinja`: the template in that file in its place."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Options of the chat template, such as `enable_thinking: false`; a row's own `template_args` go before them."""
    ignore_fields: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Keys of messages, such as `name` or `reasoning_content`, that the chat template may leave out; `tools`: those of rows."""
    max_tokens: Positive = 1024
    """Maximum length of prompt and response together, in tokens."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with longer rows: stop with an `error`, or `drop` and count them."""


@with_options
class SupervisedDataConfig(PictureFields, SupervisedFields):  # the last base's fields come first
    """Rows with responses, pairs of responses, or judged steps."""


@with_options
class SupervisedConfig(Questions):
    """A run that trains on given responses: SFT, reward models, preferences. The section `objective` tells it from `Config`."""

    trainer: ClassVar = "supervised"

    model: ModelConfig
    """The model that training starts from, and how it is computed."""
    policy: PolicyConfig = PolicyConfig()
    """The model being trained, with or without a scalar head."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen reference model of preference losses."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss."""
    data: SupervisedDataConfig
    """Rows to train on and to evaluate on."""
    resources: ResourcesConfig = ResourcesConfig()
    """Where processes run."""
    profile: ProfileConfig = ProfileConfig()
    """Steps that torch's profiler records."""

    @property
    def uses_reference(self) -> bool:
        """Return whether the loss compares with a frozen model."""
        return any(name in PREFERENCE_LOSSES and name not in REFERENCE_FREE for name in self.objective.losses)

    @property
    def has_value_head(self) -> bool:
        """Return whether the trained model scores instead of predicting tokens."""
        return self.objective.name in ("reward_model", "process_reward_model")

    def batch_rows(self) -> list[tuple[str, str]]:
        """(what, how many) of one training step, as it is printed before the run starts."""
        dp, rows = self.policy.layout.dp, self.data.rows_per_step
        of_each = "pairs" if self.objective.name in PAIR_LOSSES else "rows"
        return [
            (f"{of_each} per step", f"{rows}"),
            (f"{of_each} per DP rank", f"{rows // dp} = {rows} / {dp}"),
            ("tokens per micro-batch", f"at most {self.policy.max_tokens_per_micro_batch}"),
        ]

    @property
    def roles(self) -> tuple[ConfiguredRole, ...]:
        """The model that is trained, and the reference of a preference loss."""
        folder, reference = self.model.path, self.reference
        policy = ConfiguredRole("policy", folder, "model.path", self.policy.layout, self.policy, self.has_value_head)
        if not self.uses_reference:
            return (policy,)
        return policy, ConfiguredRole("reference", reference.path or folder, "reference.path", reference.layout, None)

    @property
    def model_folders(self) -> dict[str, str]:
        """The model's, and the reference's if one is given."""
        reference = {"reference.path": self.reference.path} if self.reference.path is not None else {}
        return {"model.path": self.model.path, **reference}

    @property
    def sampling(self) -> None:
        """None: responses are given."""
        return None

    @property
    def trains_by(self) -> str:
        """The objective's name."""
        return self.objective.name

    @property
    def longest_parts(self) -> tuple[int, int]:
        """`data.max_tokens` bounds both together."""
        return self.data.max_tokens // 2, self.data.max_tokens - self.data.max_tokens // 2

    @property
    def sequences_per_step(self) -> int:
        """`data.rows_per_step`."""
        return self.data.rows_per_step

    @property
    def needs_ray(self) -> bool:
        """Only for a reference in processes of its own: torchrun's are all the policy's."""
        return "reference" in self.layouts

    def metric_prefix(self, role: str) -> str:
        """`train`, as only one role is trained."""
        return "train"
