"""Changes since the last update: what one training rank remembers of what it sent.

A checksum of each piece's bits, not the piece: a few bytes each. Pieces (the plan's boxes) are sent whole or not at all.
"""

from __future__ import annotations

from collections.abc import Hashable


def base_for(confirmed: int | None, version: int, every: int) -> int | None:
    """The version that an update to `version` may build on; None: all weights must be sent.

    That is so without delta updates (`every` 0), at every `every`-th version, and to an engine that has no `confirmed`
    version, since it was restarted or its last update failed.
    """
    return confirmed if every and version % every else None


class SentWeights:
    """Checksums of the pieces of the last version sent, by their places; `version` is None before the first."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._checksums: dict[Hashable, str] = {}
        self._next: dict[Hashable, str] = {}

    def begin(self) -> None:
        """A push begins; what an earlier one that was broken off has left is forgotten."""
        self._next = {}

    def changed(self, place: Hashable, checksum: str) -> bool:
        """Return whether any bit differs from what was sent to this place; remembers it for `sent`."""
        self._next[place] = checksum
        return self._checksums.get(place) != checksum

    def sent(self, version: int) -> None:
        """Everything given to `changed` since `begin` is what engines will have as `version`."""
        self.version, self._checksums, self._next = version, self._next, {}
