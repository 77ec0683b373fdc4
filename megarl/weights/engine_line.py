"""The line along which engines are dealt to the data-parallel replicas that send them weights, in whole numbers.

What all engines receive of one source (`sources.py`), one engine after another, is a line; each replica of the source has an
even part of it. The reshard plan says by it who sends, and the placement puts engines next to who sends to them.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", int, npt.NDArray[np.int64])


def engine_position(engine: Number, replicas: Number, engines: int) -> Number:
    """The places of engines on the line: those of one residue together, so that replica e % replicas serves engine e."""
    of_each, left = engines // replicas, engines % replicas
    residue = engine % replicas
    return residue * of_each + _least(residue, left) + engine // replicas


def _least(a: Number, b: Number) -> Number:
    return a + (b - a) * (b < a)


def replica_shares(engine: int, replicas: int, engines: int) -> dict[int, int]:
    """The replicas that send to an engine, and how much each: parts of `replicas` parts."""
    start = engine_position(engine, replicas, engines) * replicas
    stop = start + replicas
    senders = range(start // engines, -(-stop // engines))
    return {replica: min(stop, (replica + 1) * engines) - max(start, replica * engines) for replica in senders}
