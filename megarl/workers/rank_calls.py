"""Calls of the driver to a training rank: it names methods of `Rank` in `RankGroup.call`, as `RankCalls.forward`.

The type checker follows each name to the method. While megarl runs it is a name alone, since the driver does without megatron,
which `workers/rank.py` imports.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.workers.rank import Rank as RankCalls
else:

    class _Names:
        """Gives the name of a method for the method."""

        def __getattr__(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(__name__=name)

    RankCalls = _Names()

__all__ = ["RankCalls"]
