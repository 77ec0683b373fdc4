"""Training rows whose prompts are also those of rows that are held out for evaluation: found, counted and dropped."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.data.sample import Prompt, Sample
from megarl.errors import DataError


def count_held_out(train: Sequence[Sample], held_out: Sequence[Sample]) -> int:
    """Count the training rows that have the prompt of a held-out row, token for token and picture for picture."""
    known = {(tuple(sample.prompt_ids), sample.prompt_media) for sample in held_out}
    return len({sample.row_id for sample in train if (tuple(sample.prompt_ids), sample.prompt_media) in known})


def drop_eval_overlap(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[Prompt]:
    """The training prompts that are not, token for token and picture for picture, held-out prompts.

    Raises:
        DataError: none is left.
    """
    known = {(tuple(prompt.prompt_ids), tuple(prompt.media)) for prompt in held_out}
    kept = [prompt for prompt in train if (tuple(prompt.prompt_ids), tuple(prompt.media)) not in known]
    if not kept:
        raise DataError(
            f"data.train has no row that data.eval and evaluations do not hold out ({len(train)} rows, all of them held-out "
            "prompts); train on other rows, or remove those sets"
        )
    return kept
