"""Lengths of prompts and responses: a log-normal spread of responses, cut at the limit, of which a plan knows the mean."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import log, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from megarl.config.questions import MEAN_SHARE
from megarl.planning.prompt_pictures import NO_PICTURES, PromptPictures

SPREAD = 0.6
"""Least standard deviation of the logarithm of response lengths before the cut: most runs have a long tail."""
POINTS = 128
HALVED = 0.5
"""Behind the last whole point, each part of the tail has so much of the one before, down to a single response of the step."""


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and responses; a response has at most `longest` and at least one. `pictures` are prompts'.

    `samples` are the responses of a step, the longest of which is taken to reach the limit.
    """

    prompt: float
    response: float
    longest: int
    pictures: PromptPictures = NO_PICTURES
    samples: int = 1

    @classmethod
    def assumed(cls, longest_prompt: int, longest_response: int) -> Lengths:
        """Half of what the config allows."""
        return cls(MEAN_SHARE * longest_prompt, MEAN_SHARE * longest_response, longest_response)

    @cached_property
    def shares(self) -> npt.NDArray[np.float64]:
        """The share of all responses that each of `responses` stands for: equal ones, and a tail down to one response of
        the step."""
        tail = [1 / POINTS]
        while tail[-1] * HALVED * self.samples >= 1:
            tail[-1:] = [tail[-1] * (1 - HALVED), tail[-1] * HALVED]
        return np.array([1 / POINTS] * (POINTS - 1) + tail)

    @cached_property
    def responses(self) -> npt.NDArray[np.float64]:
        """Lengths of responses, ascending, as the distribution has them; weighed by `shares`, their mean is `response`."""
        normal = NormalDist()
        middle = np.cumsum(self.shares) - self.shares / 2
        points = np.array([normal.inv_cdf(point) for point in middle.tolist()])
        return self._cut(points, self._spread(points[-1]))

    def _spread(self, last: float) -> float:
        """The least spread with which the longest response reaches the limit, but `SPREAD` at least.

        The mean is exp(m + s^2 / 2) and the longest exp(m + s * last): their ratio first grows with s, up to s = last.
        """
        log_ratio = log(self.longest / min(max(self.response, 1.0), float(self.longest)))
        reached = last - sqrt(max(0.0, last**2 - 2 * log_ratio))
        return max(SPREAD, reached)

    def _cut(self, points: npt.NDArray[np.float64], spread: float) -> npt.NDArray[np.float64]:
        shape = np.exp(spread * points)
        target_mean = min(max(self.response, 1.0), float(self.longest))
        low, high = 0.0, 1e9
        for _ in range(100):  # the mean of what is cut grows with the scale
            middle = (low + high) / 2
            low, high = (
                (middle, high) if self.shares @ np.clip(middle * shape, 1, self.longest) < target_mean else (low, middle)
            )
        return np.clip(high * shape, 1, self.longest)
