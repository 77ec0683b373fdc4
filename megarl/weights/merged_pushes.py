"""The result of several pushes of one update, as one: those of all ranks, or of a rank that sends in several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.weights.pusher import Pushed


def merge(of_ranks: Sequence[Mapping[int, Pushed]]) -> dict[int, Pushed]:
    """The result of all ranks' pushes of one update, by engine: all checksums, or the first rank's error."""
    merged: dict[int, Pushed] = {}
    for pushed in of_ranks:
        for engine, result in pushed.items():
            before = merged.get(engine, Pushed())
            merged[engine] = Pushed(
                before.checksums | result.checksums, before.error or result.error, before.nbytes + result.nbytes
            )
    return merged
