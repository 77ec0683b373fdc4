"""One JSON request to a server of rewards, tried again a bounded number of times; what goes wrong is one sentence.

The server is not trusted: no redirect is followed, as it could lead samples and the token to another host, and an answer is
read, and unpacked, up to a limit.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from megarl.config.secrets import bearer
from megarl.errors import RewardError, RewardServerError
from megarl.system.http_requests import AnswerError, parsed, read_unpacked, shortened
from megarl.system.redaction import redacted

T = TypeVar("T")
Item = TypeVar("Item")
Body = dict[str, Any]
_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True)
class Endpoint:
    """A server of requests, and the patience with it."""

    reward: str
    """Name of the reward in error messages."""
    url: str
    timeout_s: float
    """Seconds of one try."""
    retries: int
    """Further tries after a failed connection, no answer in time, or a status of 429 or 5xx."""
    backoff_s: float
    """Seconds before the first further try, doubled before each other one, 30 at most."""
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise RewardError(f"reward '{self.reward}': url is '{redacted(self.url)}'; it must start with http:// or https://")
        if self.timeout_s <= 0 or self.retries < 0 or self.backoff_s < 0:
            raise RewardError(
                f"reward '{self.reward}': timeout_s is {self.timeout_s}, retries {self.retries} and backoff_s "
                f"{self.backoff_s}, but the first must be above 0 and the others not below"
            )

    def error(self, what: str) -> RewardError:
        """The error that says `what` of this endpoint."""
        return RewardError(redacted(f"reward '{self.reward}': {self.url} {what}"))


class RequestRefusedError(RewardError):
    """A server's status below 500 other than 429: it will not do what it was asked, however often."""

    def __init__(self, sentence: str, status: int, said: str) -> None:
        """`said`: the body of the answer, shortened."""
        super().__init__(sentence)
        self.status, self.said = status, said


def post_all(
    endpoint: Endpoint,
    items: Iterable[Item],
    body_of: Callable[[Item], Body],
    read: Callable[[Any, Body], T],
    *,
    concurrency: int,
    until: float,
    keeps_errors: bool = False,
    refused: Callable[[RequestRefusedError], T] | None = None,
) -> list[T | Exception]:
    """Values that `read` makes of the answers to the body of each item, in order, `concurrency` at most at the same time.

    `refused` makes the value where the server refuses a request, or raises.

    Raises as `body_of`, `post` and `read` do, or, if it `keeps_errors`, gives the error in the place of the value.
    """

    async def answers() -> list[T | Exception]:
        room = asyncio.Semaphore(concurrency)

        async def answer(item: Item) -> T | Exception:
            async with room:  # so that no more bodies are there than are asked
                try:
                    body = body_of(item)
                    try:
                        return read(await post(session, endpoint, body, until), body)
                    except RequestRefusedError as error:
                        if refused is None:
                            raise
                        return refused(error)
                except Exception as error:
                    if keeps_errors:
                        return error
                    raise

        async with aiohttp.ClientSession() as session:
            return list(await asyncio.gather(*map(answer, items)))

    return asyncio.run(answers())


async def post(session: aiohttp.ClientSession, endpoint: Endpoint, body: Body, until: float) -> Any:
    """The JSON that the endpoint answers with status 200.

    Raises:
        RewardServerError: no try was answered so before `until` (in `time.monotonic()`); it names the URL and its last answer.
        RewardError: what was answered says that the request was wrong, or is no JSON.
    """
    failure = "was not asked before the deadline for all rewards"
    for attempt in range(endpoint.retries + 1):
        if attempt:
            await asyncio.sleep(max(min(endpoint.backoff_s * 2 ** (attempt - 1), _LONGEST_WAIT_S, until - time.monotonic()), 0))
        timeout_s = min(endpoint.timeout_s, until - time.monotonic())
        if timeout_s <= 0:
            break
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            request = session.post(endpoint.url, json=body, headers=endpoint.headers, timeout=timeout, allow_redirects=False)
            async with request as response:
                status, target = response.status, response.headers.get("Location")
                answer = await read_unpacked(response)
            if status == 200:
                return parsed(answer)
        except AnswerError as error:
            raise endpoint.error(str(error)) from None
        except TimeoutError:
            failure = f"did not answer within {timeout_s:.3g} s"
            continue
        except aiohttp.ClientError as error:
            failure = f"cannot be asked: {type(error).__name__}: {' '.join(str(error).split())}"
            continue
        if 300 <= status < 400:
            raise endpoint.error(f"answered status {status} and names {shortened(target or '')} instead, which is not followed")
        said = shortened(answer.decode(errors="replace"))
        failure = f"answered status {status}: {said}"
        if status != 429 and status < 500:
            raise RequestRefusedError(str(endpoint.error(failure)), status, said)
    raise RewardServerError(str(endpoint.error(f"{failure} (asked up to {endpoint.retries + 1} times)")))


def token_headers(reward: str, argument: str, variable: str | None) -> dict[str, str]:
    """The header with the token in the environment variable that `argument` of the reward names; empty for None.

    Raises:
        RewardError: the variable is not set.
    """
    if variable and not os.environ.get(variable):
        raise RewardError(f"reward '{reward}': {argument} is '{variable}', but this variable is not set")
    return bearer(os.environ[variable]) if variable else {}
