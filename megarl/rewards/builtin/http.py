"""`http`: rewards that a server gives, in the protocol of OpenRLHF's remote reward models (docs/methods.md#http-rewards).

`POST {"query": [str], "prompts": [str], "labels": [str]}` is answered by `{"rewards": [float], ...}`, with a query being
prompt and response. `scores` and `extra_logs` of an answer are not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megarl.data.sample import Prompt, Sample
from megarl.rewards.http_post import Body, Endpoint, post_all, token_headers
from megarl.rewards.scorer import Outcome, Trial, Verifier


class HttpReward(Verifier):
    """The client; a server that gives no reward ends as an error that names its URL and what it answered."""

    name = "http"

    def __init__(
        self,
        answer_key: str,
        *,
        url: str,
        timeout_s: float = 60.0,
        retries: int = 3,
        backoff_s: float = 0.5,
        batch_size: int = 64,
        concurrency: int = 8,
        labels: bool = True,
        token_env: str | None = None,
    ) -> None:
        """Args:
            answer_key: key of the gold answer in a row, which is sent as label.
            url: the whole address that is posted to.
            timeout_s: seconds of one try.
            retries: further tries of a request that failed.
            backoff_s: seconds before the first of them, doubled before each other one.
            batch_size: samples in one request.
            concurrency: requests at the same time.
            labels: send gold answers; if false, labels are empty texts and rows need no answer.
            token_env: environment variable that holds the token sent as bearer; null: none is sent.

        Raises:
            RewardError: an argument is out of range, or the variable is not set.
        """
        if batch_size < 1 or concurrency < 1:
            raise self.error(f"batch_size is {batch_size} and concurrency {concurrency}; both must be above 0")
        super().__init__(answer_key)
        self.labels = labels
        self.batch_size, self.concurrency = batch_size, concurrency
        self.endpoint = Endpoint("http", url, timeout_s, retries, backoff_s, token_headers("http", "token_env", token_env))

    def __call__(self, samples: Sequence[Sample], until: float) -> list[Outcome]:
        """One finite reward per sample; an error that is kept stands for all samples of its request.

        Raises:
            RewardError: the server did not give them, or not before `until`.
        """
        batches = [samples[start : start + self.batch_size] for start in range(0, len(samples), self.batch_size)]
        limits: dict[str, Any] = {"concurrency": self.concurrency, "until": until, "keeps_errors": self.keeps_errors}
        answers = post_all(self.endpoint, batches, self._body, self._rewards, **limits)
        return [
            reward
            for batch, rewards in zip(batches, answers, strict=True)
            for reward in ([rewards] * len(batch) if isinstance(rewards, Exception) else rewards)
        ]

    def check(self, prompt: Prompt) -> None:
        """Refuse a row without a gold answer, unless labels are off."""
        if self.labels:
            super().check(prompt)

    @property
    def trial(self) -> Trial:
        """One response: the server is there, and answers in the protocol."""
        return Trial(self.answer_key, responses=1)

    def _body(self, batch: Sequence[Sample]) -> Body:
        golds = [self.gold(sample) if self.labels else "" for sample in batch]
        return {
            "query": [sample.prompt_text + sample.response_text for sample in batch],
            "prompts": [sample.prompt_text for sample in batch],
            "labels": [str(gold) for gold in golds],
        }

    def _rewards(self, answer: Any, body: Body) -> list[float]:
        count = len(body["query"])
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise self.endpoint.error(f"answered {str(answer)[:200]!r}, which has no list of 'rewards'")
        if len(rewards) != count:
            raise self.endpoint.error(f"answered {len(rewards)} rewards for {count} samples")
        for reward in rewards:
            if isinstance(reward, bool) or not isinstance(reward, int | float) or not _is_finite(reward):
                raise self.endpoint.error(f"answered the reward {str(reward)[:80]!r}; it must be a finite number")
        return [float(reward) for reward in rewards]


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int beyond the largest float
        return False
