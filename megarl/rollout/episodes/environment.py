"""Episodes in an environment of the user's: `reset(prompt)` begins one, `step(text)` answers each turn of the policy.

Both may be `async def`. What an environment raises ends the run, because its rewards would be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megarl.data.sample import Prompt, Sample
from megarl.errors import EpisodeError
from megarl.rollout.episodes.base import EpisodeContext, SampleTokens
from megarl.rollout.episodes.transcript import Transcript
from megarl.rollout.episodes.turns import TextMessage
from megarl.system.user_code import describe

REWARD = "environment"
"""Where an episode's summed rewards are in `Sample.rewards`."""


async def in_environment(prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext) -> Sample:
    """Turns of the policy until the environment is done (`stop`), or tokens or turns are spent (`length`).

    A turn that was cut is no action: the environment does not see it. The rewards of all steps are summed under
    `environment` in the sample's rewards. What no longer fits the budget, with a token of an answer, is not told.
    """
    assert context.chat is not None
    assert context.environment is not None
    environment = await _ask(context.environment, context.tool_timeout_s)
    try:
        prompt = _opening(prompt, await _ask(environment.reset, context.tool_timeout_s, prompt), context)
        transcript = Transcript(prompt.prompt_ids, context.max_new_tokens)
        reward, finish_reason = 0.0, "length"
        for turn in range(1, context.max_turns + 1):
            generation, text = await transcript.take_turn(sample, context)
            if generation.finish_reason != "stop":
                finish_reason = generation.finish_reason
                break
            observation, gained, done = _checked(await _ask(environment.step, context.tool_timeout_s, text))
            reward += gained
            if done:
                finish_reason = "stop"
                break
            told = _cut(_messages(observation), context)
            ids = context.chat.between(told, generation.response_ids[-1])
            if turn == context.max_turns or len(ids) >= transcript.room:
                break
            transcript.append_observation(ids, told)
        return transcript.sample(prompt, number, finish_reason, {REWARD: reward})
    finally:
        close = getattr(environment, "close", None)
        if close is not None:
            with contextlib.suppress(EpisodeError):  # nothing depends on it, and it may follow another error
                await asyncio.shield(_ask(close, context.tool_timeout_s))


def _opening(prompt: Prompt, observation: Any, context: EpisodeContext) -> Prompt:
    """The prompt that an episode begins with: the one given if the environment says nothing of its own."""
    if observation is None:
        return prompt
    assert context.chat is not None
    if prompt.media:
        raise EpisodeError(
            f"the environment begins row {prompt.row_id} in its own words, but the row shows {len(prompt.media)} pictures; "
            "reset must return None for rows with pictures"
        )
    messages = _messages(observation)
    if context.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": context.system_prompt}, *messages]
    text, ids = context.chat.opening(messages)
    if len(ids) > context.max_prompt_tokens:
        raise EpisodeError(
            f"the environment begins row {prompt.row_id} with {len(ids)} tokens, but data.max_prompt_tokens is "
            f"{context.max_prompt_tokens}; raise it, or say less in reset"
        )
    return replace(prompt, prompt_ids=ids, prompt_text=text)


def _messages(observation: Any) -> list[TextMessage]:
    """An observation as chat messages: text is one user message."""
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise EpisodeError(
            f"the environment observed a {type(observation).__name__}; it must be text or a list of chat messages, each "
            "with 'role' and 'content' as text"
        )
    return messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _cut(messages: list[TextMessage], context: EpisodeContext) -> list[TextMessage]:
    """`messages`, none longer than `tool_max_tokens`."""
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


async def _ask(function: Callable[..., Any], timeout_s: float, *arguments: Any) -> Any:
    """Call `function` where it cannot stop the event loop: what is no `async def` in a thread, left behind if it hangs."""
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            return await _in_thread(function, *arguments)
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

    def settle(result: Any, error: BaseException | None) -> None:
        if outcome.done():  # nobody waits any more
            return
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
