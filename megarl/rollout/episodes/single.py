"""The plain episode: one prompt, one response."""

from __future__ import annotations

from typing import Any

from megarl.data.sample import Prompt, Sample
from megarl.rollout.engines.protocol import Generation
from megarl.rollout.episodes.base import EpisodeContext, SampleTokens
from megarl.rollout.episodes.transcript import Transcript


async def single_turn(prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext) -> Sample:
    """One response to `prompt`."""
    generation = await sample(list(prompt.prompt_ids), context.max_new_tokens)
    return single_sample(prompt, number, generation, context.tokenizer)


def single_sample(prompt: Prompt, number: int, generation: Generation, tokenizer: Any) -> Sample:
    """One sampled response as sample `number` of the group that `prompt` names."""
    transcript = Transcript(prompt, len(generation.response_ids))
    transcript.append_turn(generation, tokenizer.decode(generation.response_ids, skip_special_tokens=True))
    return transcript.sample(prompt, number, generation.finish_reason)
