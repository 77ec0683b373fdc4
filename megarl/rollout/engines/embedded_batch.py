"""Rows of the embedded engine that are computed together: prefill, and one token after another for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.data.drafts import NO_DRAFTS, DraftCounts
from megarl.data.routes import Routes
from megarl.rollout.engines.drawing import sample
from megarl.rollout.engines.embedded_routes import RouteRecorder
from megarl.rollout.engines.embedded_seeing import SeenPrompt, Sight
from megarl.rollout.engines.protocol import FinishReason, SamplingParams


@dataclass
class OpenResponse:
    """One response under way."""

    prompt: list[int]
    generator: torch.Generator
    seen: SeenPrompt | None = None
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)
    """Of its tokens so far, under the weights that it is sampled by now."""
    drafts: DraftCounts = NO_DRAFTS
    finish_reason: FinishReason | None = None


class DecodeBatch:
    """Rows computed together. `prefill` before the first `next_tokens` and whenever the weights have changed."""

    def __init__(
        self, model: Any, rows: list[OpenResponse], params: SamplingParams, sight: Sight | None, recorder: RouteRecorder
    ) -> None:
        self.rows, self._sight, self._recorder = list(rows), sight, recorder
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
        self._prefill(None)

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
            given = self._sight.inputs(prompts, [len(row.response) for row in first])
            more = {name: value.to(device) for name, value in given.items()}
        if cache is not None:
            more["past_key_values"] = cache
        output = self._computed(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **more)
        if (routes := self._recorder.take(len(ids_of))) is not None:
            for row, sequence in zip(self.rows, where, strict=True):
                row.routes = [routes[sequence, longest - len(ids_of[sequence]) :]]
        rows = torch.tensor(where, device=device)
        self._cache = output.past_key_values
        self._cache.reorder_cache(rows)  # batch_select_indices does the same, but not for layers with linear attention
        self._mask, self._logits = mask[rows], output.logits[rows, -1]
        return ids, rows

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
            if (routes := self._recorder.take(len(self.rows))) is not None:
                for row, own in zip(self.rows, routes, strict=True):
                    row.routes.append(own)

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
        elif token in self._params.cut_token_ids or len(row.response) == self._params.max_new_tokens:
            row.finish_reason = "length"

    def _leave_out_ended(self) -> torch.Tensor:
        """Go on with the rows that have not ended; returns their places among those until now, int64 `[B]`."""
        going_on = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        kept = torch.tensor(going_on, dtype=torch.long, device=self._mask.device)
        if going_on and len(going_on) < len(self.rows):
            self._cache.reorder_cache(kept)
            self._mask = self._mask[kept]
        self.rows = [self.rows[i] for i in going_on]
        return kept

    def _computed(self, **inputs: Any) -> Any:
        """What the model answers, its choices of experts taken down if they are asked for."""
        self._recorder.is_on = self._params.routes
        try:
            return self._model(**inputs)
        finally:
            self._recorder.is_on = False

    def _next_positions(self) -> torch.Tensor:
        """Those of the tokens that were sampled last: int64 `[B, 1]`, or `[3, B, 1]` of a model that sees."""
        if self._sight is None:
            return self._mask.sum(1, keepdim=True) - 1
        last = [row.seen.positions_with(len(row.response))[:, -1:] for row in self.rows if row.seen is not None]
        return torch.stack(last, dim=1).to(self._mask.device)
