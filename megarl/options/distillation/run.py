"""Teachers in a run: they are asked in every step, and advantages or the loss have a term of theirs.

They answer with log-probs of sampled tokens, and of the likeliest ones, which the policy may be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from megarl.config import Config
from megarl.data.batch import Batch
from megarl.data.sample import Prompt
from megarl.data.stream import SCORED_IDS, TopK
from megarl.data.tokenize import load_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.experience.step_parts import StepPart
from megarl.models.registry import architecture_for, load_hf_config
from megarl.options.distillation.formulas import DistillationTerm, distillation_advantages
from megarl.options.distillation.loss import DistillationLoss
from megarl.options.distillation.questions import needs_teacher
from megarl.options.distillation.section import distillation_of, teacher_of
from megarl.runs.training_side import TrainingSide

SCORED = "teacher_scored_log_probs"
"""The column `[B, T, k]` of the teacher's log-probs of the tokens in `SCORED_IDS`."""
COLUMNS = ("teacher_log_probs", SCORED_IDS, SCORED)
"""Those that the policy's update reads, where a step has them."""


@dataclass(frozen=True)
class TeacherAdvantages:
    """`reward_coef` times the advantages of rewards, and `coef` times those of the teacher, discounted by `gamma`.

    With a `coef` of 0 the teacher's log-probs are not read.
    """

    columns: ClassVar[tuple[str, ...]] = ("teacher_log_probs",)

    reward_coef: float
    coef: float
    gamma: float

    def __call__(self, advantages: Tensor, sampled: Callable[[], Tensor], batch: Batch) -> Tensor:
        """The weighted sum `[b, T]`."""
        weighted = self.reward_coef * advantages
        if not self.coef:
            return weighted
        of_teacher = batch.columns["teacher_log_probs"]
        return weighted + self.coef * distillation_advantages(sampled(), of_teacher, batch.mask, self.gamma)


class Teachers(StepPart):
    """The teachers of a run, each asked about the rows that name it."""

    def __init__(self, config: Config) -> None:
        self.config, self.teacher = config, teacher_of(config)
        self.distillation = settings = distillation_of(config.algorithm)
        self.rewards_are_read = bool(settings.reward_coef)
        self.role_of = {named_teacher.name: named_teacher.role for named_teacher in self.teacher.named}
        self.top_k: TopK | None = None
        """Ids that all these models have, the likeliest of which are asked for."""
        if settings.in_loss:
            folders = [config.model.path, *self.teacher.folders.values()]
            self.top_k = TopK(settings.top_k, min(map(_vocabulary, folders)))

    def check(self, tokenizer: Any, prompts: Iterable[Prompt]) -> None:
        """Look at the teachers' tokenizers and at the rows before a run starts.

        Raises:
            ConfigError: a teacher has another vocabulary than the policy, or `top_k` is larger than it.
            DataError: a row names no teacher that there is.
        """
        for field, folder in self.teacher.folders.items():
            if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
                reason = "has another vocabulary than model.path, so that its log-probs are of other tokens"
                raise ConfigError.of(field, folder, reason, allowed="a model with the policy's tokenizer")
        if self.top_k is not None and self.top_k.k > self.top_k.vocabulary:
            reason = "is more tokens than policy and teacher both have"
            allowed = f"at most {self.top_k.vocabulary}"
            raise ConfigError.of("algorithm.distillation.top_k", self.top_k.k, reason, allowed=allowed)
        for prompt in prompts:
            self._role(prompt.row, prompt.row_id)

    def asked_of_policy(self) -> dict[str, Any]:
        """Further arguments of the policy's pass at the start of a step (`TrainingSide.forward`)."""
        if self.top_k is None or not self.distillation.asks_policy:
            return {}
        return {"top_k": self.top_k, "wide": {SCORED_IDS: self.top_k.k, "policy_scored_log_probs": self.top_k.k}}

    def prepare(self, roles: TrainingSide, batch: Batch) -> None:
        """Add `teacher_log_probs` and `teacher_entropy` to `batch`, and where the loss reads them `SCORED_IDS` and `SCORED`."""
        rows_of: dict[str, list[int]] = {}
        for row, sample in enumerate(batch.samples):
            rows_of.setdefault(self._role(sample.row, sample.row_id), []).append(row)
        more: dict[str, Any] = {}
        if self.top_k is not None and SCORED_IDS in batch.columns:
            more = {"columns": [SCORED_IDS], "wide": {SCORED: self.top_k.k}}
            del batch.columns["policy_scored_log_probs"]
        elif self.top_k is not None:
            more = {"top_k": self.top_k, "wide": {SCORED_IDS: self.top_k.k, SCORED: self.top_k.k}}
        roles.forward(rows_of, batch, ["teacher_log_probs", "teacher_entropy"], **more)

    def advantage_term(self) -> TeacherAdvantages:
        """The advantages of the rewards and those of the teacher, weighted."""
        settings = self.distillation
        return TeacherAdvantages(settings.reward_coef, settings.coef if settings.in_advantage else 0.0, settings.gamma)

    def loss_columns(self) -> tuple[str, ...]:
        """The teacher's, if the policy is distilled."""
        return COLUMNS if self.distillation.coef else ()

    def token_term(self) -> DistillationLoss:
        """Figures of the teacher, and the divergence where it is in the loss."""
        settings = self.distillation
        term = DistillationTerm(settings.coef, settings.divergence, settings.beta)
        return DistillationLoss(term if settings.in_loss else None)

    def _role(self, row: Mapping[str, Any], row_id: str) -> str:
        """The role that is asked about responses to this row."""
        key, unnamed = self.teacher.data_key, self.teacher.path is not None
        if self.role_of and key in row:
            name = row[key]
            if name not in self.role_of:
                known = ", ".join(self.role_of)
                raise DataError(
                    f"{key} of row '{row_id}' is {name!r}, which is none of teacher.named; it must be one of {known}"
                )
            return self.role_of[name]
        if not unnamed:
            raise DataError(f"row '{row_id}' names no teacher: give it the key {key} (teacher.data_key), or set teacher.path")
        return "teacher"


def _vocabulary(folder: str) -> int:
    hf_config = load_hf_config(folder)
    return int(architecture_for(hf_config).gpt_kwargs(hf_config)["vocab_size"])


def take_part(config: Config, tokenizer: Any) -> Teachers | None:
    """The teachers of a run that has any."""
    return Teachers(config) if needs_teacher(config) else None
