"""The plain episode: one prompt, one response."""

from __future__ import annotations

from megarl.data.sample import Prompt, Sample
from megarl.rollout.episodes.base import EpisodeContext, Sampler
from megarl.rollout.episodes.transcript import Transcript


async def single_turn(prompt: Prompt, number: int, sample: Sampler, context: EpisodeContext) -> Sample:
    """One response to `prompt`."""
    transcript = Transcript(prompt.prompt_ids, context.max_new_tokens)
    generation = await sample(transcript.ids, transcript.room)
    transcript.sampled(generation, context.tokenizer.decode(generation.response_ids, skip_special_tokens=True))
    return transcript.sample(prompt, number, generation.finish_reason)
