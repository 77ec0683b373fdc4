"""The tokens of one episode as they come about: what the policy sampled, and what it was told in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.columns import joined, of_episode, of_tokens
from megarl.data.media import Media
from megarl.data.prefills import NO_PREFILLS
from megarl.data.sample import Prompt, Sample
from megarl.rollout.engines.protocol import Generation
from megarl.rollout.episodes.base import EpisodeContext, SampleTokens


class Transcript:
    """Grows turn by turn; token in, token out: nothing in it is ever tokenised again."""

    def __init__(self, prompt: Prompt, max_new_tokens: int) -> None:
        """`max_new_tokens` bounds all tokens behind the prompt."""
        self.prompt_ids, self.media = list(prompt.prompt_ids), list(prompt.media)
        self.max_new_tokens = max_new_tokens
        self.response_ids: list[int] = []
        self.sampled_mask: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.turns: list[dict[str, Any]] = []
        self.turn_rewards: list[float] = []
        self.turn_states: list[str] = []
        self.prefill = NO_PREFILLS
        self._extra: dict[str, Any] = {}

    @property
    def ids(self) -> list[int]:
        """Everything so far, prompt included: what the next turn follows."""
        return self.prompt_ids + self.response_ids

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.max_new_tokens - len(self.response_ids)

    def append_turn(self, generation: Generation, text: str, state: str | None = None) -> None:
        """Take over a turn of the policy, token for token; `text` is for readers and rewards.

        `state` is a key of the state that the turn was taken in, equal for equal states; None: nobody knows.
        """
        self._take_extra(generation, generation.extra)
        self.response_ids += generation.response_ids
        self.sampled_mask += [1] * len(generation.response_ids)
        self.log_probs += generation.log_probs
        self.versions += generation.weight_versions
        self.prefill += generation.prefill
        self.turns.append({"role": "assistant", "content": text})
        if generation.response_ids:
            self.turn_rewards.append(0.0)
            self.turn_states += [] if state is None else [state]

    def append_earlier_turn(self, generation: Generation, text: str) -> None:
        """Take over a turn of the policy that counts elsewhere: masked, its log-probs 0."""
        self._take_extra(generation, of_tokens(generation.extra))
        self.response_ids += generation.response_ids
        self.sampled_mask += [0] * len(generation.response_ids)
        self.log_probs += [0.0] * len(generation.response_ids)
        self.versions += generation.weight_versions
        self.turns.append({"role": "assistant", "content": text})

    def _take_extra(self, generation: Generation, extra: Mapping[str, Any]) -> None:
        """Take over the columns `extra` of a turn, those of tokens for everything before it, too; `versions` end before it."""
        same_weights = not generation.weight_versions or self.versions[-1:] == generation.weight_versions[-1:]
        self._extra = joined(self._extra, extra, same_weights=same_weights)

    def reward_turn(self, gained: float) -> None:
        """Add `gained` to what the last turn was given."""
        self.turn_rewards[-1] += gained

    async def take_turn(
        self, sample: SampleTokens, context: EpisodeContext, state: str | None = None
    ) -> tuple[Generation, str]:
        """Let the policy take a turn of a conversation, in `state`, take it over, and return it with its text."""
        assert context.chat is not None
        generation = await sample(self.ids, self.room, self.media)
        context.counts["turns"] += 1
        text = context.chat.turn_text(generation)
        self.append_turn(generation, text, state)
        return generation, text

    def append_observation(self, ids: list[int], turns: list[dict[str, Any]], media: Sequence[Media] = ()) -> None:
        """Take over what the policy is told: masked, log-prob 0, under the version of the token before.

        `media` are the pictures among `ids`, their places counted from the first of these.
        """
        start = len(self.ids)
        self.media += (shown.moved(start) for shown in media)
        self.response_ids += ids
        self.sampled_mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)
        self.turns += turns

    def sample(self, prompt: Prompt, number: int, finish_reason: str, rewards: dict[str, float] | None = None) -> Sample:
        """The episode as sample `number` of the group that `prompt` names; its text is that of the last turn."""
        group_id = prompt.group_id or prompt.row_id
        return Sample(
            sample_id=f"{group_id}/{number}",
            group_id=group_id,
            row_id=prompt.row_id,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            sampled_mask=self.sampled_mask,
            rollout_log_probs=self.log_probs,
            weight_versions=self.versions,
            finish_reason=finish_reason,
            prompt_text=prompt.prompt_text,
            response_text=next((turn["content"] for turn in reversed(self.turns) if turn["role"] == "assistant"), ""),
            rewards=dict(rewards or {}),
            row=prompt.row,
            turns=self.turns if len(self.turns) > 1 else [],
            turn_rewards=self.turn_rewards if any(self.turn_rewards) else [],
            turn_states=self.turn_states if len(self.turn_states) == len(self.turn_rewards) else [],
            media=self.media,
            extra=of_episode(self._extra, len(self.prompt_ids), self.sampled_mask, self.versions),
            prefill=self.prefill,
        )
