"""Messages between a run and the engines of other sites: JSON of these types, and nothing that runs code when it is read.

The site asks, the run answers: a site stands behind its own firewall, or in a batch job that nobody can call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from megarl.data.prefills import PrefillCounts
from megarl.errors import EngineError
from megarl.rollout.engines.protocol import EngineRequest, FinishReason, Generation, SamplingParams
from megarl.rollout.engines.stored_turns import loaded

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""The form of a site's name, which is printed, and stands for a node in `engines.json`."""
LONGEST_POLL_S = 10.0
"""For which the run keeps a site waiting for orders; a site is heard of at least as often."""
BUSY = 503
"""The status of an answer that says: ask again."""
MOST_ERROR = 2000
SENT_OPTIONS = ("dtype", "seed", "turn_cache_bytes")
"""Arguments of an engine's start that a run sends; it may name no file, and no code."""
SiteName: TypeAlias = Annotated[str, msgspec.Meta(pattern=NAME)]
Digest: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]


class ModelFacts(msgspec.Struct, frozen=True):
    """Digests of a model's folder: its config.json, its tokenizer, and its weights (`model_facts.py`)."""

    config: Digest
    tokenizer: Digest
    weights: Digest


class SiteFacts(msgspec.Struct, frozen=True):
    """Facts that a run tells who asks to join, before anything is loaded: its model and `path`, how its engines start, and how
    many more there is room for."""

    megarl: str
    model: ModelFacts
    path: str
    engine: str
    options: dict[str, str | int | float | bool]
    room: int


class Joining(msgspec.Struct, frozen=True):
    """An engine that asks to be one of the run's."""

    megarl: Annotated[str, msgspec.Meta(max_length=64)]
    model: ModelFacts
    site: SiteName


class Joined(msgspec.Struct, frozen=True):
    """The number of an engine that has joined, the key that it names itself by, and the name of this start of the run, by which
    versions are told apart."""

    number: int
    key: str
    life: str


class SentResponse(msgspec.Struct, frozen=True):
    """A `Generation` without columns of options."""

    ids: list[int]
    log_probs: list[float]
    versions: list[int]
    ended: FinishReason
    asked: int = 0
    cached: int = 0


class Request(msgspec.Struct, frozen=True):
    """An `EngineRequest` without pictures and columns of options."""

    prompts: list[list[int]]
    params: dict[str, Any]
    n: int
    keys: list[str] | None
    deadline_s: float
    begun: list[list[SentResponse | None]] | None
    conversation: str | None


class Order(msgspec.Struct, frozen=True):
    """Work for an engine, by number. `stop` names an order, `words` keys of prompts, names of conversations, or why it ends."""

    number: int
    what: Literal["generate", "stop", "cut", "end_conversations", "end"]
    request: Request | None = None
    stop: int = 0
    words: list[str] = []


class Poll(msgspec.Struct, frozen=True):
    """An engine asks for orders, for the `count`-th time: the last one that it has, its weights' version, the newest that it
    knows of, and the bytes of full weights and of differences that it has fetched."""

    key: Digest
    count: int
    seen: int
    version: int | None
    newest: int | None
    full_bytes: int
    difference_bytes: int


class Orders(msgspec.Struct, frozen=True):
    """Orders that the engine may not have, and the newest version of the weights that the run holds ready."""

    orders: list[Order]
    newest: int | None


class SiteAnswer(msgspec.Struct, frozen=True):
    """The engine's answer to an order to generate: responses `[prompt][sample]`, or why it has none."""

    key: Digest
    order: int
    responses: list[list[SentResponse]] | None = None
    error: str = ""


class Leaving(msgspec.Struct, frozen=True):
    """The engine leaves: with notice, unless `error` says why it is of no use any more."""

    key: Digest
    error: str = ""


def sent_request(request: EngineRequest) -> Request:
    """The request as it is sent; its responses must have their tokens.

    Raises:
        EngineError: it shows pictures, or asks for columns of options.
    """
    if request.params.extra or any(request.media or ()):
        raise EngineError("engines of other sites answer no prompts with pictures, and with no columns of options")
    params = {name: value for name, value in asdict(request.params).items() if name != "extra"}
    begun: list[list[SentResponse | None]] | None = None
    if request.begun is not None:
        begun = [[turn and sent_response(loaded(turn)) for turn in of_prompt] for of_prompt in request.begun]
    prompts, keys = [[*map(int, prompt)] for prompt in request.prompts], None if request.keys is None else [*request.keys]
    return Request(prompts, params, request.n, keys, request.deadline_s, begun, request.conversation)


def read_request(sent: Request) -> EngineRequest:
    """The request that was sent.

    Raises:
        EngineError: it is none.
    """
    lists = {"stop", "stop_token_ids", "cut_token_ids"}
    values: dict[str, Any] = {name: tuple(value) if name in lists else value for name, value in sent.params.items()}
    try:
        params = SamplingParams(**values)
    except TypeError as error:
        raise EngineError(f"the run asks for sampling that this megarl does not know: {error}") from None
    begun: list[list[Generation | None]] | None = None
    if sent.begun is not None:
        begun = [[None if turn is None else read_response(turn) for turn in of_prompt] for of_prompt in sent.begun]
    return EngineRequest(
        sent.prompts, params, n=sent.n, keys=sent.keys, deadline_s=sent.deadline_s, begun=begun, conversation=sent.conversation
    )


def sent_response(turn: Generation) -> SentResponse:
    """The response as it is sent."""
    prefill = turn.prefill
    return SentResponse(
        [*turn.response_ids], [*turn.log_probs], [*turn.weight_versions], turn.finish_reason, prefill.asked, prefill.cached
    )


def read_response(sent: SentResponse) -> Generation:
    """The response that was sent; raises EngineError if its columns have different lengths."""
    prefill = PrefillCounts(sent.asked, sent.cached)
    return Generation(sent.ids, sent.log_probs, sent.versions, sent.ended, prefill=prefill)


def checked_responses(
    request: EngineRequest, sent: Sequence[Sequence[SentResponse]], vocabulary: int
) -> list[list[Generation]]:
    """The responses that a site sent to `request`; `vocabulary` is the number of token ids.

    Raises:
        EngineError: they are not what was asked for, or cannot have been sampled.
    """
    if [len(of_prompt) for of_prompt in sent] != [request.n] * len(request.prompts):
        raise EngineError(f"it answered another number of responses than {len(request.prompts)} times {request.n}")
    for number, of_prompt in enumerate(sent):
        for index, one in enumerate(of_prompt):
            begun = request.begun[number][index] if request.begun is not None else None
            had = [] if begun is None else begun.response_ids
            if one.ids[: len(had)] != had or len(one.ids) > max(len(had), request.params.max_new_tokens):
                raise EngineError("it answered a response that does not go on from what it was given, or is too long")
            if any(not 0 <= token < vocabulary for token in one.ids):
                raise EngineError(f"it answered a token id that is not below {vocabulary}")
            if any(not math.isfinite(value) or value > 1e-3 for value in one.log_probs):
                raise EngineError("it answered a log-prob that is none")
    return [[read_response(one) for one in of_prompt] for of_prompt in sent]
