"""Agents of the tests: they ask the endpoint as the public `openai` package does, well and badly."""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from pathlib import Path

import openai

from megarl.options.agents.task import AgentTask

MESSAGES = [{"role": "user", "content": "hello"}]


async def two_turns(task: AgentTask) -> float:
    """One conversation of two turns, which it rewards by the question's length."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages: list[dict[str, object]] = [{"role": "user", "content": task.prompt}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=task.model, messages=messages)  # type: ignore[arg-type]
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
    return float(len(task.prompt))


def one_turn(task: AgentTask) -> None:
    """The same in a `def`, one turn, streamed."""
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    stream = client.chat.completions.create(model=task.model, messages=MESSAGES, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


async def never_ends(task: AgentTask) -> None:
    """One turn, and then nothing, whoever cancels it."""
    await two_turns(task)
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            time.sleep(600)


async def floods(task: AgentTask) -> None:
    """Asks on and on, whatever it is told."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        while True:
            try:
                await client.chat.completions.create(model=task.model, messages=MESSAGES)  # type: ignore[arg-type]
            except openai.BadRequestError:
                continue


async def another_model(task: AgentTask) -> None:
    """Asks for a model that is not there, then gives up."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        await client.chat.completions.create(model="gpt-4o", messages=MESSAGES)  # type: ignore[arg-type]


async def asks_nothing(task: AgentTask) -> None:
    """Ends at once."""


async def dies(task: AgentTask) -> None:
    """Takes its process with it after a turn."""
    await two_turns(task)
    os._exit(7)


async def dies_once(task: AgentTask) -> float:
    """Takes its process with it after its turns, unless it has done so before."""
    reward = await two_turns(task)
    if not os.path.exists(task.row["marker"]):
        Path(task.row["marker"]).touch()
        os._exit(7)
    return reward


def strangers(task: AgentTask) -> None:
    """A request with a key that is nobody's."""
    asked = urllib.request.Request(f"{task.base_url}/models", headers={"Authorization": "Bearer megarl-guess"})
    urllib.request.urlopen(asked)
