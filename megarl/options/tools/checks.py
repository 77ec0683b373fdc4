"""Checks of tools and of MCP servers: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.tools.section import servers_of
from megarl.system.user_code import FORMS


def check(config: Config) -> None:
    """Refuse an episode with tools that names none, and servers that are not there, not used, or reached in two ways."""
    episode, servers = config.rollout.episode, servers_of(config.rollout.episode)
    if episode.kind == "tools" and not episode.tools:
        remedy = f"set rollout.episode.tools to a list of {FORMS}"
        raise ConfigError.needs("rollout.episode.kind = 'tools'", "at least one function", remedy)
    named = [name.removeprefix("mcp:") for name in episode.tools if name.startswith("mcp:")]
    if named and episode.kind in ("environment", "agent"):
        why = "only episodes with tools call"
        raise ConfigError.of("rollout.episode.tools", f"mcp:{named[0]}", why, allowed="a class or a function")
    for name in named:
        if name not in servers:
            remedy = f"name it there, or remove 'mcp:{name}' from rollout.episode.tools"
            raise ConfigError.needs(f"the tool 'mcp:{name}'", f"a server '{name}' in rollout.episode.mcp", remedy)
    for name, server in servers.items():
        field = f"rollout.episode.mcp.{name}"
        if name not in named:
            remedy = f"add 'mcp:{name}' to rollout.episode.tools, or remove {field}"
            raise ConfigError.needs(field, "a tool that uses it", remedy)
        if bool(server.command) == (server.url is not None):
            raise ConfigError.needs(field, "one way to reach it", f"set one of {field}.command and {field}.url")
        if server.url is None and server.token_env is not None:
            raise ConfigError.needs(f"{field}.token_env", "a url", f"set {field}.url, or remove {field}.token_env")
