"""Ends responses at stop texts and stop tokens, for engines that know them and for those that sample on.

The tokens up to a stop depend on them alone, so a response that is cut behind it is distributed as if sampling had ended there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.data.columns import cut
from megarl.data.stop_finder import Decode, ModelTexts, StopFinder
from megarl.rollout.engines.protocol import Generation, SamplingParams


@dataclass(frozen=True)
class Stops:
    """The ends of a turn beside where the policy ends it: behind any of `texts`, or of `token_ids`."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.texts or self.token_ids)

    def added_to(self, params: SamplingParams) -> SamplingParams:
        """Parameters with these stops beside their own."""
        if not self:
            return params
        texts, token_ids = params.stop + self.texts, params.stop_token_ids + self.token_ids
        return replace(params, stop=tuple(dict.fromkeys(texts)), stop_token_ids=tuple(dict.fromkeys(token_ids)))


NO_STOPS = Stops()


def ended_at_stops(
    prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Generation]], params: SamplingParams, texts: ModelTexts
) -> list[list[Generation]]:
    """Responses `[prompt][sample]` as an engine ends them that looks for `params.stop` behind every token."""
    decode = texts.decode()
    return [
        [ended_at_text(generation, len(prompt), params, decode) for generation in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def ended_at_text(generation: Generation, prompt_tokens: int, params: SamplingParams, decode: Decode) -> Generation:
    """The response up to the first token with which its text has one of `params.stop`; without one, as it is."""
    texts, ids = params.looked_for, generation.response_ids
    length = StopFinder(texts, decode).first(ids) if texts else None
    is_ended = length == len(ids) and (generation.finish_reason == "stop" or ids[-1] in params.cut_token_ids)
    return generation if length is None or is_ended else cut_behind(generation, prompt_tokens, length)


def cut_behind(whole: Generation, prompt_tokens: int, length: int) -> Generation:
    """The first `length` tokens of `whole`, as a response that ended there. Token columns are of passes under its last version
    alone."""
    versions, tokens = whole.weight_versions, prompt_tokens + length - 1
    return replace(
        whole,
        response_ids=whole.response_ids[:length],
        log_probs=whole.log_probs[:length],
        weight_versions=versions[:length],
        finish_reason="stop",
        extra=cut(whole.extra, tokens, known=tokens if versions[length - 1] == versions[-1] else 0),
    )
