"""The moments of a step of reinforcement learning at which options take part, as methods of one object for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from megarl.config import Config
from megarl.config.sources import OnChange
from megarl.data.batch import Batch
from megarl.data.sample import Prompt, Sample
from megarl.data.sampler import DataSampler
from megarl.data.stream import PackedStream
from megarl.option_list import functions
from megarl.runs.training_side import TrainingSide

StreamLoss = Callable[[Tensor, PackedStream], tuple[Tensor, dict[str, Tensor]]]
"""Log-probs `[N]` of a stream's scored tokens, and the stream → a loss per token `[N]`, and sums for metrics."""


class TokenTerm(Protocol):
    """A further term of the policy's loss, one number per token; ranks get it as a value."""

    def __call__(
        self, output: Tensor, log_probs: Tensor, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The head's `output` `[N, C]`, log-probs `[N]` and the stream's columns → the term `[N]` with its weight (None: only
        sums), and sums for metrics by their whole names."""


class AdvantageTerm(Protocol):
    """Change that an option makes to the advantages of rewards; processes that have tokens get it as a value."""

    columns: ClassVar[tuple[str, ...]]
    """Those that it reads, beside the policy's log-probs."""

    def __call__(self, advantages: Tensor, sampled: Callable[[], Tensor], batch: Batch) -> Tensor:
        """Advantages `[b, T]` → those that are trained on, which nothing normalises; `sampled` gives the policy's log-probs
        `[b, T]`."""


class MixedLoss(Protocol):
    """The loss of streams that are mixed into an update; ranks get it as a value."""

    column: ClassVar[str]
    """Streams that have this column are its own."""

    def __call__(self, log_probs: Tensor, stream: PackedStream) -> tuple[Tensor, dict[str, Any]]:
        """Log-probs `[N]` → the loss as one number, and sums for metrics by their whole names."""


@dataclass(frozen=True)
class ChosenRows:
    """The rows of a batch that its updates train on, groups of which stay in one micro-batch; `counted` have a weight."""

    rows: tuple[int, ...]
    counted: frozenset[int]
    figures: Mapping[str, float]
    columns: tuple[str, ...]
    """Columns that the loss reads."""


class StepPart:
    """The part that an option takes in a step; each method does nothing unless an option says so."""

    state_name = ""
    """The key of its state in checkpoints; empty: it has none."""

    rewards_are_read = True
    """Whether an estimator makes advantages of rewards; if not, they are only logged."""

    def check(self, tokenizer: Any, prompts: Iterable[Prompt]) -> None:
        """Look at the rows before a run starts; MegarlErrors end it."""

    def asked_of_policy(self) -> dict[str, Any]:
        """Further arguments of the policy's pass at the start of a step (`TrainingSide.forward`)."""
        return {}

    def behind_policy_pass(self, roles: TrainingSide, batch: Batch, step: int) -> None:
        """Behind the policy's pass of `step`, if it has one."""

    def prepare(self, roles: TrainingSide, batch: Batch) -> None:
        """With the policy's and the reference's log-probs there: add what else the step needs."""

    def score(self, roles: TrainingSide, samples: Sequence[Sample]) -> list[float] | None:
        """Weighted rewards of `samples` in addition to those of the config's sources, also left in `sample.rewards`."""
        return None

    def take_rewards(self, batch: Batch, rewards: Sequence[float]) -> None:
        """Before advantages are estimated: add columns of rewards, one per row `rewards` in all."""

    def advantage_term(self) -> AdvantageTerm | None:
        """Change that it makes to the advantages of rewards."""
        return None

    def loss_columns(self) -> Sequence[str]:
        """Columns that its terms of the policy's loss read, where a step has them."""
        return ()

    def token_term(self) -> TokenTerm | None:
        """A further term of the policy's loss."""
        return None

    def choose_rows(self, batch: Batch) -> ChosenRows | None:
        """With advantages there: which rows are trained on, where the loss does not take all."""
        return None

    def stream_loss(self) -> StreamLoss | None:
        """The policy loss, where it is not one of single tokens."""
        return None

    def mixed_in(self) -> tuple[Batch, Sequence[str]] | None:
        """A further batch for the next update of the policy, and its columns."""
        return None

    def mixed_loss(self) -> MixedLoss | None:
        """The loss of the batches that `mixed_in` gives."""
        return None

    def figures(self, roles: TrainingSide, batch: Batch) -> dict[str, float]:
        """Metrics of a step that is done, by their whole names."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, JSON-able."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`'s answer."""


def go_to_row(
    sampler: DataSampler[Prompt] | None, parts: Sequence[StepPart], state: Mapping[str, Any], on_change: OnChange
) -> list[str]:
    """Go to the places in the data that a checkpoint's `state` has of the sampler (None: no rows) and of the rows of `parts`.

    Returns what is to be said of it.

    Raises:
        CheckpointError: the rows are others, and `on_change` does not say how to go on.
    """
    lines = []
    if sampler is not None and "sampler" in state:
        lines = sampler.load_state_dict(state["sampler"], on_change)
    for part in parts:
        if (of_part := state.get(part.state_name)) is not None:
            part.load_state_dict(of_part)
    return lines


def open_parts(config: Config, tokenizer: Any) -> list[StepPart]:
    """The parts of the options that the config asks for.

    Raises:
        MegarlError: what an option needs cannot be read.
    """
    parts = (take_part(config, tokenizer) for take_part in functions("run", "take_part"))
    return [part for part in parts if part is not None]
