"""Which prompts a step gets: every epoch visits each prompt once, in an order that follows from the seed and the epoch.

The position alone says where a run stands, so a resumed run goes on as if it had not stopped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.data.sample import Prompt
from megarl.errors import CheckpointError, DataError


class PromptSampler:
    """Hands out prompts epoch after epoch, without end."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        """`prompts` must not be empty; `seed` decides the order of every epoch."""
        if not prompts:
            raise ValueError("a sampler needs at least one prompt")
        self._prompts = list(prompts)
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order: list[int] = []

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts as copies whose `group_id` is `<row_id>@<epoch>`: unique, however often a row comes back."""
        return [self._take() for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """The position, JSON-able, and the number of prompts that gives it its meaning."""
        return {"position": self._position, "rows": len(self._prompts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            CheckpointError: the state was saved over another number of prompts.
        """
        if state["rows"] != len(self._prompts):
            raise CheckpointError(
                f"the checkpoint stands in a data set of {state['rows']} prompts, but data.train now gives "
                f"{len(self._prompts)}; a resumed run needs the same data"
            )
        self._position = state["position"]

    def _take(self) -> Prompt:
        epoch, place = divmod(self._position, len(self._prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        self._position += 1
        prompt = self._prompts[self._order[place]]
        return replace(prompt, group_id=f"{prompt.row_id}@{epoch}")


def without_held_out(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """The training prompts that are not, token for token, held-out prompts.

    Raises:
        DataError: none is left.
    """
    known = {tuple(prompt.prompt_ids) for prompt in held_out}
    kept = [prompt for prompt in train if tuple(prompt.prompt_ids) not in known]
    if not kept:
        raise DataError(
            f"data.train has no row that data.eval does not hold out ({len(train)} rows, all of them held-out prompts); "
            "train on other rows, or set data.eval to null"
        )
    return kept
