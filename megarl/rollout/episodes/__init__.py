"""Episodes: from a prompt to a Sample in one turn, in a chat with tools, or in an environment.

`open_episodes` finds the async function that a config names and makes the context that all its episodes share.
"""

from megarl.rollout.episodes.base import BUILT_IN, Episode, EpisodeContext, Sampler, load_episode
from megarl.rollout.episodes.build import EpisodeSettings, open_episodes

__all__ = ["BUILT_IN", "Episode", "EpisodeContext", "EpisodeSettings", "Sampler", "load_episode", "open_episodes"]
