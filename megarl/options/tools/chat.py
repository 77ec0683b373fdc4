"""A chat in which the policy may call tools: its turns end the episode, or call tools and are told the answers."""

from __future__ import annotations

import asyncio

from megarl.data.sample import Prompt, Sample
from megarl.options.tools.answers import ToolAnswer
from megarl.options.tools.source import CallTool
from megarl.rollout.episodes.base import EpisodeContext, SampleTokens
from megarl.rollout.episodes.tool_calls import ToolCall, parse_tool_calls
from megarl.rollout.episodes.transcript import Transcript
from megarl.rollout.episodes.turns import ToldMessage


async def chat_with_tools(prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext) -> Sample:
    """Turns of the policy until one calls no tool (`stop`), or tokens or turns are spent (`length`).

    The calls of one turn run at the same time. What no longer fits the budget, with a token of an answer, is not told: the
    last token of a response is always a sampled one.
    """
    assert context.tools is not None
    async with context.tools.begun(prompt.row) as call_tool:
        return await _chat(prompt, number, sample, context, call_tool)


async def _chat(prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext, call_tool: CallTool) -> Sample:
    assert context.chat is not None
    transcript = Transcript(prompt, context.max_new_tokens)
    for turn in range(1, context.max_turns + 1):
        generation, text = await transcript.take_turn(sample, context)
        if generation.finish_reason != "stop":
            return transcript.sample(prompt, number, generation.finish_reason)
        calls = parse_tool_calls(text)
        if not calls:
            return transcript.sample(prompt, number, "stop")
        if turn == context.max_turns:
            break
        answers = await asyncio.gather(*(_answer(call, place, context, call_tool) for place, call in enumerate(calls)))
        told = context.chat.between(answers, generation.response_ids[-1])
        if len(told.ids) >= transcript.room:
            break
        transcript.append_observation(told.ids, context.as_turns(answers), told.media)
    return transcript.sample(prompt, number, "length")


async def _answer(call: ToolCall, place: int, context: EpisodeContext, call_tool: CallTool) -> ToldMessage:
    """The message that answers `call`, whatever comes of it."""
    assert context.chat is not None
    assert context.tools is not None
    context.counts["tool_calls"] += 1
    if call.problem:
        context.counts["malformed_calls"] += 1
        answer = ToolAnswer.whole(f"error: {call.problem}")
    else:
        answer = await call_tool(call.name, call.arguments)
        if answer.failure is not None:
            context.counts[answer.failure] += 1
    told, was_cut = context.chat.cut(answer.told, context.tool_max_tokens, answer.characters)
    if was_cut:
        context.counts["tool_cuts"] += 1
    name = call.name if call.name in context.tools else "unknown"
    # Templates that want an id (Mistral) want nine letters or digits.
    return {"role": "tool", "name": name, "tool_call_id": f"call{place:05d}", "content": told}
