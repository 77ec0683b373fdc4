"""Handles to values in Ray's object store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from megarl.errors import WorkerError


@dataclass(frozen=True, eq=False)
class RayObject:
    """A handle (`data.stored.Stored`) to what a Ray `reference` stands for; the value stays on the node that made it."""

    reference: Any

    def get(self) -> Any:
        """The value, which reaches this process if it is elsewhere.

        Raises:
            WorkerError: it is gone with the node that held it.
        """
        try:
            return ray.get(self.reference)
        except ray.exceptions.ObjectLostError as error:
            raise WorkerError(f"tokens of a step are gone with the node that held them: {error}") from error
