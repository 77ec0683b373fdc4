"""Episodes: an async function from a prompt to a Sample, and what it is given to sample with and to keep to.

An episode asks its `SampleTokens` for tokens as often as it needs. It never asks for what it already has, never turns sampled
ids into text and back, and marks every token that the policy did not sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megarl.data.media import Media
from megarl.data.sample import Prompt, Sample
from megarl.data.told import MediaKeeper
from megarl.errors import EpisodeError, nearest
from megarl.option_list import parts
from megarl.rollout.engines.protocol import Generation
from megarl.system.user_code import FORMS, load_user_function

if TYPE_CHECKING:
    from megarl.rollout.episodes.turns import ToldMessage, TurnTemplate


class SampleTokens(Protocol):
    """Samples a turn. All turns of an episode, and all episodes of a group, ask the same engine under the same sampling
    parameters; the weights may change between two tokens."""

    async def __call__(self, ids: list[int], max_new_tokens: int, media: Sequence[Media] | None = None, /) -> Generation:
        """At most `max_new_tokens` (1 or more) tokens that follow `ids`, which are all tokens so far, prompt included.

        `media` are the pictures among `ids`; None: those of the prompt that the episode was given. The answer includes the end
        token, if one was sampled.
        """
        ...


@dataclass
class EpisodeContext:
    """The things that all episodes of a run share; `open_episodes` makes it."""

    tokenizer: Any
    max_prompt_tokens: int
    """Longest prompt that an environment may begin with."""
    max_new_tokens: int
    """Longest response: all turns together, with what tools and environments said."""
    max_turns: int = 1
    """Turns that the policy may take; an episode that wants more is cut like one that is out of tokens."""
    tool_timeout_s: float = 10.0
    """Seconds for one tool call, or one `reset` or `step` of an environment."""
    tool_max_tokens: int = 1024
    """Tokens of one answer of a tool or an environment; what is longer is cut, and says so."""
    chat: TurnTemplate | None = None
    """Text between turns; None where there is one turn."""
    tools: ToolSet | None = None
    shared: Any = None
    """Things that the episodes of an option's kind share, such as how an environment is made; its `close`, if any, ends it."""
    pictures: MediaKeeper | None = None
    """Keeps what tools and environments show; None: the model takes no pictures."""
    system_prompt: str | None = None
    """System message before what an environment begins with."""
    choices: list[str] = field(default_factory=list)
    """Choices made where the config leaves them open, for the run to tell at its start."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often what happened since `take_counts`: `turns`, `tool_calls`, `tool_errors`, `tool_timeouts`, `tool_cuts` and
    `malformed_calls`."""

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as the chat template's `tools=` takes them; prompts are rendered with them."""
        return self.tools.schemas if self.tools is not None else []

    def chat_of(self, row: Mapping[str, Any]) -> TurnTemplate:
        """`chat` under the row's own options of the chat template."""
        assert self.chat is not None, "the kind of episode has turns"
        if row.get("template_args") is None:
            return self.chat
        from megarl.data.template_args import args_of_row

        return self.chat.with_args(args_of_row(row["template_args"], "the row"))

    def as_turns(self, messages: Sequence[ToldMessage]) -> list[dict[str, Any]]:
        """Messages as `Sample.turns` has them: pictures by the paths of their kept files."""
        folder = self.pictures.media_folder if self.pictures is not None else Path()
        return [{**message, "content": message["content"].content(folder)} for message in messages]

    def take_counts(self) -> dict[str, int]:
        """The counts since the last call."""
        taken, self.counts = self.counts, Counter()
        return dict(taken)

    def close(self) -> None:
        """End what the episodes started."""
        for started in (self.tools, self.shared):
            close = getattr(started, "close", None)
            if close is not None:
                close()


class ToolSet(Protocol):
    """The tools of a run, which episodes may call."""

    schemas: list[dict[str, Any]]
    """As the chat template's `tools=` takes them."""

    def __contains__(self, name: object) -> bool: ...

    def begun(self, row: Mapping[str, Any]) -> AbstractAsyncContextManager[Any]:
        """The tools of one episode, on a prompt's row, as a function `call(name, arguments)`; what they keep goes with the
        block."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call the tool called `name` and give its answer to `arguments`, in an episode of this call's own."""
        ...

    def close(self) -> None:
        """End what the tools run in."""
        ...


class Episode(Protocol):
    """The async function that a kind of episode is."""

    async def __call__(
        self, prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext
    ) -> Sample | list[Sample]:
        """Sample number `number` of the group that `prompt` names; a list has its branches, in which `branch_of` names the
        first.

        It may be cancelled at any await, and begun anew with the same arguments.

        Raises:
            EngineError: from `sample`, passed on.
            EpisodeError: what the user wrote for the episode (an environment) failed.
        """
        ...


def kinds_of_episode() -> dict[str, str]:
    """Kinds of episode by name, as import paths, so that a run imports what it uses."""
    kinds = {"single": "megarl.rollout.episodes.single:single_turn"}
    for module in parts("episode"):
        kinds |= module.KINDS
    return kinds


def load_episode(kind: str) -> Episode:
    """The episode called `kind`: a built-in one, or the user's own as `package.module:function` or `path/to/file.py:function`.

    Raises:
        EpisodeError: there is no such kind, or the function cannot be imported.
    """
    built_in = kinds_of_episode()
    if kind in built_in:
        return load_user_function(built_in[kind], EpisodeError)  # type: ignore[return-value]
    if ":" not in kind:
        raise EpisodeError(
            f"rollout.episode.kind is '{kind}'{nearest(kind, built_in)}; it must be {', '.join(built_in)}, {FORMS}"
        )
    return load_user_function(kind, EpisodeError)  # type: ignore[return-value]
