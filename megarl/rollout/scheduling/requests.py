"""From prompts to groups of samples on one engine: single turns as one plain request, anything else as episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from megarl.data.media import Media
from megarl.data.sample import Prompt, Sample
from megarl.rollout.engines.protocol import Generation, SamplingParams
from megarl.rollout.episodes import Episodes, SampleTokens
from megarl.rollout.episodes.single import single_sample
from megarl.rollout.scheduling.engine_state import EngineState, GenerateGroups


def single_turns(params: SamplingParams, n: int, deadline_s: float, tokenizer: Any) -> GenerateGroups:
    """`n` responses to each prompt."""

    async def generate_groups(engine: EngineState, prompts: Sequence[Prompt]) -> list[list[Sample]]:
        answers = await engine.generate(
            [prompt.prompt_ids for prompt in prompts],
            params,
            n=n,
            keys=[_key(prompt) for prompt in prompts],
            deadline_s=deadline_s,
            media=[prompt.media for prompt in prompts],
        )
        return [
            [single_sample(prompt, number, generation, tokenizer) for number, generation in enumerate(group)]
            for prompt, group in zip(prompts, answers, strict=True)
        ]

    return generate_groups


def episode_groups(kind: Episodes, params: SamplingParams, n: int, deadline_s: float) -> GenerateGroups:
    """`n` episodes for each prompt, all at once, the branches of each behind one another; `params` are those of every turn but
    for its number of tokens."""

    def sampler(engine: EngineState, prompt: Prompt, number: int) -> SampleTokens:
        asked: dict[int, set[int]] = {}

        async def sample(token_ids: list[int], max_new_tokens: int, media: Sequence[Media] | None = None, /) -> Generation:
            length = len(token_ids)
            numbers = asked.setdefault(length, set())  # branches of an agent may be equally long
            own = next(n for n in count() if n not in numbers)
            numbers.add(own)
            key = f"{_key(prompt)}/{number}/{length}{f'/{own}' if own else ''}"  # a seeded engine draws by it
            turn = replace(params, max_new_tokens=max_new_tokens)
            shown = [prompt.media if media is None else media]
            try:
                answer = await engine.generate([token_ids], turn, n=1, keys=[key], deadline_s=deadline_s, media=shown)
            except BaseException:
                numbers.discard(own)  # whoever asks again for what has not come draws the same
                raise
            return answer[0][0]

        return sample

    async def generate_groups(engine: EngineState, prompts: Sequence[Prompt]) -> list[list[Sample]]:
        tasks = [
            asyncio.ensure_future(kind.branches(prompt, number, sampler(engine, prompt, number)))
            for prompt in prompts
            for number in range(n)
        ]
        try:
            samples = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # where one failed, or nobody waits any more
        of_groups = (samples[start : start + n] for start in range(0, len(samples), n))
        return [[branch for branches in group for branch in branches] for group in of_groups]

    return generate_groups


def _key(prompt: Prompt) -> str:
    return prompt.group_id or prompt.row_id
