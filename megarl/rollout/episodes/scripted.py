"""Turns that somebody wrote in place of a policy's, for episodes that are tried without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.data.media import Media
from megarl.errors import EpisodeError
from megarl.rollout.engines.protocol import Generation
from megarl.rollout.engines.stops import NO_STOPS, Stops

MOST_ASKED = 100
"""Turns that an episode may ask for beyond those that were written, as one might that reads no finish reason."""


class ScriptedTurns:
    """A `SampleTokens` that gives `texts`, one for each turn, with the tokenizer's end token; behind them only that, as cut.

    Log-probs and versions are 0.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.texts, self.asked = list(texts), 0
        self._tokenizer = tokenizer

    async def __call__(
        self, ids: list[int], max_new_tokens: int, media: Sequence[Media] | None = None, /, stops: Stops = NO_STOPS
    ) -> Generation:
        """The next turn, at most `max_new_tokens` of it.

        Raises:
            EpisodeError: the episode goes on asking though nothing is left.
        """
        turn, self.asked = self.asked, self.asked + 1
        if self.asked > len(self.texts) + MOST_ASKED:
            raise EpisodeError(
                f"the episode asked for {MOST_ASKED} turns more than were given; it must end where a finish_reason is 'length'"
            )
        end = self._tokenizer.eos_token_id
        ended = [end] if end is not None else []
        if turn >= len(self.texts):
            return _generation(ended or ids[-1:], is_whole=False)
        tokens = [*self._tokenizer(self.texts[turn], add_special_tokens=False)["input_ids"], *ended]
        return _generation(tokens[:max_new_tokens], is_whole=len(tokens) <= max_new_tokens)


def _generation(ids: list[int], *, is_whole: bool) -> Generation:
    return Generation(ids, [0.0] * len(ids), [0] * len(ids), "stop" if is_whole else "length")
