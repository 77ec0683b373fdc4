"""A sender of whole tensors, staged in buffers as for a server; tests say what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.weights.staging import Staging


class StagedTensors:
    """All but `deliver` of a sender that is here and waits for nobody."""

    in_flight, waits_for_others = 1, False

    def staging(self, name: str) -> Staging:
        """The buffers of a run."""
        return Staging(name=name)

    def pieces(self, bucket: Sequence[tuple[str, Tensor]]) -> list[WeightSlice]:
        """Whole tensors."""
        return [WeightSlice(SliceKey.whole(name, weight), weight) for name, weight in bucket]

    def join(self) -> None:
        """It is here."""
