"""Checks of episodes in an environment: one sentence per contradiction."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.options.environments.section import openenv_of
from megarl.system.user_code import CLASS_FORMS


def check(config: Config) -> None:
    """Refuse an environment that is not named, or named twice."""
    episode, openenv = config.rollout.episode, openenv_of(config.rollout.episode)
    if openenv != type(openenv)() and episode.kind != "environment":
        remedy = "set rollout.episode.kind to 'environment', or remove rollout.episode.openenv"
        raise ConfigError.needs("rollout.episode.openenv", "an episode in an environment", remedy)
    if openenv != type(openenv)() and not openenv.url.startswith(("http://", "https://")):
        allowed = "an address that begins with http:// or https://"
        raise ConfigError.of("rollout.episode.openenv.url", openenv.url, allowed=allowed)
    if openenv.url and episode.tools:
        remedy = "remove rollout.episode.tools, or rollout.episode.openenv"
        raise ConfigError.needs("rollout.episode.openenv", "an episode without a class of its own", remedy)
    if episode.kind == "environment" and not episode.tools and not openenv.url:
        remedy = f"set rollout.episode.tools to a list of one {CLASS_FORMS}"
        raise ConfigError.needs("rollout.episode.kind = 'environment'", "the class of an environment", remedy)
