"""Episodes in an environment: of a class of the user, or of an OpenEnv server."""

from __future__ import annotations

import asyncio
from functools import partial

from megarl.errors import EpisodeError
from megarl.options.environments.environment import Environments
from megarl.options.environments.openenv import OpenEnvironment
from megarl.options.environments.section import openenv_of
from megarl.rollout.episodes.build import EpisodeOpening
from megarl.system.user_code import CLASS_FORMS, load_user_function

KINDS = {"environment": "megarl.options.environments.environment:in_environment"}


def open_part(opening: EpisodeOpening) -> None:
    """Make ready how each episode's environment is made.

    Raises:
        EpisodeError: the class is not there.
    """
    settings = opening.settings
    if settings.kind != "environment":
        return
    openenv = openenv_of(settings)
    if openenv.url:
        at_once = asyncio.Semaphore(openenv.at_once)
        opening.context.shared = Environments(partial(OpenEnvironment, openenv), f"at {openenv.url}", at_once)
        return
    if len(settings.tools) != 1:
        raise EpisodeError(
            f"rollout.episode.tools has {len(settings.tools)} names, but rollout.episode.kind = 'environment' needs one: "
            f"the environment as {CLASS_FORMS}"
        )
    opening.context.shared = Environments(load_user_function(settings.tools[0], EpisodeError), settings.tools[0])
