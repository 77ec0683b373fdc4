"""The trainer's side of a weight update into an SGLang server, for the processes that hold the weights.

The driver opens the update with `SglangEngine.begin_update`; each sender then sends its buckets from its own process, all of
them at the same time (`intake.py`); the driver closes it with `end_update(version, checksums of all senders)`. Synchronous, no
SGLang import on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.weights.checksums import UNCHECKED, EngineLayout
from megarl.weights.intake import PutBefore
from megarl.weights.payloads import SELECTORS
from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.weights.sglang_targets import EVERY_RANK
from megarl.weights.staging import BUFFERS, SLICED, NamedTensors, StagedSlices, Staging, ZeroCopy

POLL_S = 0.001
"""How often senders look whether an engine has answered."""


@dataclass(frozen=True)
class ServerEndpoint:
    """The address of a server and its way of holding weights; can be sent to another process."""

    url: str
    layout: EngineLayout
    token: str = field(repr=False)
    """Secret that the server wants to see in every request."""
    store: tuple[str, int] = ("127.0.0.1", 0)
    """Where its owner keeps the store by which process groups with its ranks are made."""


class ServerSender:
    """The common part of all transports: `send` for one caller, `deliver` for a caller that stages and hashes for many
    engines."""

    in_flight = 1
    waits_for_others = False
    is_checked = True

    def __init__(self, endpoint: ServerEndpoint, timeout_s: float = 300.0) -> None:
        self.endpoint, self.timeout_s = endpoint, timeout_s
        self._staging: Staging | ZeroCopy | None = None
        self._checksums: dict[SliceKey, str] = {}

    def staging(self, name: str, buffers: int = BUFFERS) -> Staging | ZeroCopy:
        """The place from which the engine reads pieces: in buffers that it can open."""
        return Staging(buffers, name)

    def pieces(self, bucket: NamedTensors) -> list[WeightSlice]:
        """The slices of every rank, of whole weights."""
        return [piece for name, weight in bucket for piece in self.endpoint.layout.pieces(name, weight)]

    def deliver(self, staged: StagedSlices) -> None:
        """Send what has been staged; returns when the engine has taken it over, or raises EngineError."""
        raise NotImplementedError

    def send(self, bucket: NamedTensors) -> None:
        """Send `bucket`, whole weights, in the engine's dtype; returns when it has taken them over.

        Raises:
            EngineError: no update is open, or the engine refused the weights. A process group is then out of step: close it.
        """
        if not bucket:
            return
        layout = self.endpoint.layout
        pieces = self.pieces([(name, weight.to(getattr(torch, layout.sent_dtype(name)))) for name, weight in bucket])
        self._staging = self._staging or self.staging("", 1)
        staged = self._staging.stage(pieces)
        staged.checked = True
        self._checksums |= checksums_of(staged)
        self.deliver(staged)

    def checksums(self) -> dict[SliceKey, str]:
        """Checksums of everything that `send` sent since the last call; ends this sender's part of the update."""
        done, self._checksums = self._checksums, {}
        return done

    def join(self) -> None:
        """Make what connects this process with the engine's ranks, together with all that send to it."""

    def close(self) -> None:
        """Give back what this process holds for the connection."""


def update_request(layout: EngineLayout, payloads: list[str]) -> tuple[str, dict[str, Any]]:
    """The request, path and body, by which an engine's ranks load their payloads."""
    return "update_weights_from_tensor", {
        "serialized_named_tensors": payloads,
        "load_format": SLICED,
        "flush_cache": False,  # once, at the end of the update
        "selector": SELECTORS[layout.model.predicts],
    }


def put_before(endpoint: ServerEndpoint, payloads: Sequence[str | None], timeout_s: float) -> PutBefore:
    """Put payloads before an engine's ranks in the open update, None before one that takes nothing; raises EngineError."""
    return PutBefore(endpoint.url, endpoint.store, endpoint.token, payloads, timeout_s)


def checksums_of(staged: StagedSlices, *, values: bool = True) -> dict[SliceKey, str]:
    """The checksums of all pieces; without `values`, and of what SGLang's own loader cuts, that there is none."""
    checked = [piece for piece in staged.pieces if values and piece.held.engine_rank != EVERY_RANK]
    staged.take_digests(checked)
    return {piece.held: UNCHECKED for piece in staged.pieces} | {piece.held: staged.digest(piece) for piece in checked}


class TensorSender(ServerSender):
    """Sends weights through shared memory (CPU) or CUDA IPC to a server on the same machine, each rank its own slices."""

    in_flight = 2  # a rank takes several at once, in any order, and need not wait for the next to come

    def deliver(self, staged: StagedSlices) -> None:
        """Tell the engine where the staged weights are; returns when it has read them, or raises EngineError."""
        put_before(self.endpoint, staged.payloads(self.endpoint.layout.target.ranks), self.timeout_s).result()
