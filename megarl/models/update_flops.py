"""Operations of updates on batches as replicas are sent them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from megarl.data.media import Pixels
from megarl.data.shares import Share
from megarl.data.stream import ScorePosition
from megarl.models.flops import FlopsModel
from megarl.observe.rank_record import UpdateFlops

PASSES = 3
"""A backward pass takes twice the operations of a forward pass. What is recomputed in it is not counted."""


def update_flops(
    flops: FlopsModel,
    shares: Sequence[Share],
    *,
    shared_prompts: bool,
    position: ScorePosition,
    logits: bool,
    tower_passes: int = PASSES,
) -> UpdateFlops:
    """Floating-point operations of an update on all of `shares`, whoever computes them.

    Counted are the tokens that are fed (a response's last token only where scores are taken at tokens), the pairs of a token
    and one it attends to, the different pictures of each micro-batch, and, with `logits`, the output rows of scored tokens.
    Without `shared_prompts` each response has its prompt to itself, and no tokens from another response. A tower that is frozen
    has one of the `tower_passes`.
    """
    tokens = apart = attention = rows = of_towers = 0
    for share in shares:
        fed = np.maximum(share.lengths - (position is ScorePosition.NEXT), 0)
        prompt_of = np.repeat(share.prompt_lengths, share.units)
        prompts = share.prompt_lengths if shared_prompts else prompt_of
        lengths, behind = _repeated(share, shared_prompts=shared_prompts)
        tokens += int(prompts.sum() + fed.sum() - lengths.sum())
        apart += int(prompt_of.sum() + fed.sum())
        attention -= int(flops.attention(behind, lengths).sum())
        attention += int(flops.attention(np.zeros_like(prompts), prompts).sum() + flops.attention(prompt_of, fed).sum())
        rows += share.scored_tokens
        of_towers += sum(flops.tower(grid for _, grid in pictures) for pictures in pictures_of(share))
    of_decoder = flops.per_token * tokens + attention + flops.per_logit_row * rows * logits
    if flops.prediction is not None:  # its sequences begin at their second tokens, and end where the decoder's do
        of_decoder += sum(_of_predicting(flops.prediction, share, shared_prompts=shared_prompts) for share in shares)
    # of weights that are not trained the gradients are not computed, which take as long as a forward pass
    frozen = flops.frozen_per_token * tokens + flops.frozen_per_row * rows * logits
    return UpdateFlops(PASSES * of_decoder - frozen, tower_passes * of_towers, tokens, apart)


def pictures_of(share: Share) -> Iterator[set[Pixels]]:
    """The different pictures of each micro-batch."""
    prompts, responses, units = iter(share.media), iter(share.told_media), iter(share.units.tolist())
    for count in share.micro_batches.tolist() if share.media or share.told_media else ():
        response_media = islice(responses, sum(islice(units, count)))
        yield {shown.pixels for media in (*islice(prompts, count), *response_media) for shown in media}


def _repeated(share: Share, *, shared_prompts: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens that responses share with an earlier one, and those of the prompt before them."""
    repeats = share.repeats if shared_prompts else ()
    counts = [len(of_unit) for of_unit in repeats]
    lengths = np.fromiter(chain.from_iterable(repeats), np.int64)
    return lengths, np.repeat(share.prompt_lengths, counts) if counts else lengths


def _of_predicting(flops: FlopsModel, share: Share, *, shared_prompts: bool) -> int:
    """Operations of a forward pass of the layer for multi-token prediction over the tokens of a share."""
    fed = np.maximum(share.lengths - 1, 0)
    behind_first = np.maximum(share.prompt_lengths - 1, 0)
    prompt_of = np.repeat(behind_first, share.units)
    prompts = behind_first if shared_prompts else prompt_of
    pairs = flops.attention(np.zeros_like(prompts), prompts).sum() + flops.attention(prompt_of, fed).sum()
    repeated, behind = _repeated(share, shared_prompts=shared_prompts)
    pairs -= flops.attention(np.maximum(behind - 1, 0), repeated).sum()
    tokens = int(prompts.sum() + fed.sum() - repeated.sum())
    return flops.per_token * tokens + int(pairs) + flops.per_logit_row * share.scored_tokens
