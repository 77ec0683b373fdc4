"""Calls of the driver to a training rank: the methods that it names in `RankGroup.call`, so that mypy follows each call.

`workers/rank.py` answers them. Importing this module does not import megatron, which the driver does without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.checkpoint.dist_writer import Written
from megarl.data.answers import Answers
from megarl.data.shares import Share
from megarl.data.stream import ScorePosition, TopK
from megarl.megatron.options import ModelOptions, OptimizerOptions
from megarl.observe.trace import Span
from megarl.weights.machines import Machines
from megarl.weights.pusher import Pushed


class RankRecord(NamedTuple):
    """The record of what a rank did since it was last asked, its peak memory in bytes, and the seconds of the policy's
    vision tower: of the
    forward passes in updates."""

    spans: list[Span]
    peak_bytes: int
    tower_s: float = 0.0


class RankCalls(ABC):
    """One training rank and the roles that share its layout. An exception reaches the driver as it is raised."""

    @abstractmethod
    def connect(self, address: tuple[str, int] | None, seed: int, timeout_s: float) -> int:
        """Join torch.distributed and make the layout's process groups; returns this process's id.

        `address` is where rank 0 leads the rendezvous; None: where torchrun's environment says.
        """

    @abstractmethod
    def add_role(self, role: str, options: ModelOptions, optimizer: OptimizerOptions | None) -> str | None:
        """Build `role` from `options` and load its weights; says which optimizer computes its updates."""

    @abstractmethod
    def drop_role(self, role: str) -> None:
        """Free a role that is no longer needed."""

    @abstractmethod
    def forward(self, role: str, shares: Sequence[Share], position: ScorePosition, top_k: TopK | None) -> Answers | None:
        """`{response index: float32 [L, C]}` for the micro-batches of all `shares` (see `step.forward`); None where this rank
        does not report."""

    @abstractmethod
    def ask(self, role: str, question: Callable[[Any], Any]) -> Any:
        """Answer an option's `question` about the role's model (`RankModel`) on this rank; collective if the question is."""

    @abstractmethod
    def update(self, role: str, shares: Sequence[Share], loss_function: Any, position: ScorePosition) -> dict[str, float]:
        """One optimizer step on the micro-batches of all `shares`; metric sums of this rank."""

    @abstractmethod
    def accumulate(self, role: str, shares: Sequence[Share], loss_function: Any, position: ScorePosition) -> dict[str, float]:
        """Gradients of the micro-batches of all `shares`, added to those since the last step; metric sums of this rank."""

    @abstractmethod
    def optimizer_step(self, role: str) -> dict[str, float]:
        """One optimizer step by what was accumulated; `grad_norm`, `lr` and whether it was skipped, on rank 0."""

    @abstractmethod
    def copy_role(self, source: str, target: str, share: float) -> None:
        """`target` ← share·`source` + (1 − share)·`target`; both have the same layout and head. 1: copy."""

    @abstractmethod
    def export_role(self, role: str, folder: str, adapters: bool) -> None:
        """Write the role as a Hugging Face folder, or its adapters as a PEFT folder; collective over the world."""

    @abstractmethod
    def keep_on_device(self, what: str) -> None:
        """Have `all` roles on the device, the `policy`'s weights alone, or `none`; see `megatron.offload`."""

    @abstractmethod
    def open_senders(
        self,
        targets: Mapping[int, Any],
        transport: str,
        timeout_s: float,
        engines: int | None,
        connection: int,
        machines: Machines | None,
    ) -> None:
        """Connect to engines by number, or anew to those that were restarted, where this rank has weights to send them.

        Servers that take slices are sent what the reshard plan for all `engines` (None: those in `targets`) says, by every
        rank that it names. Whole tensors are sent by the leading ranks of stages: each stage's replicas share the engines
        evenly; replicas of a model with experts hold no more than a part of them each, so there it is the first one alone.
        An engine that cannot be reached is an error of the next push. `timeout_s` is as in `senders.open_sender`,
        `connection` as in `senders.Membership`. With `machines` what an engine's rank elsewhere is to open goes by its relay.

        Raises:
            EngineError: an engine serves another model than the policy.
        """

    @abstractmethod
    def push_weights(
        self, role: str, bases: Mapping[int, int | None] | None, version: int | None, verify: bool
    ) -> dict[int, Pushed]:
        """Send this rank's part of the weights to engines: by engine what came of it; see `Pusher.push_loads`."""

    @abstractmethod
    def save_role(self, role: str, folder: str) -> None:
        """Copy this rank's part of the role's checkpoint, and write it into `folder` in the background."""

    @abstractmethod
    def saved_role(self, role: str, wait: bool) -> Written | None:
        """The files that `save_role` wrote once it is on the disk; None if it is not yet and `wait` is not asked for."""

    @abstractmethod
    def load_role(self, role: str, folder: str) -> None:
        """Read the role's distributed checkpoint; collective over the world."""

    @abstractmethod
    def start_profile(self, file: str | None) -> None:
        """Record what is computed until `stop_profile`, for `file` (see `profiling.Profile`); None: this rank does not."""

    @abstractmethod
    def stop_profile(self) -> None:
        """Write what was recorded."""

    @abstractmethod
    def device_name(self) -> str | None:
        """The driver's name for this rank's GPU; None on a CPU."""

    @abstractmethod
    def take_record(self) -> RankRecord:
        """The record of what this rank did since the last call."""
