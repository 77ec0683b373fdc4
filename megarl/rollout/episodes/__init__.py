"""Episodes: from a prompt to a Sample in one turn, in a chat with tools, or in an environment.

`open_episodes` finds the async function that a config names and makes what all its episodes share.
"""

from megarl.rollout.episodes.base import Episode, EpisodeContext, SampleTokens, load_episode
from megarl.rollout.episodes.build import Episodes, EpisodeSettings, open_episodes

__all__ = [
    "Episode",
    "EpisodeContext",
    "EpisodeSettings",
    "Episodes",
    "SampleTokens",
    "load_episode",
    "open_episodes",
]
