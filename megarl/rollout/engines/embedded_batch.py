"""Rows of the embedded engine that are computed together: prefill, and one token after another for all of them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from megarl.data.columns import TokenValues, of_responses, of_tokens
from megarl.data.media import Media
from megarl.data.prefills import NO_PREFILLS, PrefillCounts
from megarl.data.stop_finder import StopFinder
from megarl.rollout.engines.drawing import sample
from megarl.rollout.engines.embedded_turns import KeptTurn, TurnCache
from megarl.rollout.engines.protocol import FinishReason, Generation, SamplingParams


class Recorder(Protocol):
    """Takes down a token column in passes of a model, while `is_on` (`open_recorder(model)` in an option's `embedded.py`)."""

    name: str
    is_on: bool

    def take(self, batch: int) -> TokenValues | None:
        """`[batch, tokens, ...]` of the last pass; None where nothing was taken down."""


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt's pictures, and the positions int64 `[3, P]` or `[P]` of its tokens; a response goes on behind the largest."""

    media: tuple[Media, ...]
    positions: torch.Tensor

    def positions_with(self, response: int) -> torch.Tensor:
        """int64 `[3, P + response]` or `[P + response]`."""
        behind = int(self.positions.max()) + 1 + torch.arange(response)
        return torch.cat([self.positions, behind.expand(*self.positions.shape[:-1], -1)], dim=-1)


class Sight(Protocol):
    """The inputs of a model that sees (`PictureInputs` in the option pictures)."""

    def prompt(self, ids: Sequence[int], media: Sequence[Media]) -> SeenPrompt:
        """Raises EngineError: the model cannot be shown these pictures."""

    def inputs(self, prompts: Sequence[SeenPrompt], responses: Sequence[int]) -> dict[str, Any]:
        """Tensors beside ids, of prompts with so many response tokens, all padded on the left."""


@dataclass
class OpenResponse:
    """One response under way."""

    prompt: list[int]
    generator: torch.Generator
    seen: SeenPrompt | None = None
    key: str = ""
    conversation: str | None = None
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    pieces: dict[str, list[TokenValues]] = field(default_factory=dict)
    """The token columns of its tokens so far, under the weights that it is sampled by now."""
    prefill: PrefillCounts = NO_PREFILLS
    finish_reason: FinishReason | None = None
    finder: StopFinder | None = None
    """Of stop texts; None: there are none."""

    def begin_with(self, begun: Generation) -> None:
        """Go on from what there is of a response; one that was not cut is complete."""
        self.response, self.log_probs = list(begun.response_ids), list(begun.log_probs)
        self.versions, self.extra, self.prefill = list(begun.weight_versions), of_responses(begun.extra), begun.prefill
        if begun.finish_reason != "abort":
            self.finish_reason = begun.finish_reason
            self.pieces = {name: [values] for name, values in of_tokens(begun.extra).items()}


class DecodeBatch:
    """Rows computed together. `prefill` before the first `next_tokens` and whenever the weights have changed."""

    def __init__(
        self,
        model: Any,
        rows: list[OpenResponse],
        params: SamplingParams,
        sight: Sight | None,
        recorders: Sequence[Recorder],
        turns: TurnCache | None = None,
    ) -> None:
        """`turns` keeps what is computed of a conversation, where one row with one is all there is to compute."""
        self._turns = turns if len(rows) == 1 and rows[0].conversation is not None else None
        self._was_counted = False
        self.rows, self._sight, self._recorders = list(rows), sight, recorders
        self._model, self._params = model, params
        ends = model.generation_config.eos_token_id
        ends = {*params.stop_token_ids, *([] if ends is None else [ends] if isinstance(ends, int) else ends)}
        self._ends = set() if params.ignore_eos else ends
        self._cache: Any = None
        self._mask = torch.empty(0)
        self._logits = torch.empty(0)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Compute the caches of all rows from their tokens."""
        if self._turns is None:
            self._prefill(None)
        else:
            self._prefill_turn(self._turns)

    def _prefill_turn(self, turns: TurnCache) -> None:
        """Prefill, as `_prefill`, one row whose earlier turns may be kept. No layer of its cache forgets: it can be cut
        back."""
        [row] = self.rows
        ids = [*row.prompt, *row.response]
        assert row.conversation is not None, "only conversations are kept"
        kept_turn = turns.take(row.conversation, ids)
        self._cache, had = (kept_turn.cache, len(kept_turn.ids)) if kept_turn is not None else (DynamicCache(), 0)
        self._mask = torch.ones(1, len(ids), dtype=torch.long, device=self._model.device)
        output = self._computed(
            input_ids=torch.tensor([ids[had:]], device=self._model.device),
            attention_mask=self._mask,
            position_ids=torch.arange(had, len(ids), device=self._model.device)[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._logits = output.logits[:, -1]
        self._count([had])

    def _count(self, cached: Sequence[int]) -> None:
        """Once for each request: passes that an update of the weights makes necessary count no tokens again."""
        for row, had in zip(() if self._was_counted else self.rows, cached, strict=False):
            row.prefill += PrefillCounts(len(row.prompt) + len(row.response), had)
        self._was_counted = True

    def _prefill(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Equal token sequences are computed once: returns their ids, int64 `[U, S]`, padded on the left, and the one of each
        row, int64 `[B]`. `cache` is an empty one to fill; None: the model makes its own."""
        device = self._model.device
        sequences: dict[tuple[Any, ...], int] = {}
        media = [row.seen.media if row.seen is not None else () for row in self.rows]
        keys = [(of_row, *row.prompt, *row.response) for row, of_row in zip(self.rows, media, strict=True)]
        where = [sequences.setdefault(key, len(sequences)) for key in keys]
        ids_of = [list(key[1:]) for key in sequences]
        longest = max(map(len, ids_of))
        ids = torch.tensor([[0] * (longest - len(s)) + s for s in ids_of], device=device)
        mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in ids_of], device=device)
        more = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        if self._sight is not None:
            first = [self.rows[where.index(number)] for number in range(len(sequences))]
            prompts = [row.seen for row in first if row.seen is not None]
            inputs = self._sight.inputs(prompts, [len(row.response) for row in first])
            more = {name: value.to(device) for name, value in inputs.items()}
        if cache is not None:
            more["past_key_values"] = cache
        output = self._computed(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **more)
        for name, values in self._recorded(len(ids_of)):
            for row, sequence in zip(self.rows, where, strict=True):
                row.pieces[name] = [values[sequence, longest - len(ids_of[sequence]) :]]
        self._count([len(ids_of[unique]) if unique in where[:at] else 0 for at, unique in enumerate(where)])
        rows = torch.tensor(where, device=device)
        self._cache = output.past_key_values
        self._cache.reorder_cache(rows)  # batch_select_indices does the same, but not for layers with linear attention
        self._mask, self._logits = mask[rows], output.logits[rows, -1]
        return ids, rows

    @torch.inference_mode()
    def abort(self, keys: Container[str]) -> None:
        """End the responses to the prompts called `keys` with what they have."""
        for row in self.rows:
            if row.key in keys:
                row.finish_reason = "abort"
        self._logits = self._logits[self._leave_out_ended()] if self._cache is not None else self._logits

    @torch.inference_mode()
    def next_tokens(self, version: int) -> None:
        """Sample one token for every row, and compute what comes after it."""
        tokens = self._sample_one(version)
        if self.rows:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
            output = self._computed(
                input_ids=tokens[:, None],
                attention_mask=self._mask,
                position_ids=self._next_positions(),
                past_key_values=self._cache,
                use_cache=True,
            )
            self._logits = output.logits[:, -1]
            for name, values in self._recorded(len(self.rows)):
                for row, row_values in zip(self.rows, values, strict=True):
                    row.pieces[name].append(row_values)

    def _sample_one(self, version: int) -> torch.Tensor:
        """Sample one token for every row, and leave out those that it ends; returns the tokens of the others, `[B]`."""
        tokens, log_probs = sample(self._logits.float(), self._params, [row.generator for row in self.rows])
        for row, token, log_prob in zip(self.rows, tokens.tolist(), log_probs.tolist(), strict=True):
            self._append(row, token, log_prob, version)
        return tokens[self._leave_out_ended()]

    def _append(self, row: OpenResponse, token: int, log_prob: float, version: int) -> None:
        row.response.append(token)
        row.log_probs.append(log_prob)
        row.versions.append(version)
        if token in self._ends:
            row.finish_reason = "stop"
        elif token in self._params.cut_token_ids:
            row.finish_reason = "length"
        elif row.finder is not None and row.finder.take(token):
            row.finish_reason = "stop"
        elif len(row.response) == self._params.max_new_tokens:
            row.finish_reason = "length"

    def _leave_out_ended(self) -> torch.Tensor:
        """Go on with the rows that have not ended; returns their places among those until now, int64 `[B]`."""
        going_on = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        if self._turns is not None and not going_on:
            self._keep_turn(self._turns, self.rows[0])
        remaining = torch.tensor(going_on, dtype=torch.long, device=self._mask.device)
        if self._cache is not None and going_on and len(going_on) < len(self.rows):
            self._cache.reorder_cache(remaining)
            self._mask = self._mask[remaining]
        self.rows = [self.rows[i] for i in going_on]
        return remaining

    def _keep_turn(self, turns: TurnCache, row: OpenResponse) -> None:
        """All but the last token, which was not computed."""
        ids = [*row.prompt, *row.response]
        if self._cache is not None and row.conversation is not None:
            turns.keep(row.conversation, KeptTurn(ids[: self._cache.get_seq_length()], self._cache))

    def _computed(self, **inputs: Any) -> Any:
        """The model's answer; the token columns that are asked for are taken down."""
        for recorder in self._recorders:
            recorder.is_on = recorder.name in self._params.extra
        try:
            return self._model(**inputs)
        finally:
            for recorder in self._recorders:
                recorder.is_on = False

    def _recorded(self, batch: int) -> list[tuple[str, TokenValues]]:
        """The token columns of the last pass, of `batch` sequences: `[batch, tokens, ...]` by name."""
        taken = [(recorder.name, recorder.take(batch)) for recorder in self._recorders]
        return [(name, values) for name, values in taken if values is not None]

    def _next_positions(self) -> torch.Tensor:
        """Positions of the tokens that were sampled last: int64 `[B, 1]`, or `[3, B, 1]` of a model with three axes."""
        if self._sight is None:
            return self._mask.sum(1, keepdim=True) - 1
        last = [row.seen.positions_with(len(row.response))[..., -1:] for row in self.rows if row.seen is not None]
        return torch.stack(last, dim=-2).to(self._mask.device)
