"""From prompts to groups of samples on one engine, by episodes of several turns: a request for each turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from megarl.data.media import Media
from megarl.data.sample import Sample
from megarl.experience.inputs import OpenedEpisodes
from megarl.rollout.engines.protocol import EngineRequest, Generation, SamplingParams
from megarl.rollout.engines.stops import NO_STOPS, Stops
from megarl.rollout.engines.stored_turns import loaded
from megarl.rollout.episodes import SampleTokens
from megarl.rollout.scheduling.engine_state import AskedGroups, GenerateGroups, prompt_key
from megarl.rollout.scheduling.partial_groups import turn_name


def episode_groups(kind: OpenedEpisodes, params: SamplingParams, n: int, deadline_s: float) -> GenerateGroups:
    """`n` episodes for each prompt, all at once, the branches of each behind one another; `params` are those of every turn but
    for its number of tokens."""

    def sampler(groups: AskedGroups, place: int, number: int) -> SampleTokens:
        prompt = groups.prompts[place]
        numbers_taken: dict[int | str, set[int]] = {}

        async def sample(
            token_ids: list[int], max_new_tokens: int, media: Sequence[Media] | None = None, /, stops: Stops = NO_STOPS
        ) -> Generation:
            length, same = len(token_ids), turn_name(number, token_ids)
            of_length, of_same = numbers_taken.setdefault(length, set()), numbers_taken.setdefault(same, set())
            ordinal, again = _taken(of_length), _taken(of_same)  # branches of an agent may be equally long, or equal
            try:
                request = EngineRequest(
                    [token_ids],
                    stops.added_to(replace(params, max_new_tokens=max_new_tokens)),
                    keys=[
                        f"{prompt_key(prompt)}/{number}/{length}{f'/{ordinal}' if ordinal else ''}"
                    ],  # a seeded engine draws by it
                    deadline_s=deadline_s,
                    media=[prompt.media if media is None else media],
                    conversation=f"{prompt_key(prompt)}/{number}",
                )
                answer = await groups.generate(request, names=[[turn_name(number, token_ids, again)]], groups=[place])
            except BaseException:
                of_length.discard(ordinal)  # whoever asks again for what has not come draws the same
                of_same.discard(again)
                raise
            return loaded(answer[0][0])

        return sample

    async def generate_groups(groups: AskedGroups) -> list[list[Sample]]:
        async def episode(place: int, number: int) -> list[Sample]:
            of_episode = await kind.branches(groups.prompts[place], number, sampler(groups, place, number))
            await groups.engine.end_conversations([f"{prompt_key(groups.prompts[place])}/{number}"])
            groups.count_ended(1)
            return of_episode

        places = [(place, number) for place in range(len(groups.prompts)) for number in range(n)]
        tasks = [asyncio.ensure_future(episode(*where)) for where in places]
        try:
            samples = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()  # one failed, or nobody waits any more
            await groups.engine.end_conversations([f"{prompt_key(groups.prompts[place])}/{number}" for place, number in places])
            raise
        of_groups = (samples[start : start + n] for start in range(0, len(samples), n))
        return [[branch for branches in group for branch in branches] for group in of_groups]

    return generate_groups


def _taken(numbers: set[int]) -> int:
    """The smallest number that is not among `numbers`, which it is now."""
    smallest = next(number for number in count() if number not in numbers)
    numbers.add(smallest)
    return smallest
