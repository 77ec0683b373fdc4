"""Answers of a server as samples of its run: a few of each minute, which the operator reads and clients never do.

A client's prompt, answer and log-probs are all that a server knows of a sample; its reward stays with the client.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from megarl.data.sample import Sample
from megarl.experience.samples_file import pieces
from megarl.observe.run_record import SERVED
from megarl.options.serve.values import Answer, Sampled, SampleRequest


@dataclass(frozen=True)
class ServedAnswer:
    """One answer. `id` is the client's own for it, `model` the one that was asked, as clients call it."""

    id: str
    group: str
    model: str
    request: SampleRequest
    answer: Answer


class ServedSamples:
    """The answers of a minute that will be written, at most `most`; tenants have equal shares of them, as far as they ask.

    Methods may be called by several threads.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: dict[str, list[ServedAnswer]] = {}
        self._lock = threading.Lock()

    def take(self, identity: str, model: str, request: SampleRequest, sampled: Sampled) -> None:
        """Keep answers to the request `identity` while there is room: the first of each tenant in the minute.

        A request for the log-probs of its prompt, which has one token because it must have some, is none for samples.
        """
        if request.max_tokens == 1 and (request.prompt_logprobs or request.target_prompt_logprobs is not None):
            return
        with self._lock:
            own = self._held.setdefault(request.tenant, [])
            for number, answer in enumerate(sampled.sequences):
                if not self._make_room(len(own)):
                    break
                own.append(ServedAnswer(f"{identity}:{number}", identity, model, request, answer))

    def _make_room(self, own: int) -> bool:
        """Return whether a tenant that has `own` answers may have one more; where all places are taken, another gives it."""
        if sum(map(len, self._held.values())) < self.most:
            return True
        largest = max(self._held.values(), key=len)
        if len(largest) <= own + 1:
            return False
        largest.pop()
        return True

    def drain(self) -> list[ServedAnswer]:
        """The answers since the last call."""
        with self._lock:
            held, self._held = self._held, {}
        return [answer for of_tenant in held.values() for answer in of_tenant]


def as_record(served: ServedAnswer, tokenizer: Any) -> dict[str, Any]:
    """An answer as a line of `samples.jsonl`, without a reward."""
    request, answer = served.request, served.answer
    response = answer.tokens.tolist()
    sample = Sample(
        served.id,
        served.group,
        served.group,
        request.tokens.tolist(),
        response,
        [1] * len(response),
        answer.logprobs.tolist(),
        [0] * len(response),
        answer.stop_reason,
        _prompt_text(request, tokenizer),
        tokenizer.decode(response),
    )
    training = {"pieces": pieces(response, tokenizer)}
    return {**sample.to_dict(), "training": training, SERVED: {"tenant": request.tenant, "model": served.model}}


def _prompt_text(request: SampleRequest, tokenizer: Any) -> str:
    """The prompt with special tokens, and a note in place of each picture."""
    text, start = "", 0
    for number, picture in enumerate(request.pictures, start=1):
        text += tokenizer.decode(request.tokens[start : picture.place].tolist())
        text += f"[picture {number}: {picture.format}, {len(picture.content)} bytes, {picture.length} tokens]"
        start = picture.place + picture.length
    return text + tokenizer.decode(request.tokens[start:].tolist())
