"""Checks of the section `rollout.episode.sandbox`: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.sandboxes.section import sandbox_of


def check(config: Config) -> None:
    """Refuse a sandbox that nothing works in, and tools without one."""
    episode, sandbox = config.rollout.episode, sandbox_of(config.rollout.episode)
    tools = [name for name in episode.tools if name.startswith("sandbox:")]
    if sandbox.kind == "none":
        if tools:
            remedy = "set rollout.episode.sandbox.kind to 'auto', 'seccomp', 'docker' or 'apptainer'"
            raise ConfigError.needs(f"the tool '{tools[0]}'", "a sandbox", remedy)
        if sandbox != type(sandbox)():
            raise ConfigError.needs(
                "rollout.episode.sandbox", "a kind", "set rollout.episode.sandbox.kind, or remove the section"
            )
        return
    if not tools and episode.kind != "agent":
        remedy = "name a tool such as 'sandbox:bash' in rollout.episode.tools, or remove rollout.episode.sandbox"
        raise ConfigError.needs("rollout.episode.sandbox", "a tool or an agent that works in it", remedy)
    if tools and episode.kind in ("environment", "agent"):
        why = "only episodes with tools call"
        raise ConfigError.of(
            "rollout.episode.tools", tools[0], why, allowed="a class" if episode.kind == "environment" else "left out"
        )
    if sandbox.kind in ("docker", "apptainer") and sandbox.image is None:
        raise ConfigError.needs(
            f"rollout.episode.sandbox.kind = '{sandbox.kind}'", "an image", "set rollout.episode.sandbox.image"
        )
    if sandbox.kind == "seccomp" and sandbox.image is not None:
        why = "rollout.episode.sandbox.kind = 'seccomp' does not use"
        raise ConfigError.of("rollout.episode.sandbox.image", sandbox.image, why, allowed="left out")
