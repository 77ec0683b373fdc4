"""Episodes in an environment, of a class of the user or of an OpenEnv server: `reset(prompt)` begins one, `step(text)` answers
each turn of the policy, both in words and pictures.

Both may be `async def`. What an environment raises ends the run, because its rewards would be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import math
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megarl.data.sample import EPISODE_REWARD, Prompt, Sample
from megarl.data.told import TEXT_AND_PICTURES, PicturedText, Pieces, pieces_of
from megarl.errors import DataError, EpisodeError, PictureError
from megarl.options.environments.openenv import OpenEnvironment
from megarl.options.environments.section import openenv_of
from megarl.rollout.episodes.base import EpisodeContext, SampleTokens
from megarl.rollout.episodes.build import EpisodeOpening
from megarl.rollout.episodes.transcript import Transcript
from megarl.rollout.episodes.turns import ToldMessage
from megarl.system.user_code import CLASS_FORMS, describe, load_user_function

STATE_KEY_CHARACTERS = 64
"""A longer name of a state is kept as its hash."""
LEFT_S = 10.0
"""For a method of an environment to return once its episode is cancelled, before the environment is closed."""


@dataclass(frozen=True)
class Environments:
    """The maker of each episode's environment, what the config calls it, and how many there may be at once."""

    make: Callable[[], Any]
    name: str
    at_once: AbstractAsyncContextManager[Any] = field(default_factory=contextlib.nullcontext)


async def in_environment(prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext) -> Sample:
    """Turns of the policy until the environment is done (`stop`), or tokens or turns are spent (`length`).

    A turn that was cut is no action: the environment does not see it, and gives it nothing. The rewards of all steps are summed
    under `environment` in the sample's rewards. What no longer fits the budget, with a token of an answer, is not told.
    """
    async with context.shared.at_once:
        return await _episode(prompt, number, sample, context)


async def _episode(prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext) -> Sample:
    chat = context.chat_of(prompt.row)
    environment = await _ask(context.shared.make, context.tool_timeout_s)
    try:
        prompt = await _opening(prompt, await _ask(environment.reset, context.tool_timeout_s, prompt), context)
        transcript = Transcript(prompt, context.max_new_tokens)
        finish_reason = "length"
        for turn in range(1, context.max_turns + 1):
            generation, text = await transcript.take_turn(sample, context, await _state_key(environment, context))
            if generation.finish_reason != "stop":
                finish_reason = generation.finish_reason
                break
            observation, gained, done = _checked(await _ask(environment.step, context.tool_timeout_s, text))
            transcript.reward_turn(gained)
            if done:
                finish_reason = "stop"
                break
            if turn == context.max_turns:
                break
            messages = _cut(await _messages(observation, prompt, context), context)
            tokens = chat.between(messages, generation.response_ids[-1])
            if len(tokens.ids) >= transcript.room:
                break
            transcript.append_observation(tokens.ids, context.as_turns(messages), tokens.media)
        return transcript.sample(prompt, number, finish_reason, {EPISODE_REWARD: sum(transcript.turn_rewards, 0.0)})
    finally:
        close = getattr(environment, "close", None)
        if close is not None:
            await _seen_through(_ask(close, context.tool_timeout_s))


async def _state_key(environment: Any, context: EpisodeContext) -> str | None:
    """A text that is equal for equal states of the environment: what its `state_key` says, or a hash of it if that is long."""
    ask = getattr(environment, "state_key", None)
    if ask is None:
        return None
    state = await _ask(ask, context.tool_timeout_s)
    try:
        key = json.dumps(state, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        raise EpisodeError(
            f"state_key of the environment {context.shared.name} returned {state!r:.80}; it must return text, a number, "
            "or lists and dictionaries of these"
        ) from None
    return key if len(key) <= STATE_KEY_CHARACTERS else hashlib.sha256(key.encode()).hexdigest()


async def _opening(prompt: Prompt, observation: Any, context: EpisodeContext) -> Prompt:
    """The prompt that an episode begins with: the one given if the environment says nothing of its own."""
    if observation is None:
        return prompt
    messages = await _messages(observation, prompt, context)
    system = context.system_prompt if messages[0]["role"] != "system" else None
    try:
        text, tokens = context.chat_of(prompt.row).opening(messages, system=system)
    except EpisodeError as error:
        raise EpisodeError(f"the environment {context.shared.name} cannot begin row {prompt.row_id}: {error}") from None
    if len(tokens.ids) > context.max_prompt_tokens:
        of_pictures = f", {sum(picture.tokens for picture in tokens.media)} of them for pictures" if tokens.media else ""
        raise EpisodeError(
            f"the environment begins row {prompt.row_id} with {len(tokens.ids)} tokens{of_pictures}, but "
            f"data.max_prompt_tokens is {context.max_prompt_tokens}; raise it, or say less in reset"
        )
    return replace(prompt, prompt_ids=tokens.ids, prompt_text=text, media=tokens.media)


async def _messages(observation: Any, prompt: Prompt, context: EpisodeContext) -> list[ToldMessage]:
    """An observation as chat messages, its pictures kept: what is no list of messages is one user message."""
    is_chat = isinstance(observation, list) and all(isinstance(entry, dict) and "role" in entry for entry in observation)
    messages = observation if is_chat else [{"role": "user", "content": observation}]
    try:
        contents = [_pieces(message["content"]) for message in messages if isinstance(message["role"], str)]
    except PictureError as error:
        raise _of_pictures(prompt, context, error) from error
    except KeyError:
        contents = []
    if not contents or len(contents) < len(messages) or any(pieces is None for pieces in contents):
        raise EpisodeError(
            f"the environment observed a {type(observation).__name__}; it must be text or a list of chat messages, each "
            "with 'role' and 'content', or text with pictures: {'text': ..., 'images': [...]}"
        )
    told_messages: list[ToldMessage] = []
    for message, pieces in zip(messages, contents, strict=True):
        told_messages.append({**message, "content": await _kept(pieces or [], prompt, context)})
    return told_messages


def _pieces(content: Any) -> Pieces | None:
    if isinstance(content, str):
        return [content]
    pieces = pieces_of(content)
    if pieces is None and isinstance(content, dict) and content.keys() <= TEXT_AND_PICTURES and "text" in content:
        return _pieces(content["text"])  # a step without pictures, in the form of those with some
    return pieces


async def _kept(pieces: Pieces, prompt: Prompt, context: EpisodeContext) -> PicturedText:
    if all(isinstance(piece, str) for piece in pieces):
        return PicturedText("".join(map(str, pieces)))
    if context.pictures is None:
        raise _of_pictures(prompt, context, "the model takes none; train a vision-language model")
    try:
        return await asyncio.to_thread(context.pictures.kept, pieces)
    except PictureError as error:
        raise _of_pictures(prompt, context, error) from error
    except DataError as error:
        raise EpisodeError(str(error)) from error


def _of_pictures(prompt: Prompt, context: EpisodeContext, why: PictureError | str) -> EpisodeError:
    return EpisodeError(f"the environment {context.shared.name} shows row {prompt.row_id} what cannot be shown: {why}")


def _cut(messages: list[ToldMessage], context: EpisodeContext) -> list[ToldMessage]:
    """`messages`, none with a text longer than `tool_max_tokens`."""
    assert context.chat is not None
    texts = [context.chat.cut(message["content"], context.tool_max_tokens) for message in messages]
    context.counts["tool_cuts"] += sum(was_cut for _, was_cut in texts)
    return [{**message, "content": text} for message, (text, _) in zip(messages, texts, strict=True)]


def _checked(answer: Any) -> tuple[Any, float, bool]:
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise EpisodeError(f"step returned a {type(answer).__name__}; it must return (observation, reward, done)")
    observation, reward, done = answer
    if hasattr(reward, "item"):  # NumPy scalars and 0-d tensors
        reward = reward.item()
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise EpisodeError(f"step returned the reward {reward!r:.80}; it must be a finite number")
    return observation, float(reward), bool(done)


async def _seen_through(closing: Coroutine[Any, Any, Any]) -> None:
    """Wait for `closing`, also where that is cancelled: whoever has a place for another environment must not give it away
    before. Its failure is none: nothing depends on it, and it may follow another error."""
    work = asyncio.ensure_future(closing)
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


async def _ask(function: Callable[..., Any], timeout_s: float, *arguments: Any) -> Any:
    """Call `function` where it cannot stop the event loop: what is no `async def` in a thread, left behind if it hangs.

    A caller that is cancelled waits for that thread for `LEFT_S`: two threads in one environment are more than its author
    thought of.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            outcome = _in_thread(function, *arguments)
            try:
                return await asyncio.shield(outcome)
            except asyncio.CancelledError:
                if not deadline.expired():
                    await asyncio.wait([outcome], timeout=LEFT_S)
                raise
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            raise EpisodeError(
                f"the environment's {name} did not return within rollout.episode.tool_timeout_s = {timeout_s:g} s"
            ) from None
        raise EpisodeError(f"the environment's {name} raised {describe(error)}") from error


def _in_thread(function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
    """`function(*arguments)` in a daemon thread of its own, which keeps nobody from ending."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    outcome.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever waited may have gone away

    def settle(result: Any, error: BaseException | None) -> None:
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            failure = error if not isinstance(error, StopIteration) else RuntimeError("StopIteration")
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return outcome


KINDS = {"environment": "megarl.options.environments.episode:in_environment"}


def open_part(opening: EpisodeOpening) -> None:
    """Make ready how each episode's environment is made.

    Raises:
        EpisodeError: the class is not there.
    """
    settings = opening.settings
    if settings.kind != "environment":
        return
    openenv = openenv_of(settings)
    if openenv.url:
        at_once = asyncio.Semaphore(openenv.at_once)
        opening.context.shared = Environments(partial(OpenEnvironment, openenv), f"at {openenv.url}", at_once)
        return
    if len(settings.tools) != 1:
        raise EpisodeError(
            f"rollout.episode.tools has {len(settings.tools)} names, but rollout.episode.kind = 'environment' needs one: "
            f"the environment as {CLASS_FORMS}"
        )
    opening.context.shared = Environments(load_user_function(settings.tools[0], EpisodeError), settings.tools[0])
