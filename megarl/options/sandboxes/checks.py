"""Checks of the section `rollout.episode.sandbox`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.sandboxes.section import sandbox_of


def check(config: Config) -> None:
    """Refuse a sandbox that nothing works in, and tools without one."""
    field, episode, sandbox = "rollout.episode.sandbox", config.rollout.episode, sandbox_of(config.rollout.episode)
    tools = [name for name in episode.tools if name.startswith("sandbox:")]
    if sandbox.kind == "none":
        if tools:
            remedy = f"set {field}.kind to 'auto', 'seccomp', 'docker' or 'apptainer'"
            raise ConfigError.needs(f"the tool '{tools[0]}'", "a sandbox", remedy)
        if sandbox != type(sandbox)():
            raise ConfigError.needs(field, "a kind", f"set {field}.kind, or remove the section")
        return
    if not tools and episode.kind != "agent":
        remedy = "name a tool such as 'sandbox:bash' in rollout.episode.tools, or remove rollout.episode.sandbox"
        raise ConfigError.needs(field, "a tool or an agent that works in it", remedy)
    if tools and episode.kind in ("environment", "agent"):
        allowed = "a class" if episode.kind == "environment" else "left out"
        raise ConfigError.of("rollout.episode.tools", tools[0], "only episodes with tools call", allowed=allowed)
    if sandbox.kind in ("docker", "apptainer") and sandbox.image is None:
        raise ConfigError.needs(f"{field}.kind = '{sandbox.kind}'", "an image", f"set {field}.image")
    if sandbox.kind == "seccomp" and sandbox.image is not None:
        raise ConfigError.of(f"{field}.image", sandbox.image, f"{field}.kind = 'seccomp' does not use", allowed="left out")
