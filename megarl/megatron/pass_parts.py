"""The parts that options and the watch over routers take in the passes of a role's model on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megarl.data.stream import MicroBatch, PackedStream, StreamShard
from megarl.data.stream_sequences import TokenSequences
from megarl.megatron.options import ModelOptions
from megarl.megatron.router_watch import RouterWatch
from megarl.option_list import functions


class PassPart:
    """The part that an option takes in passes of a role's model; each method does nothing unless an option says so."""

    losses: ClassVar[tuple[str, ...]] = ()
    """Names of its losses among the metrics; an update in which one is not finite is refused."""
    reads_ahead: ClassVar[bool] = True
    """Whether `begin` is to be given all micro-batches of a pass, which are laid before the first then."""

    def placed(self, units: MicroBatch) -> MicroBatch:
        """Before a pass: a micro-batch with what it is to have before it becomes a stream."""
        return units

    def joins(self, *, training: bool) -> bool:
        """Before a pass, with gradients if `training`: return whether it takes part in it. Every rank of the model is asked."""
        return False

    def lay(self, units: MicroBatch, stream: PackedStream, share: StreamShard, device: torch.device) -> Any:
        """Lay what it needs on `device` of a micro-batch, whose `stream`, and this rank's `share` of it, are in main memory."""
        return None

    def begin(self, streams: Sequence[tuple[PackedStream, StreamShard]], given: Sequence[Any]) -> None:
        """Before the first of a pass's micro-batches, in whose order these are; `given` is what `lay` answered to each."""

    def forward(self, model: Any, given: Any) -> AbstractContextManager[None]:
        """Around the forward pass of a micro-batch through the chunk `model`."""
        return nullcontext()

    def loss(self, model: Any) -> tuple[Tensor, dict[str, Any]] | None:
        """Behind it: a further term of the loss, with its weight, and metric sums."""
        return None


def open_pass_parts(chunks: Sequence[Any], options: ModelOptions) -> tuple[PassPart, ...]:
    """The parts of the options that a role has."""
    parts = (take_part(chunks, options) for take_part in functions("model_part", "take_part"))
    return tuple(part for part in parts if part is not None)


class PassParts(NamedTuple):
    """The `parts` of options, and the `watch` over routers (None: nothing is watched)."""

    parts: Sequence[PassPart] = ()
    watch: RouterWatch | None = None

    def joining(self, *, training: bool) -> PassParts:
        """Restrict to what takes part in a pass."""
        return PassParts([part for part in self.parts if part.joins(training=training)], self.watch)

    @contextmanager
    def micro_batch(self, model: Any, given: Sequence[Any], counted: TokenSequences | None) -> Iterator[None]:
        """Around the forward pass of a micro-batch: what each part is `given`, and the tokens that are `counted`."""
        with ExitStack() as stack:
            for part, part_input in zip(self.parts, given, strict=True):
                stack.enter_context(part.forward(model, part_input))
            if self.watch is not None and counted is not None:
                stack.enter_context(self.watch.micro_batch(counted))
            yield
