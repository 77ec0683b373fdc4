"""The section `rollout.episode.mcp`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megarl.config.option_sections import AddedField
from megarl.config.section import Section


class McpServerConfig(Section):
    """An MCP server whose tools the policy may call, as `mcp:NAME` (docs/sandboxes.md)."""

    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Command line of a server that speaks over its input and output."""
    url: str | None = None
    """In place of `command`: address of a server that speaks streamable HTTP, such as `http://host:8000/mcp`."""
    tools: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of the tools that the policy is shown. Empty: all."""
    per_episode: bool = False
    """Whether each episode has a server (or, with `url`, a session) of its own. false: all share one."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of `command`."""
    pass_environment: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of environment variables of the run that `command` gets too."""
    token_env: str | None = None
    """Name of the environment variable that has the bearer token for `url`."""


DESCRIPTION = "MCP servers by the NAME that `mcp:NAME` in `tools` uses."
MCP: AddedField[dict[str, McpServerConfig]] = AddedField("EpisodeConfig", "mcp", dict[str, McpServerConfig], {}, DESCRIPTION)
FIELDS = (MCP,)
servers_of = MCP.of
"""The MCP servers of a section `episode`, by name."""
