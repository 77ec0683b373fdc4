"""An episode of two turns for `learning.py`: the same sum is asked twice, and each turn is worth a half."""

from __future__ import annotations

from megarl.data.sample import Prompt, Sample
from megarl.rollout.episodes.base import EpisodeContext, SampleTokens
from megarl.rollout.episodes.transcript import Transcript

TURN_TOKENS = 4


async def twice(prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext) -> Sample:
    """Two answers to one sum; the state before the second is whether the first was right."""
    transcript, state = Transcript(prompt, context.max_new_tokens), "asked"
    for turn in range(2):
        answer = await sample(transcript.ids, TURN_TOKENS, transcript.media)
        text = context.tokenizer.decode(answer.response_ids, skip_special_tokens=True)
        transcript.append_turn(answer, text, state)
        is_right = text.strip() == str(prompt.row["answer"]).strip()
        transcript.reward_turn(is_right / 2)
        state = "was right" if is_right else "was wrong"
        if turn == 0:
            told = [{"role": "user", "content": prompt.prompt_text}]
            transcript.append_observation(list(prompt.prompt_ids), told, prompt.media)
    return transcript.sample(prompt, number, answer.finish_reason, {"environment": sum(transcript.turn_rewards, 0.0)})
