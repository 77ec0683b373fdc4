"""Opens the kind of episode that a config names: its function, and what all its episodes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.config.sections import DataConfig
from megarl.data.chat import choose_template
from megarl.data.row_media import ModelMedia
from megarl.data.sample import Prompt, Sample
from megarl.errors import EpisodeError
from megarl.option_list import functions
from megarl.rollout.episodes.base import Episode, EpisodeContext, SampleTokens, kinds_of_episode, load_episode
from megarl.rollout.episodes.turns import TurnTemplate


class EpisodeSettings(Protocol):
    """The part that `open_episodes` reads of `rollout.episode`; options read their own sections of it."""

    @property
    def kind(self) -> str: ...
    @property
    def tools(self) -> Sequence[str]: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def tool_timeout_s(self) -> float: ...
    @property
    def tool_max_tokens(self) -> int: ...


@dataclass(frozen=True)
class EpisodeOpening:
    """The values with which an option opens its part of a run's episodes."""

    settings: Any
    """The section `rollout.episode`."""
    context: EpisodeContext
    prompt_key: str
    pictures: ModelMedia | None
    template_args: Mapping[str, Any]
    """Options of the chat template."""
    ignore_fields: Sequence[str]
    """Keys of messages that it may leave out."""


@dataclass(frozen=True)
class Episodes:
    """All episodes of a run: the function of one of them, and what they share. `close` when the run ends."""

    function: Episode
    context: EpisodeContext

    async def branches(self, prompt: Prompt, number: int, sample: SampleTokens) -> list[Sample]:
        """Episode `number` of the group that `prompt` names: its branches, which is one of it but for agents."""
        branches = await self.function(prompt, number, sample, self.context)
        return branches if isinstance(branches, list) else [branches]

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as the chat template's `tools=` takes them; prompts must have been built with them."""
        return self.context.tool_schemas

    @property
    def choices(self) -> list[str]:
        """Lines that say what was chosen for the user."""
        return self.context.choices

    def take_counts(self) -> dict[str, int]:
        """Counts of events since the last call."""
        return self.context.take_counts()

    def close(self) -> None:
        """End what the episodes started."""
        self.context.close()


def open_episodes(
    settings: EpisodeSettings,
    data: DataConfig,
    tokenizer: Any,
    max_new_tokens: int,
    pictures: ModelMedia | None = None,
) -> Episodes:
    """The episodes that the config's section `rollout.episode` names; the model takes `pictures`, or none.

    The prompts of episodes with tools must have been built with `tool_schemas`. An episode of the user's own gets
    tools if it names some, and turns if the tokenizer has a chat template.

    Raises:
        EpisodeError: there is no such kind, a tool or an environment cannot be imported, or the tokenizer's chat template
            does not serve the kind.
    """
    choose_template(tokenizer, data.chat_template)
    kind, timeout_s = settings.kind, settings.tool_timeout_s
    episode = load_episode(kind)
    context = EpisodeContext(
        tokenizer,
        data.max_prompt_tokens,
        max_new_tokens,
        settings.max_turns,
        timeout_s,
        settings.tool_max_tokens,
        system_prompt=data.system_prompt,
        pictures=pictures.keeper(data.image_folder) if pictures is not None else None,
    )
    if kind == "single":
        return Episodes(episode, context)
    built_in = kinds_of_episode()
    if kind in built_in and data.chat_template == "never":
        raise EpisodeError(f"data.chat_template is 'never', but rollout.episode.kind is '{kind}', whose turns are a chat")
    opening = EpisodeOpening(settings, context, data.prompt_key, pictures, data.template_args, data.ignore_fields)
    for open_part in functions("episode", "open_part"):
        open_part(opening)
    if kind in built_in or tokenizer.chat_template:
        observation_role = "tool" if context.tools is not None else "user"
        context.chat = TurnTemplate(tokenizer, context.tool_schemas, observation_role, pictures, data.template_args)
    return Episodes(episode, context)
