"""Episodes: from a prompt to a Sample in one turn, in a chat with tools, or in an environment.

`load_episode` finds the async function that a config names; `EpisodeContext` is what it is given.
"""

from megarl.rollout.episodes.base import BUILT_IN, Episode, EpisodeContext, Sampler, load_episode

__all__ = ["BUILT_IN", "Episode", "EpisodeContext", "Sampler", "load_episode"]
