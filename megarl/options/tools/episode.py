"""Episodes with tools: a chat whose turns end it, or call functions, sandboxes and MCP servers and are told the answers."""

from __future__ import annotations

import asyncio

from megarl.data.sample import Prompt, Sample
from megarl.errors import EpisodeError
from megarl.option_list import part
from megarl.options.tools import mcp_servers
from megarl.options.tools.answers import ToolAnswer
from megarl.options.tools.functions import FunctionTools
from megarl.options.tools.sandbox_tools import PREFIX, SandboxTools
from megarl.options.tools.section import servers_of
from megarl.options.tools.toolbox import CallTool, ToolBox, ToolSource
from megarl.rollout.episodes.base import EpisodeContext, SampleTokens
from megarl.rollout.episodes.build import EpisodeOpening
from megarl.rollout.episodes.tool_calls import ToolCall, parse_tool_calls
from megarl.rollout.episodes.transcript import Transcript
from megarl.rollout.episodes.turns import CHARACTERS_PER_TOKEN, ToldMessage


async def chat_with_tools(prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext) -> Sample:
    """Turns of the policy until one calls no tool (`stop`), or tokens or turns are spent (`length`).

    The calls of one turn run at the same time. What no longer fits the budget, with a token of an answer, is not told: the
    last token of a response is always a sampled one.
    """
    assert context.tools is not None
    async with context.tools.begun(prompt.row) as call_tool:
        return await _chat(prompt, number, sample, context, call_tool)


async def _chat(prompt: Prompt, number: int, sample: SampleTokens, context: EpisodeContext, call_tool: CallTool) -> Sample:
    chat, transcript = context.chat_of(prompt.row), Transcript(prompt, context.max_new_tokens)
    for turn in range(1, context.max_turns + 1):
        generation, text = await transcript.take_turn(sample, context)
        if generation.finish_reason != "stop":
            return transcript.sample(prompt, number, generation.finish_reason)
        calls = parse_tool_calls(text)
        if not calls:
            return transcript.sample(prompt, number, "stop")
        if turn == context.max_turns:
            break
        answers = await asyncio.gather(*(_answer(call, index, context, call_tool) for index, call in enumerate(calls)))
        tokens = chat.between(answers, generation.response_ids[-1])
        if len(tokens.ids) >= transcript.room:
            break
        transcript.append_observation(tokens.ids, context.as_turns(answers), tokens.media)
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
    content, was_cut = context.chat.cut(answer.told, context.tool_max_tokens, answer.characters)
    if was_cut:
        context.counts["tool_cuts"] += 1
    name = call.name if call.name in context.tools else "unknown"
    # Templates that want an id (Mistral) want nine letters or digits.
    return {"role": "tool", "name": name, "tool_call_id": f"call{place:05d}", "content": content}


KINDS = {"tools": "megarl.options.tools.episode:chat_with_tools"}


def open_part(opening: EpisodeOpening) -> None:
    """Open the tools that an episode of kind `tools`, or one of the user's own, names.

    Raises:
        EpisodeError: a tool is not there, or this machine has no sandbox of the kind that is wanted.
    """
    settings, context = opening.settings, opening.context
    if settings.kind in ("environment", "agent"):
        return
    if settings.kind == "tools" and not settings.tools:
        raise EpisodeError("rollout.episode.tools is empty, but rollout.episode.kind = 'tools' needs at least one")
    if not settings.tools:
        return
    max_characters, pictures = settings.tool_max_tokens * CHARACTERS_PER_TOKEN, context.pictures
    of_sandbox = [name for name in settings.tools if name.startswith(PREFIX)]
    of_servers = [name for name in settings.tools if name.startswith(mcp_servers.PREFIX)]
    functions = [name for name in settings.tools if name not in (*of_sandbox, *of_servers)]
    sources: list[ToolSource] = []
    try:
        if functions:
            sources.append(FunctionTools(functions, settings.tool_timeout_s, max_characters, pictures))
        if of_sandbox:
            kind = part("sandboxes", "sandbox", f"the tool '{of_sandbox[0]}'")
            sources.append(SandboxTools(of_sandbox, kind.open_sandboxes(settings.sandbox, context.choices)))
        for name in of_servers:
            bare = name.removeprefix(mcp_servers.PREFIX)
            server = servers_of(settings)[bare]  # the config's checks have seen that it is there
            sources.append(mcp_servers.McpTools(bare, server, settings.tool_timeout_s, pictures))
        context.tools = ToolBox(sources)
    except BaseException:
        for source in sources:
            source.close()
        raise
