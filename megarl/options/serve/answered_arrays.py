"""Arrays of log-probs from SGLang's answers (0.5.23). Whole arrays at once, nothing token by token."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np

from megarl.errors import EngineError
from megarl.options.serve.asked_bodies import Bodies, first_scored, targeted
from megarl.options.serve.values import Answer, Array, Sampled, SampleRequest

NONE_ID, NONE_LOGPROB = 0, -99999.0
"""What stands in the protocol's matrices of likeliest tokens where there are none."""
_ENDS: Mapping[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}


class AbortedError(EngineError):
    """A server gave a request up that its client waits for."""


def read_sampled(
    request: SampleRequest,
    asked: Bodies,
    prompt: Mapping[str, Any] | None,
    samples: Sequence[Mapping[str, Any]],
    draws: Sequence[Mapping[str, Any]] = (),
) -> Sampled:
    """The answer to `request` from those to its bodies.

    Raises:
        AbortedError: a server gave one of them up.
        EngineError: one is no answer of SGLang's.
    """
    try:
        first = samples[0] if prompt is None else prompt
        sequences = [_answer(answer, request.topk_sample_logprobs) for answer in samples]
        cached = int(first["meta_info"].get("cached_tokens") or 0)
        scores = _scores(request, asked.start, first["meta_info"])
        return Sampled(sequences, *scores, prompt_alt_tokens=_drawn(request, draws), cache_hit_tokens=cached)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, binascii.Error) as error:
        raise EngineError(f"a server answered something that is no generation: {error!r}") from error


def _answer(answer: Mapping[str, Any], likeliest: int) -> Answer:
    info = answer["meta_info"]
    if (reason := info["finish_reason"]["type"]) == "abort":
        raise AbortedError(f"a server gave a request up: {info['finish_reason'].get('message')}")
    tokens = np.asarray(answer["output_ids"], dtype=np.int32)
    log_probs = _first_of_each(info["output_token_logprobs"])[: len(tokens)]
    if len(log_probs) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens and {len(log_probs)} log-probs")
    topk = None
    if likeliest:
        ids, values = _matrices(info, "output")
        topk = _placed((ids[: len(tokens)], values[: len(tokens)]), len(tokens), 0, likeliest)
    return Answer(tokens, log_probs, _ENDS[reason], topk)


def _drawn(request: SampleRequest, draws: Sequence[Mapping[str, Any]]) -> tuple[Array, Array] | None:
    """Ids int64 and log-probs float32 `[N - 1, k]` of tokens drawn behind each of the prompt's; None: none are asked for."""
    if not request.prompt_alt_tokens_k:
        return None
    found = [_answer(one, 0) for one in draws]
    shape = len(request.tokens) - 1, request.prompt_alt_tokens_k
    ids = np.asarray([one.tokens[0] for one in found], dtype=np.int64).reshape(shape)
    return ids, np.asarray([one.logprobs[0] for one in found], dtype=np.float32).reshape(shape)


def _scores(request: SampleRequest, start: int | None, info: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """`prompt_logprobs`, `topk_prompt` and `target_prompt_logprobs`; None where they are not asked for."""
    tokens, first = len(request.tokens), first_scored(request)
    prompt = np.full(tokens, np.nan, dtype=np.float32) if request.prompt_logprobs else None
    k = request.topk_prompt_logprobs
    topk = _placed(_matrices(info, "input"), tokens, first, k) if k and start is not None else None
    if k and topk is None:
        topk = _empty(tokens, k)
    if start is None:
        return prompt, topk, None
    if prompt is not None:
        log_probs = _first_of_each(info["input_token_logprobs"])
        if len(log_probs) != tokens - start:
            raise ValueError(f"{len(log_probs)} log-probs of {tokens - start} prompt tokens")
        prompt[first:] = log_probs[first - start :]
    return prompt, topk, _of_targets(request, start, info)


def _of_targets(request: SampleRequest, start: int, info: Mapping[str, Any]) -> Array | None:
    targets = request.target_prompt_logprobs
    if targets is None:
        return None
    _, ids = targeted(targets)
    found = info["input_token_ids_logprobs"][1:]  # the first token asked for has none
    scores = _first_of_each([*chain.from_iterable(found)]).reshape(len(found), len(ids))
    if len(found) != len(targets) - start:
        raise ValueError(f"log-probs of ids at {len(found)} of {len(targets) - start} prompt tokens")
    picked = np.zeros(targets.shape, dtype=np.float32)
    columns = np.searchsorted(ids, targets[start:]).clip(max=len(ids) - 1)
    picked[start:] = np.where(targets[start:] >= 0, np.take_along_axis(scores, columns, axis=1), 0.0)
    return picked


def _first_of_each(entries: Sequence[Sequence[Any]]) -> Array:
    """float32 log-probs from SGLang's entries, each of a log-prob, an id and a text; NaN where there is none."""
    return np.asarray(next(zip(*entries, strict=True), ()), dtype=np.float32)


def _matrices(info: Mapping[str, Any], side: str) -> tuple[Array, Array]:
    """Ids int32 and log-probs float32 `[rows, k]` of the likeliest tokens at the last rows of a `side`, `input` or `output`."""
    shape = info[f"{side}_top_logprobs_shape"]
    values, ids = (base64.b64decode(info[f"{side}_top_logprobs_{name}_flat_b64"], validate=True) for name in ("val", "idx"))
    return np.frombuffer(ids, dtype=np.int32).reshape(shape), np.frombuffer(values, dtype=np.float32).reshape(shape)


def _empty(rows: int, k: int) -> tuple[Array, Array]:
    return np.full((rows, k), NONE_ID, dtype=np.int32), np.full((rows, k), NONE_LOGPROB, dtype=np.float32)


def _placed(found: tuple[Array, Array], rows: int, first: int, k: int) -> tuple[Array, Array]:
    """The first `k` columns of `found`, whose last row is that of the last of `rows` tokens; none before token `first`."""
    ids, log_probs = _empty(rows, k)
    count = min(rows - first, len(found[0]))
    if count:
        ids[rows - count :], log_probs[rows - count :] = found[0][-count:, :k], found[1][-count:, :k]
    return ids, log_probs
