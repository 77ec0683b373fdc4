"""The tree of what one agent was told and what the policy said: histories that go on from the same tokens share them.

A turn is one generation. Its parent is the turn that its history goes on from, token for token; a history that begins
otherwise (a sub-agent, a compacted context, an edited message) begins at a root of its own, or branches off where it differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.data.media import Media
from megarl.options.agents.messages import SessionMessage
from megarl.rollout.engines.protocol import Generation


@dataclass(eq=False)
class Turn:
    """One generation. `told` are the messages between its parent's turn and this one, `told_ids` their tokens: behind the
    parent's last sampled token, or from the beginning of the context. `said` is the generation as the client was told it."""

    parent: Turn | None
    tools_key: str
    told: tuple[SessionMessage, ...]
    told_ids: list[int]
    generation: Generation
    said: SessionMessage
    number: int
    """Its place in the order in which turns ended, from 0."""
    stopped_by: str | int | None = None
    """The stop of its request that ended it."""
    token_texts: list[str] = field(default_factory=list, repr=False)
    """The text of each sampled token, if a client has asked for log-probs."""
    is_delivered: bool = False
    """Whether the client has got it: one that asks again before that has not."""
    children: list[Turn] = field(default_factory=list, repr=False)
    told_media: Sequence[Media] = ()
    """Pictures among `told_ids`, their places counted from the first of these."""

    @property
    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        turns, turn = [self], self.parent
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def messages(self) -> int:
        """Number of messages of its path, its own included."""
        return sum(len(turn.told) + 1 for turn in self.path)

    @property
    def ids(self) -> list[int]:
        """All tokens up to the end of this turn."""
        return [token for turn in self.path for token in (*turn.told_ids, *turn.generation.response_ids)]

    @property
    def media(self) -> list[Media]:
        """All pictures among these."""
        pictures, start = list[Media](), 0
        for turn in self.path:
            pictures += (shown.moved(start) for shown in turn.told_media)
            start += len(turn.told_ids) + len(turn.generation.response_ids)
        return pictures


@dataclass(frozen=True)
class Branch:
    """A path from a root to a leaf. `is_own` says of each of its turns whether it counts here: each turn counts in one
    branch."""

    turns: list[Turn]
    is_own: list[bool]


class TurnTree:
    """The turns of one session, in the order in which they ended."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def add(
        self,
        parent: Turn | None,
        tools_key: str,
        told: Sequence[SessionMessage],
        told_ids: list[int],
        generation: Generation,
        said: SessionMessage,
        stopped_by: str | int | None = None,
        told_media: Sequence[Media] = (),
    ) -> Turn:
        """A turn behind `parent`; None: it begins a context."""
        turn = Turn(
            parent, tools_key, tuple(told), told_ids, generation, said, len(self.turns), stopped_by, told_media=told_media
        )
        self.turns.append(turn)
        if parent is not None:
            parent.children.append(turn)
        return turn

    def attach(self, messages: Sequence[SessionMessage], tools_key: str) -> tuple[Turn | None, int]:
        """The deepest turn with whose path `messages` begin, and how many of them that path has; (None, 0): a new context.

        A turn with another set of tools is no beginning, because they are part of what the policy was told. Of turns that
        are equally deep and were told and said the same, it is the last one.
        """
        best: Turn | None = None
        length = 0
        reached: dict[Turn | None, int] = {None: 0}
        for turn in self.turns:  # parents come before their children
            start = reached.get(turn.parent)
            turn_messages = (*turn.told, turn.said)
            if start is None or turn.tools_key != tools_key or start + len(turn_messages) > len(messages):
                continue
            if all(
                message.is_same(other)
                for message, other in zip(turn_messages, messages[start : start + len(turn_messages)], strict=True)
            ):
                reached[turn] = start + len(turn_messages)
                if reached[turn] >= length:
                    best, length = turn, reached[turn]
        return best, length

    def attach_ids(self, ids: Sequence[int], media: Sequence[Media] = ()) -> Turn | None:
        """The deepest turn with all of whose tokens `ids` begin, and which was shown the pictures `media` among these; of equal
        ones the last. None: a new context."""
        best: Turn | None = None
        reached: dict[Turn | None, int] = {None: 0}
        for turn in self.turns:
            start = reached.get(turn.parent)
            turn_ids = [*turn.told_ids, *turn.generation.response_ids]
            if start is None or list(ids[start : start + len(turn_ids)]) != turn_ids:
                continue
            shown = [picture for picture in media if start <= picture.place < start + len(turn_ids)]
            if shown == [picture.moved(start) for picture in turn.told_media]:
                reached[turn] = start + len(turn_ids)
                if best is None or reached[turn] >= reached[best]:
                    best = turn
        return best

    def answers(self, parent: Turn | None, told: Sequence[SessionMessage], tools_key: str) -> list[Turn]:
        """The turns that answer this question, in the order in which they ended."""
        question = (parent, tools_key, tuple(told))
        return [turn for turn in self.turns if (turn.parent, turn.tools_key, turn.told) == question]

    def branches(self) -> list[Branch]:
        """A branch for every leaf, that of the last turn first; every turn is some branch's own, and of one only."""
        leaves = [turn for turn in reversed(self.turns) if not turn.children]
        counted: set[int] = set()
        branches: list[Branch] = []
        for leaf in leaves:
            path = leaf.path
            branches.append(Branch(path, [turn.number not in counted for turn in path]))
            counted |= {turn.number for turn in path}
        return branches
