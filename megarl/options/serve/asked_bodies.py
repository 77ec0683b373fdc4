"""A request for samples in SGLang's words (0.5.23): what is refused, and the bodies of `/generate` that answer it. No HTTP.

Log-probs of sampled tokens are those of the full distribution under the request's temperature, whatever top-k and top-p leave
of it; at temperature 0 they are those under temperature 1. Log-probs of prompt tokens are those under temperature 1.
"""

from __future__ import annotations

import base64
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from megarl.options.serve.values import Array, Picture, RequestError, SampleRequest
from megarl.rollout.engines.sglang.text_stops import asked

MOST_SAMPLES = 1024
MOST_LIKELIEST = 1 << 22
"""Ids and log-probs of likeliest tokens in an answer, of its prompt or of its samples."""
MOST_TARGETS = 1 << 20
"""Positions of a prompt times distinct ids that are asked for there: SGLang answers each id at each position."""
MOST_DRAWS = 1 << 12
"""Tokens drawn at a prompt's positions: each is a request of its own, for one token behind a part of the prompt."""
EngineBody = dict[str, Any]


@dataclass(frozen=True)
class EngineLimits:
    """EngineLimits of the model that engines serve: tokens of prompt and answer together, and ids.

    `tokenizer_folder` is that of the tokenizer by which stop texts are found; `ends` are end tokens beside those of the model's
    folder; `image_token` stands for a picture (None: the model takes none).
    """

    context_tokens: int
    vocab_size: int
    tokenizer_folder: str
    ends: tuple[int, ...] = ()
    image_token: int | None = None


@dataclass(frozen=True)
class Bodies:
    """Bodies of `/generate`: one that computes the prompt (None: there is no need), and one for each sample.

    `start` is the first token of the prompt that the answer with scores begins with, which has none itself; None: no scores.
    `draws` is one body for all draws at the prompt's positions, which SGLang answers with a list; None: none are asked for.
    """

    prompt: EngineBody | None
    samples: Sequence[EngineBody]
    start: int | None = None
    draws: EngineBody | None = None

    @property
    def names(self) -> list[str]:
        """Names of all requests."""
        of_prompt = [self.prompt["rid"]] if self.prompt is not None else []
        return [*of_prompt, *(body["rid"] for body in self.samples), *(self.draws["rid"] if self.draws is not None else ())]


def check_request(request: SampleRequest, limits: EngineLimits) -> None:
    """Refuse what no engine answers.

    Raises:
        RequestError: names the field.
    """
    tokens = len(request.tokens)
    if not tokens:
        raise RequestError("prompt has no tokens; it must have one or more")
    if tokens >= limits.context_tokens:
        raise RequestError(f"prompt has {tokens} tokens; it must have fewer than the {limits.context_tokens} of the context")
    if int(request.tokens.min()) < 0 or int(request.tokens.max()) >= limits.vocab_size:
        raise RequestError(f"prompt has a token id that is not from 0 to {limits.vocab_size - 1}")
    if not 1 <= request.num_samples <= MOST_SAMPLES:
        raise RequestError(f"num_samples is {request.num_samples}; it must be from 1 to {MOST_SAMPLES}")
    _check_sampling(request, limits)
    _check_scores(request, limits)
    if request.pictures:
        _check_pictures(request, limits)


def _check_sampling(request: SampleRequest, limits: EngineLimits) -> None:
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}; it must be at least 1")
    if not (request.temperature >= 0 and math.isfinite(request.temperature)):
        raise RequestError(f"temperature is {request.temperature}; it must be 0 or above")
    if not 0 < request.top_p <= 1:
        raise RequestError(f"top_p is {request.top_p}; it must be above 0 and at most 1")
    if request.top_k < -1:
        raise RequestError(f"top_k is {request.top_k}; it must be at least 1, or -1 for no limit")
    stop = request.stop or ()
    if "" in stop:
        raise RequestError("stop has an empty text")
    wrong = [item for item in stop if isinstance(item, int) and not 0 <= item < limits.vocab_size]
    if wrong:
        raise RequestError(f"stop has the token id {wrong[0]}; ids must be from 0 to {limits.vocab_size - 1}")


def _check_scores(request: SampleRequest, limits: EngineLimits) -> None:
    tokens, last = len(request.tokens), request.prompt_logprobs_last_n
    if last is not None and not request.prompt_logprobs:
        raise RequestError("prompt_logprobs_last_n is of prompt_logprobs, which is not asked for")
    if last is not None and not 1 <= last < tokens:
        raise RequestError(f"prompt_logprobs_last_n is {last}; it must be from 1 to {tokens - 1}, the prompt's tokens but one")
    answered = request.num_samples * most_tokens(request, limits)
    for name, likeliest, rows in (
        ("topk_prompt_logprobs", request.topk_prompt_logprobs, tokens),
        ("topk_sample_logprobs", request.topk_sample_logprobs, answered),
    ):
        most = min(limits.vocab_size, MOST_LIKELIEST // rows)
        if not 0 <= likeliest <= most:
            raise RequestError(f"{name} is {likeliest}; it must be from 0 to {most} for {rows} tokens")
    most = MOST_DRAWS // max(1, tokens - 1)
    if not 0 <= request.prompt_alt_tokens_k <= most:
        raise RequestError(
            f"prompt_alt_tokens_k is {request.prompt_alt_tokens_k}; it must be from 0 to {most} for {tokens} tokens"
        )
    targets = request.target_prompt_logprobs
    if targets is None:
        return
    if targets.ndim != 2 or len(targets) != tokens - 1:
        raise RequestError(f"target_prompt_logprobs has the shape {list(targets.shape)}; it must be [{tokens - 1}, K]")
    _, ids = targeted(targets)
    if not len(ids):
        raise RequestError("target_prompt_logprobs names no token id")
    if int(ids[-1]) >= limits.vocab_size:
        raise RequestError(f"target_prompt_logprobs has the token id {ids[-1]}; ids must be below {limits.vocab_size}")
    positions = tokens - 1 - (_scores(request)[0] or 0)
    if positions * len(ids) > MOST_TARGETS:
        asks = f"asks for {len(ids)} distinct ids at {positions} positions"
        raise RequestError(f"target_prompt_logprobs {asks}; the product must be at most {MOST_TARGETS}")


def _check_pictures(request: SampleRequest, limits: EngineLimits) -> None:
    if limits.image_token is None:
        raise RequestError("prompt shows a picture, which this model does not take")
    if scored(request) or request.prompt_alt_tokens_k:
        raise RequestError("prompt shows a picture; log-probs of such prompts are not served")
    end = 0
    for picture in sorted(request.pictures, key=lambda picture: picture.place):
        if picture.place < end or picture.length < 1 or picture.place + picture.length > len(request.tokens):
            raise RequestError(f"prompt shows a picture at token {picture.place} that is not within its tokens")
        end = picture.place + picture.length


def most_tokens(request: SampleRequest, limits: EngineLimits) -> int:
    """Most tokens of an answer: as many as are asked for, and the context has room for."""
    room = limits.context_tokens - len(request.tokens)
    return room if request.max_tokens is None else min(room, request.max_tokens)


def scored(request: SampleRequest) -> bool:
    """Return whether log-probs of the prompt are asked for."""
    return request.prompt_logprobs or request.topk_prompt_logprobs > 0 or request.target_prompt_logprobs is not None


def draws_of(request: SampleRequest) -> int:
    """Number of tokens that are drawn at the prompt's positions."""
    return (len(request.tokens) - 1) * request.prompt_alt_tokens_k


def targeted(targets: Array) -> tuple[Array, Array]:
    """Rows of `target_prompt_logprobs` that name an id, and all ids that they name, in order."""
    return np.flatnonzero((targets >= 0).any(axis=1)), np.unique(targets[targets >= 0])


def bodies(request: SampleRequest, limits: EngineLimits, name: Callable[[], str], adapter: str | None) -> Bodies:
    """The bodies that answer a request, which `check_request` let through; `adapter`: what the server calls its adapters.

    The prompt of several samples is computed once, before them; they find it in the server's cache.
    """
    common = _prompt_of(request, limits) | ({"lora_path": adapter} if adapter is not None else {})
    drawn = _sampling(request, limits)
    seed = secrets.randbits(63) if request.seed is None else request.seed
    samples = [
        common
        | {"rid": name(), "sampling_params": drawn | {"sampling_seed": sample_seed(seed, number)}}
        | {"return_logprob": True, **_likeliest(request.topk_sample_logprobs)}
        for number in range(request.num_samples)
    ]
    start, scores = _scores(request)
    draws = _draws(request, limits, name, seed, adapter) if draws_of(request) else None
    if start is None and len(samples) == 1 and draws is None:
        return Bodies(None, samples)
    if len(samples) == 1 and draws is None and "token_ids_logprob" not in scores:
        both = _likeliest(max(request.topk_sample_logprobs, request.topk_prompt_logprobs))
        return Bodies(None, [samples[0] | scores | both], start)
    return Bodies(common | {"rid": name(), "sampling_params": {"max_new_tokens": 0}} | scores, samples, start, draws)


def _draws(request: SampleRequest, limits: EngineLimits, name: Callable[[], str], seed: int, adapter: str | None) -> EngineBody:
    """Draws at each position behind the first: under the request's temperature, of the full distribution."""
    tokens, k = request.tokens.tolist(), request.prompt_alt_tokens_k
    drawn = {"max_new_tokens": 1, "temperature": request.temperature, "ignore_eos": True}
    seeds = [sample_seed(seed, request.num_samples + number) for number in range(draws_of(request))]
    return {
        "input_ids": [tokens[:at] for at in range(1, len(tokens)) for _ in range(k)],
        "rid": [name() for _ in seeds],
        "sampling_params": [drawn | {"sampling_seed": one} for one in seeds],
        "return_logprob": True,
        **({"lora_path": adapter} if adapter is not None else {}),
    }


def _scores(request: SampleRequest) -> tuple[int | None, EngineBody]:
    """Place where scores of the prompt begin (see `Bodies.start`; None: there are none), and the fields that ask for them."""
    tokens, first = len(request.tokens), []
    if not scored(request) or tokens == 1:
        return None, {}
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        first.append(first_scored(request))
    fields = {"return_logprob": True, **_likeliest(request.topk_prompt_logprobs)}
    if request.target_prompt_logprobs is not None:
        rows, ids = targeted(request.target_prompt_logprobs)
        first.append(int(rows[0]) + 1)
        fields["token_ids_logprob"] = ids.tolist()
    start = min(first) - 1
    return start, fields | {"logprob_start_len": start}


def first_scored(request: SampleRequest) -> int:
    """The first token of the prompt whose log-prob is asked for."""
    last = request.prompt_logprobs_last_n
    return 1 if last is None else len(request.tokens) - last


def _likeliest(count: int) -> EngineBody:
    """Fields that ask for the `count` likeliest tokens, as arrays of bytes."""
    if not count:
        return {}
    flags = ("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64")
    return {"top_logprobs_num": count, **dict.fromkeys(flags, True)}


def _sampling(request: SampleRequest, limits: EngineLimits) -> EngineBody:
    """`sampling_params` without the seed. Stops that are given add to the model's own ends; none at all turn these off, too."""
    stop = request.stop
    texts = [item for item in stop or () if isinstance(item, str)]
    ids = [item for item in stop or () if isinstance(item, int)]
    return {
        "max_new_tokens": most_tokens(request, limits),
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k if request.top_k > 0 else -1,
        "stop_token_ids": [*limits.ends, *ids],
        "ignore_eos": stop is not None and not stop,
        **asked(texts, limits.tokenizer_folder, 0),
    }


def sample_seed(seed: int, number: int) -> int:
    """The seed of a request's `number`-th sample, from −2⁶³ up to 2⁶³ − 1."""
    return int.from_bytes(blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "little", signed=True)


def _prompt_of(request: SampleRequest, limits: EngineLimits) -> EngineBody:
    if not request.pictures:
        return {"input_ids": request.tokens.tolist()}
    shown = sorted(request.pictures, key=lambda picture: picture.place)
    return {
        "input_ids": _with_one_place_each(shown_tokens(request, limits), shown).tolist(),
        "image_data": [f"data:image/{one.format};base64,{base64.b64encode(one.content).decode()}" for one in shown],
        "return_prompt_token_ids": True,
    }


def shown_tokens(request: SampleRequest, limits: EngineLimits) -> Array:
    """The prompt's tokens with the model's own id where pictures are."""
    tokens = request.tokens.copy()
    for picture in request.pictures:
        tokens[picture.place : picture.place + picture.length] = limits.image_token
    return tokens


def _with_one_place_each(tokens: Array, pictures: Sequence[Picture]) -> Array:
    stays = np.ones(len(tokens), dtype=bool)
    for picture in pictures:
        stays[picture.place + 1 : picture.place + picture.length] = False
    return tokens[stays]
