"""Episodes with tools: a chat in which the policy calls functions, sandboxes and MCP servers."""

from __future__ import annotations

from megarl.errors import EpisodeError
from megarl.option_list import part
from megarl.options.tools import mcp_servers
from megarl.options.tools.functions import FunctionTools
from megarl.options.tools.sandbox_tools import PREFIX, SandboxTools
from megarl.options.tools.section import servers_of
from megarl.options.tools.source import ToolSource
from megarl.options.tools.toolbox import ToolBox
from megarl.rollout.episodes.build import EpisodeOpening
from megarl.rollout.episodes.turns import CHARACTERS_PER_TOKEN

KINDS = {"tools": "megarl.options.tools.chat:chat_with_tools"}


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
            opened = part("sandboxes", "opened", f"the tool '{of_sandbox[0]}'")
            sources.append(SandboxTools(of_sandbox, opened.open_chosen(settings.sandbox, context.choices)))
        sources += mcp_servers.open_mcp_tools(of_servers, servers_of(settings), settings.tool_timeout_s, pictures)
        context.tools = ToolBox(sources)
    except BaseException:
        for source in sources:
            source.close()
        raise
