"""The training side of a run as loops, options and a run's keepers see it: models by role, whatever ranks they live on.

`workers/roles.py` has it. Nothing here knows of processes, Ray or megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from torch import Tensor

from megarl.data.batch import Batch
from megarl.data.stored_shares import RowTask
from megarl.data.stream import TopK
from megarl.observe.rank_record import RankRecord, UpdateFlops
from megarl.observe.run_state import RankCondition
from megarl.runs.manifest import FileRecord

POLICY, REFERENCE, CRITIC = "policy", "reference", "critic"
Answer = TypeVar("Answer")
JoinFiles = Callable[[Path], dict[str, FileRecord]]
"""Makes of the files that ranks wrote below a folder a checkpoint of each role; every file's record by its path there."""


class Ranks(Protocol):
    """The ranks of one layout."""

    def any_rank(self, flag: bool, /) -> bool:  # noqa: FBT001 - a question, whose subject is the flag
        """Return whether `flag` is true in any process that drives these ranks."""
        ...

    def progress(self) -> tuple[int, int]:
        """Micro-batches that the first rank has begun in the pass under way, and all of them; (0, 0) if it does not say."""
        ...

    def states(self) -> list[RankCondition]:
        """Return whether each rank answers, in rank order; empty where this process does not know. For one other thread
        to ask."""
        ...


class TrainingSide(Protocol):
    """The models of a run by role: `policy`, `reference`, `critic`, and those that options add."""

    peak_flops: float | None
    """Peak of a GPU of the policy, in operations per second; None where it is not known."""
    device: str | None
    """Name of the policy's GPUs, once it is loaded."""

    @property
    def groups(self) -> Mapping[str, Ranks]:
        """The groups of ranks by name."""
        ...

    def describe(self) -> str:
        """Describe how the policy is computed and updated, for the start of a run."""
        ...

    def load(self, role: str) -> None:
        """Build `role` on its ranks and load its weights."""
        ...

    def forward(
        self,
        role: str | Mapping[str, Sequence[int]],
        batch: Batch,
        names: Sequence[str],
        *,
        rows: Sequence[int] | None = None,
        at: Tensor | None = None,
        columns: Sequence[str] = (),
        top_k: TopK | None = None,
        wide: Mapping[str, int] = MappingProxyType({}),
        extra: bool = True,
    ) -> None:
        """Add the role's outputs to `batch` as columns `names`, computed without gradients; see `workers/roles.py`."""
        ...

    def compute(self, batch: Batch, task: RowTask) -> list[Any]:
        """Have a task done on a batch where its tokens are; the batch gets the columns and the mask that it sets.

        The answers of the parts in which it was done.
        """
        ...

    def ask(self, role: str, question: Callable[[Any], Answer]) -> list[Answer]:
        """The answers of all ranks of `role` to an option's `question`, which gets the role's model on the rank."""
        ...

    def start_update(
        self,
        role: str,
        batch: Batch,
        rows: Sequence[int],
        columns: Sequence[str],
        loss: Any,
        *,
        at: Tensor | None = None,
        keep_groups: bool = False,
        mixed_in: tuple[Batch, Sequence[str]] | None = None,
        applies: bool = True,
        shown_as: str | None = None,
    ) -> Any:
        """Begin one optimizer step of `role` on `rows`, or gather its gradients alone; see `workers/roles.py`."""
        ...

    def finish_updates(self, updates: Sequence[Any]) -> list[dict[str, Any]]:
        """Wait for updates and return each one's metrics."""
        ...

    def optimizer_step(self, role: str) -> dict[str, Any]:
        """Apply the gradients of the updates of `role` that did not; metrics as of an update, without the loss's."""
        ...

    def copy_weights(self, source: str, target: str, share: float = 1.0) -> None:
        """`target` ← share·`source` + (1 − share)·`target`; both must live in the same ranks and layout."""
        ...

    def export(self, role: str, folder: str) -> None:
        """Write what was trained of `role`, a Hugging Face model folder or a PEFT folder, whole or not at all."""
        ...

    def save(self, folder: str) -> None:
        """Have every role that changes during the run written into a folder of its own below `folder`, in the background."""
        ...

    def saved(self, *, wait: bool) -> JoinFiles | None:
        """The function that makes whole checkpoints of what `save` began; None if some ranks are not done, unless it waits."""
        ...

    def restore(self, folder: str, roles: Sequence[str] | None = None) -> None:
        """Read back a checkpoint of a run; every role of it unless `roles` says which."""
        ...

    def start_profile(self, folder: str, ranks: Sequence[int]) -> None:
        """Have these ranks of every group record what they compute, into `<folder>/<group>-<rank>.*`."""
        ...

    def stop_profile(self) -> None:
        """End the recording and write it."""
        ...

    def take_records(self) -> dict[str, list[RankRecord]]:
        """By group what each rank did since the last call."""
        ...

    def take_update_flops(self) -> UpdateFlops:
        """Operations of the policy's updates since the last call."""
        ...
