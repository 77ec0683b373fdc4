"""From prompts to groups of samples on one engine, where each response is a single turn (else `episode_requests.py`)."""

from __future__ import annotations

from typing import Any

from megarl.data.sample import Prompt, Sample
from megarl.data.stored import StoredGeneration, StoredSample
from megarl.rollout.engines.protocol import EngineRequest, SamplingParams
from megarl.rollout.engines.stored_turns import SampledTurn
from megarl.rollout.episodes.single import single_sample
from megarl.rollout.scheduling.engine_state import AskedGroups, GenerateGroups, prompt_key
from megarl.rollout.scheduling.partial_groups import turn_names


def single_turns(params: SamplingParams, n: int, deadline_s: float, tokenizer: Any, *, stored: bool = False) -> GenerateGroups:
    """`n` responses to each prompt. `stored`: engines are asked to keep the tokens where they are."""

    async def generate_groups(groups: AskedGroups) -> list[list[Sample]]:
        prompts = groups.prompts
        request = EngineRequest(
            [prompt.prompt_ids for prompt in prompts],
            params,
            n=n,
            keys=[prompt_key(prompt) for prompt in prompts],
            deadline_s=deadline_s,
            media=[prompt.media for prompt in prompts],
            stored=stored,
        )
        names = [turn_names(n, prompt.prompt_ids) for prompt in prompts] if groups.partial is not None else []
        answers = await groups.generate(request, names=names, groups=range(len(prompts)))
        return [
            [_sample(prompt, number, turn, tokenizer) for number, turn in enumerate(group)]
            for prompt, group in zip(prompts, answers, strict=True)
        ]

    return generate_groups


def _sample(prompt: Prompt, number: int, turn: SampledTurn, tokenizer: Any) -> Sample:
    if isinstance(turn, StoredGeneration):
        return StoredSample(prompt, number, turn)
    return single_sample(prompt, number, turn, tokenizer)
