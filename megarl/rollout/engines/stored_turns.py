"""Turns whose tokens lie in a store, as engines are asked to go on with them."""

from __future__ import annotations

from dataclasses import replace

from megarl.data.stored import ResponseTokens, StoredGeneration
from megarl.rollout.engines.protocol import EngineRequest, Generation

SampledTurn = Generation | StoredGeneration
"""A response as an engine's caller has it: with its tokens, or with a handle to them."""


def loaded(turn: SampledTurn) -> Generation:
    """The turn with its tokens, which are fetched if they are elsewhere."""
    if isinstance(turn, Generation):
        return turn
    tokens: ResponseTokens = turn.stored.get()
    place = tokens.place(turn.place)
    ids, log_probs, versions = (column[place].tolist() for column in (tokens.token_ids, tokens.log_probs, tokens.versions))
    return Generation(ids, log_probs, versions, turn.finish_reason, dict(turn.extra), turn.prefill)


def with_tokens(request: EngineRequest) -> EngineRequest:
    """The request as an engine takes it: what it is to go on from has its tokens."""
    if request.begun is None:
        return request
    begun = [[None if turn is None else loaded(turn) for turn in of_prompt] for of_prompt in request.begun]
    return replace(request, begun=begun)
