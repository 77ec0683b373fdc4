"""The section `rollout.episode.openenv`."""

from __future__ import annotations

from megarl.config.option_sections import AddedField
from megarl.config.section import Positive, Section


class OpenEnvConfig(Section):
    """An environment of an OpenEnv server, in place of a class of yours (docs/sandboxes.md)."""

    url: str = ""
    """Address of the server, such as `http://host:8000`. Empty: none."""
    action_key: str | None = "message"
    """Field of an action that has what the policy says. null: the policy says the whole action, as a JSON object."""
    observation_key: str | None = None
    """Field of an observation that the policy is told. null: its only text, or all of it as JSON."""
    reset_key: str | None = None
    """Key of a row that has further arguments for `reset`. The seed follows from the row, so a group begins alike."""
    at_once: Positive = 64
    """Maximum number of episodes, and so of the server's sessions, at the same time."""
    token_env: str | None = None
    """Name of the environment variable that has the server's bearer token."""


DESCRIPTION = "The server of `kind: environment`, in place of a class in `tools`."
OPENENV = AddedField("EpisodeConfig", "openenv", OpenEnvConfig, OpenEnvConfig(), DESCRIPTION)
FIELDS = (OPENENV,)
openenv_of = OPENENV.of
"""The section `openenv` of a section `episode`."""
