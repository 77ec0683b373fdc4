"""The sections `teacher` and `algorithm.distillation`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.layout_section import LayoutConfig
from megarl.config.option_sections import AddedField
from megarl.config.section import Fraction, NonNegative, Positive, Section


class DistillationConfig(Section):
    """On-policy distillation from the models of `teacher` (docs/distillation.md)."""

    coef: NonNegative = 0.0
    """Weight of distillation. 0: none, and no teacher is loaded for it."""
    reward_coef: NonNegative = 1.0
    """Weight of the advantages that come from rewards. 0: rewards are only logged, and the run needs none."""
    apply_to: Literal["advantage", "loss"] = "advantage"
    """`advantage`: reverse KL at the sampled tokens, by policy gradient. `loss`: `divergence` over the `top_k` tokens."""
    gamma: Fraction = 0.0
    """Discount of the reverse KL at later tokens, for `apply_to: advantage`. 0: each token answers for its own alone; 1: the
    gradient of the KL between whole responses."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Divergence in the loss: KL(policy, teacher), KL(teacher, policy), or the generalised Jensen-Shannon divergence."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the teacher in the mixture of `divergence: jsd`."""
    top_k: Positive = 64
    """Number of tokens that the divergence tells apart; all others count as one."""
    top_k_of: Literal["teacher", "policy"] = "teacher"
    """Whose likeliest tokens these are; the policy's are those at the start of the step."""

    @property
    def in_advantage(self) -> bool:
        """Return whether advantages have a distillation term."""
        return self.coef > 0 and self.apply_to == "advantage"

    @property
    def in_loss(self) -> bool:
        """Return whether the loss has one."""
        return self.coef > 0 and self.apply_to == "loss"

    @property
    def asks_policy(self) -> bool:
        """Return whether the policy's likeliest tokens at the start of the step are asked for."""
        return self.in_loss and self.top_k_of == "policy"


class NamedTeacherConfig(Section):
    """A teacher of the rows that name it."""

    name: Annotated[str, Field(pattern=r"^\w+$")]
    """What rows call it under `teacher.data_key`."""
    path: str
    """Hugging Face folder of the teacher, which must have the policy's tokenizer."""
    layout: LayoutConfig | None = None
    """Parallel layout of this model. null: it shares the policy's processes and layout."""
    megatron: dict[str, Any] | None = None
    """Fields of megatron-core's TransformerConfig. null: those of `policy.megatron`."""

    @property
    def role(self) -> str:
        """The name of its role."""
        return f"teacher_{self.name}"


class TeacherConfig(Section):
    """Frozen models for distillation (docs/distillation.md), or for an estimator or loss of your own."""

    path: str | None = None
    """Hugging Face folder of the teacher of rows that name none; it must have the policy's tokenizer. null: there is none."""
    layout: LayoutConfig | None = None
    """Parallel layout of this model. null: it shares the policy's processes and layout."""
    megatron: dict[str, Any] | None = None
    """Fields of megatron-core's TransformerConfig. null: those of `policy.megatron`."""
    data_key: str = "teacher"
    """Key of a row that names its teacher, one of `named`."""
    named: Annotated[tuple[NamedTeacherConfig, ...], Field(strict=False)] = ()
    """Teachers of the rows that name them."""

    @property
    def folders(self) -> dict[str, str]:
        """Every teacher's folder, by the config field that names it."""
        named = {f"teacher.named[{index}].path": teacher.path for index, teacher in enumerate(self.named)}
        return ({"teacher.path": self.path} if self.path is not None else {}) | named


_TEACHERS = "Frozen models for distillation, or for an estimator or loss of your own."
TEACHER = AddedField("Config", "teacher", TeacherConfig, TeacherConfig(), _TEACHERS)
_DISTILLED = "On-policy distillation from the models of `teacher`."
DISTILLATION = AddedField("AlgorithmConfig", "distillation", DistillationConfig, DistillationConfig(), _DISTILLED)
FIELDS = (TEACHER, DISTILLATION)
teacher_of = TEACHER.of
"""The section `teacher` of a run's config."""
distillation_of = DISTILLATION.of
"""The section `distillation` of a section `algorithm`."""
