"""Which weights have changed since the last update: what one training rank remembers of what it sent.

A digest of each tensor's bits, not the tensor: 32 bytes each. Tensors are sent whole or not at all.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def base_for(confirmed: int | None, version: int, every: int) -> int | None:
    """The version that an update to `version` may build on; None: all weights must be sent.

    That is so without delta updates (`every` 0), at every `every`-th version, and to an engine that has no `confirmed`
    version, since it was restarted or its last update failed.
    """
    return confirmed if every and version % every else None


class SentWeights:
    """Digests of the weights of the last version sent, by name; `version` is None before the first."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._digests: dict[str, bytes] = {}
        self._next: dict[str, bytes] = {}

    def begin(self) -> None:
        """A push begins; what an earlier one that was broken off has left is forgotten."""
        self._next = {}

    def changed(self, name: str, weight: Tensor) -> bool:
        """Whether any bit of `weight` differs from what was sent under this name; remembers it for `sent`."""
        self._next[name] = digest(weight)
        return self._digests.get(name) != self._next[name]

    def sent(self, version: int) -> None:
        """Everything given to `changed` since `begin` is what engines will have as `version`."""
        self.version, self._digests, self._next = version, self._next, {}


def digest(weight: Tensor) -> bytes:
    """SHA-256 of a tensor's bits."""
    flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().data).digest()
