"""One episode of an agent that is not ours: its requests in, turns of the policy out, all of them kept in a tree.

A later request goes on from the tokens of the turn that its history begins with; only what came since is written by the chat
template and tokenised. If the run wants that, every request is written whole, as a server would, and goes on from a turn whose
tokens come out again. Everything here runs in the event loop of the rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarl.data.told import MediaKeeper
from megarl.errors import DataError, EpisodeError, MegarlError
from megarl.options.agents.messages import ChatRequest, RequestError, SaidCall, SessionMessage, as_json
from megarl.options.agents.stops import stopped
from megarl.options.agents.tree import Turn, TurnTree
from megarl.rollout.episodes.base import SampleTokens
from megarl.rollout.episodes.tool_calls import parse_turn
from megarl.rollout.episodes.turns import ToldTokens, TurnTemplate

History = Literal["tokens", "template"]
REFUSALS = 32
"""Requests beyond its limits that an agent may make before its episode is ended."""


@dataclass(frozen=True)
class SessionLimits:
    """Limits of one episode: `turns` of the policy, contexts of `context_tokens`, with `response_tokens` of them behind
    the beginning that the chat template wrote."""

    turns: int
    context_tokens: int
    response_tokens: int


@dataclass(eq=False)
class _PendingTurn:
    """A turn that is being sampled; `waiting` clients want it."""

    question: tuple[Turn | None, tuple[SessionMessage, ...], str]
    task: asyncio.Task[Turn]
    waiting: int = 0


class AgentSession:
    """The session of one agent."""

    def __init__(
        self,
        limits: SessionLimits,
        sample: SampleTokens,
        renderer: Callable[[Sequence[dict[str, Any]]], TurnTemplate],
        counts: Counter[str],
        history: History = "tokens",
        pictures: MediaKeeper | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """`renderer` gives the chat template for the tools of a request; `counts` are the run's, added to.

        `history`: whether what was sampled stays as it is in later requests (`tokens`), or is written anew (`template`).
        `pictures` keeps what requests show; None: the model takes no pictures. `template_args`: options of the chat template
        that the row has; those of a request go before them.
        """
        self._template_args = dict(template_args or {})
        self.pictures = pictures
        self._history = history
        self.limits, self.tree, self.counts = limits, TurnTree(), counts
        self.reward: float | None = None
        """Worth of the episode, as the agent said it."""
        self.conversations: dict[str, tuple[SessionMessage, ...]] = {}
        """Messages up to each response that a later request may name, without instructions, by its id."""
        self.is_cut = False
        """Whether the last that it asked for was beyond its limits."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what ends the episode: a failed engine, or an agent that floods."""
        self.loop = asyncio.get_running_loop()
        self._sample, self._renderer = sample, renderer
        self._pending: list[_PendingTurn] = []
        self._refused = 0
        self._is_closed = False

    async def answers(self, request: ChatRequest) -> list[Turn]:
        """The turns that follow the request's messages, as many as it wants. Cancelling the call leaves them to whoever asks
        the same again.

        Raises:
            RequestError: the request is beyond what the session allows.
        """
        if request.template_args:
            self._check_args(request)
        delivered = sum(turn.is_delivered for turn in self.tree.turns)
        if request.count > 1 and delivered + request.count > self.limits.turns:
            raise self._refusal(
                f"n is {request.count}, but the episode may have {self.limits.turns} turns, {delivered} of which are spent "
                "(rollout.episode.max_turns)",
                "turn_limit",
            )
        taken: list[Turn] = []
        turns = await asyncio.gather(*(self._answer(request, taken) for _ in range(request.count)))
        if request.log_probs:
            text_of = self._template(request).sampled_text
            for turn in turns:
                turn.token_texts = [text_of([token]) for token in turn.generation.response_ids]
        return turns

    async def _answer(self, request: ChatRequest, taken: list[Turn]) -> Turn:
        """One of them, none of `taken`."""
        if self._is_closed:
            raise RequestError("the episode of this key has ended", "episode_ended", 410)
        if request.messages[-1].role == "assistant":
            raise RequestError("the last message is the assistant's; it must be the user's or a tool's")
        parent, messages, tokens = self._placed(request)
        answers = [turn for turn in self.tree.answers(parent, messages, request.tools_key) if turn not in taken]
        question = (parent, messages, request.tools_key)
        pending = next((entry for entry in self._pending if entry.question == question and not entry.waiting), None)
        # first what has reached nobody, because its client went away; last what was sent but may not have arrived
        answer = next((turn for turn in answers if not turn.is_delivered), None)
        if answer is None and pending is None and request.is_retry and answers:
            answer = answers[-1]
        if answer is not None:
            taken.append(answer)
            return answer
        if pending is None:
            pending = self._begin(request, parent, messages, tokens)
        pending.waiting += 1
        try:
            return await asyncio.shield(pending.task)
        finally:
            pending.waiting -= 1

    def _template(self, request: ChatRequest) -> TurnTemplate:
        """The chat template for the request's tools, under its own options and the row's."""
        return self._renderer(request.tools).with_args({**self._template_args, **request.template_args})

    def _check_args(self, request: ChatRequest) -> None:
        from megarl.data.template_args import check_args

        try:
            check_args(self._renderer(request.tools).tokenizer, request.template_args, "chat_template_kwargs")
        except DataError as error:
            raise RequestError(f"{error}") from None

    async def settle(self) -> None:
        """Wait for the turns that are being sampled: an engine that hangs is found out, which `failure` tells."""
        if pending := [entry.task for entry in self._pending]:
            await asyncio.wait(pending)

    def close(self) -> None:
        """Refuse whatever comes from now on, and stop what is being sampled."""
        self._is_closed = True
        for pending in self._pending:
            pending.task.cancel()
        if not self.failure.done():
            self.failure.cancel()

    def _placed(self, request: ChatRequest) -> tuple[Turn | None, tuple[SessionMessage, ...], ToldTokens | None]:
        """The turn behind which the request goes on, the messages since then, and their tokens if all were written."""
        if self._history == "tokens":
            parent, known = self.tree.attach(request.messages, request.tools_key)
            return parent, request.messages[known:], None
        messages = [message.for_template(tool_name="") for message in request.messages]
        with _as_refusals():
            whole = self._template(request).conversation(messages)
        parent = self.tree.attach_ids(whole.ids, whole.media)
        if parent is None:
            return None, request.messages, whole
        known = len(parent.ids)
        later = [shown.moved(-known) for shown in whole.media if shown.place >= known]
        return parent, request.messages[min(parent.messages, len(messages) - 1) :], ToldTokens(whole.ids[known:], later)

    def _begin(
        self, request: ChatRequest, parent: Turn | None, told: tuple[SessionMessage, ...], tokens: ToldTokens | None
    ) -> _PendingTurn:
        self.counts["overridden_parameters"] += len(request.ignored)
        if len(self.tree.turns) + len(self._pending) >= self.limits.turns:
            raise self._refusal(f"the episode's {self.limits.turns} turns are spent (rollout.episode.max_turns)", "turn_limit")
        if tokens is None:
            tokens = self._told_tokens(request, parent, told)
        room = self._room(parent, len(tokens.ids))
        most = min(room, request.max_tokens or room)
        task = asyncio.ensure_future(self._take_turn(request, parent, told, tokens, most))
        pending = _PendingTurn((parent, told, request.tools_key), task)
        self._pending.append(pending)
        task.add_done_callback(lambda _: self._pending.remove(pending))
        self.is_cut = False
        return pending

    def _told_tokens(self, request: ChatRequest, parent: Turn | None, told: Sequence[SessionMessage]) -> ToldTokens:
        messages = [message.for_template() for message in told]
        with _as_refusals():
            renderer = self._template(request)
            if parent is None:
                return renderer.opening(messages)[1]
            return renderer.between(messages, parent.generation.response_ids[-1])

    def _room(self, parent: Turn | None, told_tokens: int) -> int:
        """Number of tokens that may follow `told_tokens` behind `parent`, at least 1."""
        before = len(parent.ids) if parent is not None else 0
        begun = before - len(parent.path[0].told_ids) + told_tokens if parent is not None else 0
        room = min(self.limits.context_tokens - before - told_tokens, self.limits.response_tokens - begun)
        if room < 1:
            raise self._refusal(
                f"the conversation has {before + told_tokens} tokens, which leaves no room for an answer: "
                f"data.max_prompt_tokens + rollout.max_new_tokens is {self.limits.context_tokens}, and at most "
                f"{self.limits.response_tokens} of these may follow its beginning",
                "context_length_exceeded",
            )
        return room

    def _refusal(self, message: str, code: str) -> RequestError:
        self.is_cut = True
        self._refused += 1
        if self._refused == REFUSALS:
            self.counts["floods"] += 1
            if not self.failure.done():
                self.failure.set_result(None)
        return RequestError(message, code)

    async def _take_turn(
        self, request: ChatRequest, parent: Turn | None, told: Sequence[SessionMessage], tokens: ToldTokens, most: int
    ) -> Turn:
        self.counts["turns"] += 1
        before, shown = (parent.ids, parent.media) if parent is not None else ([], [])
        shown += (picture.moved(len(before)) for picture in tokens.media)
        ends: dict[str, Any] = {"stops": request.stops} if request.stops else {}
        try:
            generation = await self._sample(before + tokens.ids, most, shown, **ends)
        except MegarlError as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise RequestError("the engine failed; the episode is begun anew", "engine_failed", 503) from error
        renderer = self._template(request)
        end = stopped(request.stops, generation.response_ids, renderer.sampled_text)
        text, by = (end.text, end.by) if end is not None else (renderer.turn_text(generation), None)
        message = self._said(text, request)
        return self.tree.add(parent, request.tools_key, told, tokens.ids, generation, message, by, tokens.media)

    def _said(self, text: str, request: ChatRequest) -> SessionMessage:
        """The turn as the client is told it. A call that cannot be made stays text, so that nobody makes it."""
        parts = parse_turn(text, request.tools)
        number = len(self.tree.turns)
        malformed = sum(bool(call.problem) for call in parts.calls)
        self.counts["malformed_calls"] += malformed
        self.counts["tool_calls"] += len(parts.calls) - malformed
        if malformed:
            return SessionMessage("assistant", text, reasoning=parts.reasoning)
        calls = tuple(
            SaidCall(call.name, as_json(call.arguments), f"call_{number}_{index}") for index, call in enumerate(parts.calls)
        )
        return SessionMessage("assistant", parts.text, calls, parts.reasoning)


@contextlib.contextmanager
def _as_refusals() -> Iterator[None]:
    try:
        yield
    except EpisodeError as error:
        raise RequestError(f"the chat template does not write these messages: {error}") from error
