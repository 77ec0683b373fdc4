"""How long prompts and responses are: a log-normal spread of responses, cut at the limit, of which a plan knows the mean."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from megarl.planning.pictures import MEAN_SHARE, NO_PICTURES, PromptPictures

SPREAD = 0.6
"""Standard deviation of the logarithm of response lengths before the cut: most runs have a long tail."""
POINTS = 128


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and responses; a response has at most `longest` and at least one. `pictures` are prompts'."""

    prompt: float
    response: float
    longest: int
    pictures: PromptPictures = NO_PICTURES

    @classmethod
    def assumed(cls, longest_prompt: int, longest_response: int) -> Lengths:
        """Half of what the config allows."""
        return cls(MEAN_SHARE * longest_prompt, MEAN_SHARE * longest_response, longest_response)

    @cached_property
    def responses(self) -> npt.NDArray[np.float64]:
        """Lengths of `POINTS` responses, ascending, as the distribution has them; their mean is `response`."""
        normal = NormalDist(sigma=SPREAD)
        shape = np.exp([normal.inv_cdf((point + 0.5) / POINTS) for point in range(POINTS)])
        wanted = min(max(self.response, 1.0), float(self.longest))
        low, high = 0.0, 1e9
        for _ in range(200):  # the mean of what is cut grows with the scale
            middle = (low + high) / 2
            low, high = (middle, high) if np.clip(middle * shape, 1, self.longest).mean() < wanted else (low, middle)
        return np.clip(high * shape, 1, self.longest)
