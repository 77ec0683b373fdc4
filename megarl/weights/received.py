"""Record of what an engine's rank has received into its parameters: boxes, and checksums taken while more is on its way."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megarl.weights.checksums import digest
from megarl.weights.copying import copy_hashed
from megarl.weights.rank_plan import SliceKey
from megarl.weights.sglang_targets import EVERY_RANK

Whole = list[tuple[str, torch.Tensor]]
"""Tensors by name that came whole, for the model's own loader to cut."""


class ReceivedBoxes:
    """The boxes that this rank was sent, with the dtype of each: a check of all of them need not name them.

    Updates that are not checked, or broken off, leave their boxes to the next check: a plan has the same ones each time.
    Whatever else comes between two checks only makes the sums differ, and then boxes are named.
    """

    def __init__(self) -> None:
        self._checked: dict[SliceKey, str] = {}
        self._came: dict[SliceKey, str] = {}
        self._lock = threading.Lock()

    def note(self, pieces: Iterable[tuple[Any, ...]]) -> None:
        """These came, each `(*held, dtype, start, stop)`; not what SGLang's own loader cuts. Called by several threads."""
        came = {SliceKey(*place): dtype for *place, dtype, _, _ in pieces}
        of_ranks = {key: dtype for key, dtype in came.items() if key.engine_rank != EVERY_RANK}
        with self._lock:
            self._came |= of_ranks

    def take(self, *, since_base: bool) -> list[tuple[tuple[Any, ...], str]]:
        """The boxes that came since the last call, or ever; ends what `note` is told of as one update."""
        with self._lock:
            self._checked = self._checked | self._came if since_base else self._came
            self._came = {}
        return [*self._checked.items()]


class ReceivedDigests:
    """The digests of an update's boxes that were taken as soon as the values had come.

    They say what the parameters hold as long as nothing else writes there: what does must have them forgotten, and boxes that
    share memory with others are read again at the end, like all that no digest was taken of.
    """

    def __init__(self) -> None:
        self._taken: dict[SliceKey, tuple[torch.Tensor, str]] = {}

    def hash(self, held: SliceKey, values: torch.Tensor) -> None:
        """Take the digest of a box, `values` of a parameter."""
        self._taken[held] = values, digest(values)

    def copy(self, held: SliceKey, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values of the same dtype into a box, which is contiguous and on a CPU, and take its digest on the way."""
        self._taken[held] = to, copy_hashed(to, values)

    def boxes(self) -> dict[SliceKey, torch.Tensor]:
        """The boxes that the digests are of: to find a box among the parameters takes longer than to hash a small one."""
        return {key: box for key, (box, _) in self._taken.items()}

    def forget(self, held: SliceKey) -> None:
        """The box is written again."""
        self._taken.pop(held, None)

    def forget_all(self) -> None:
        """Something else may have written into the parameters."""
        self._taken.clear()

    def take(self, boxes: Sequence[tuple[SliceKey, torch.Tensor]]) -> dict[SliceKey, str]:
        """The digests that hold of some of these boxes, which are all of an update; forgets them."""
        known = [key for (key, _), alone in zip(boxes, _alone([to for _, to in boxes]), strict=True) if alone]
        taken = {key: self._taken[key][1] for key in known if key in self._taken}
        self.forget_all()
        return taken


def _alone(boxes: Sequence[torch.Tensor]) -> list[bool]:
    """Tell for each box whether no other lies between its first and last byte."""
    spans = []
    for number, box in enumerate(boxes):
        last = sum((size - 1) * stride for size, stride in zip(box.shape, box.stride(), strict=True))
        spans.append((box.data_ptr(), box.data_ptr() + (last + 1) * box.element_size(), number))
    spans.sort()
    alone, end, before = [True] * len(boxes), 0, 0
    for start, stop, number in spans:
        if start < end:
            alone[number] = alone[before] = False
        if stop > end:
            end, before = stop, number
    return alone
