"""Sources of the embedded engine's drafts: the tokens so far, a small model, or the policy's own layer for prediction.

A draft may be anything: `drawing.verify` keeps what makes responses those of the policy. How good it is decides how many
tokens a pass yields.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

from megarl.rollout.engines.drawing import Proposals, draw, weights_and_log_probs
from megarl.rollout.engines.protocol import SamplingParams

LONGEST_MATCH = 4
"""How many of the last tokens are looked up among those before them, at most."""


class Draft(ABC):
    """Proposes tokens for the rows of one batch. `restart` comes first, and whenever the batch was computed anew."""

    @abstractmethod
    def propose(self, sequences: Sequence[Sequence[int]], counts: Tensor, numbers: Tensor) -> Proposals:
        """At most `counts` int64 [B] tokens to follow each sequence, all tokens so far; `numbers` float64 [B, K] to draw by."""

    def restart(self, ids: Tensor, mask: Tensor, states: Tensor | None) -> None:  # noqa: B027 - a lookup keeps nothing
        """The policy has computed `ids` [B, S], padded on the left as `mask` [B, S] says, and was in `states` [B, S, H]."""

    def advance(self, ids: Tensor, states: Tensor | None, accepted: Tensor) -> None:  # noqa: B027
        """The policy has computed `ids` [B, W]: the last token and what was proposed; `accepted` [B] of these stay."""

    def keep(self, rows: Tensor) -> None:  # noqa: B027
        """Go on with these rows alone."""


class NgramDraft(Draft):
    """What followed the same tokens when they came last: prompt lookup (Saxena 2023)."""

    def propose(self, sequences: Sequence[Sequence[int]], counts: Tensor, numbers: Tensor) -> Proposals:
        drafts = [looked_up(sequence, int(count)) for sequence, count in zip(sequences, counts, strict=True)]
        steps = max(map(len, drafts))
        tokens = torch.tensor(
            [[*draft, *[0] * (steps - len(draft))] for draft in drafts], dtype=torch.long, device=counts.device
        )
        return Proposals(
            tokens.view(len(drafts), steps), torch.tensor([len(draft) for draft in drafts], device=counts.device), None
        )


def looked_up(sequence: Sequence[int], count: int) -> list[int]:
    """At most `count` tokens that followed the longest run of up to `LONGEST_MATCH` last tokens when it came last."""
    ids = list(sequence)
    for size in range(min(LONGEST_MATCH, len(ids) - 1), 0, -1):
        run = ids[-size:]
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == run:
                return ids[start + size : start + size + count]
    return []


class DraftModel(ABC):
    """A model that computes one token after another, with a cache of its own."""

    @abstractmethod
    def opening(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """From all tokens [B, S] but the newest, what it is fed first, [B, C] and its mask; the last column is the newest's."""

    @abstractmethod
    def __call__(
        self, ids: Tensor, states: Tensor | None, mask: Tensor, cache: DynamicCache, last: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Feed `ids` [B, C] behind what `cache` holds; `mask` covers both.

        Returns logits [B, V] behind column `last` [B] of each row, and its state there, [B, 1, H].
        """


class ModelDraft(Draft):
    """Tokens drawn from a `DraftModel` under the sampling parameters of the responses.

    What the policy has computed since the last time, with the token behind it, is one chunk for the draft to begin with.
    """

    def __init__(self, model: DraftModel, params: SamplingParams) -> None:
        self._model, self._params = model, params

    def restart(self, ids: Tensor, mask: Tensor, states: Tensor | None) -> None:
        self._cache, self._mask = DynamicCache(), mask[:, :0]
        self._chunk, self._chunk_mask = self._model.opening(ids, mask)
        self._states = states
        self._last = torch.full((len(ids),), self._chunk.shape[1] - 1, device=ids.device)

    def advance(self, ids: Tensor, states: Tensor | None, accepted: Tensor) -> None:
        self._chunk, self._chunk_mask = ids.roll(-1, dims=1), torch.ones_like(ids)
        self._states, self._last = states, accepted

    def keep(self, rows: Tensor) -> None:
        self._cache.reorder_cache(rows)
        self._mask, self._chunk, self._chunk_mask = self._mask[rows], self._chunk[rows], self._chunk_mask[rows]
        self._states = self._states[rows] if self._states is not None else None
        self._last = self._last[rows]

    def propose(self, sequences: Sequence[Sequence[int]], counts: Tensor, numbers: Tensor) -> Proposals:
        if not (steps := int(counts.max())):
            return Proposals(counts.new_empty(len(sequences), 0), counts, None)
        rows = torch.arange(len(sequences), device=counts.device)
        self._chunk[rows, self._last] = torch.tensor([sequence[-1] for sequence in sequences], device=counts.device)
        mask = torch.cat([self._mask, self._chunk_mask], dim=1)
        logits, states = self._model(self._chunk, self._states, mask, self._cache, self._last)
        self._mask = mask = cut_back(self._cache, mask, self._chunk.shape[1] - 1 - self._last)
        tokens, probs = [], []
        for step in range(steps):
            weights, _ = weights_and_log_probs(logits.float(), self._params)
            tokens.append(draw(weights, numbers[:, step]))
            probs.append(weights / weights.sum(-1, keepdim=True))
            if step < steps - 1:
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
                logits, states = self._model(tokens[-1][:, None], states, mask, self._cache, torch.zeros_like(rows))
        cut_back(self._cache, mask, torch.full_like(rows, steps - 1))
        return Proposals(torch.stack(tokens, 1), counts, torch.stack(probs, 1))


def cut_back(cache: DynamicCache, mask: Tensor, cut: Tensor) -> Tensor:
    """Take the last `cut` [B] tokens of each row out of `cache`, whose `mask` [B, S] begins with padding.

    Rows are moved to the right, and columns that pad all of them left out. Returns the mask of what is left.
    """
    length = mask.shape[1]
    source = torch.arange(length, device=mask.device) - cut[:, None]
    mask = mask.gather(1, source.clamp(min=0)) * (source >= 0)
    begin = int((mask.cumsum(1) == 0).sum(1).min())
    source = source[:, begin:].clamp(min=0)
    for layer in cache.layers:
        for name in ("keys", "values"):
            cached = getattr(layer, name)
            index = source[:, None, :, None].expand(-1, cached.shape[1], -1, cached.shape[3])
            setattr(layer, name, cached.gather(2, index))
    return mask[:, begin:]


def positions_of(mask: Tensor, columns: int) -> Tensor:
    """Positions of the last columns of a mask that begins with padding, int64 [B, columns]."""
    return (mask.cumsum(1) - 1).clamp(min=0)[:, mask.shape[1] - columns :]


class LanguageModel(DraftModel):
    """A small language model with the policy's vocabulary."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def opening(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        newest = mask.new_ones(len(ids), 1)
        return torch.cat([ids, newest], dim=1), torch.cat([mask, newest], dim=1)

    def __call__(
        self, ids: Tensor, states: Tensor | None, mask: Tensor, cache: DynamicCache, last: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        num_logits = ids.shape[1] - int(last.min())
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions_of(mask, ids.shape[1]),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        rows = torch.arange(len(ids), device=ids.device)
        return output.logits[rows, last - (ids.shape[1] - num_logits)], None


class MtpLayer(DraftModel):
    """The layer that predicts the token after the next one from the policy's state and the next token (DeepSeek-V3, 2.2).

    Behind its last token it goes on with its own states. Embeddings and output layer are the policy's.
    """

    def __init__(self, model: Any) -> None:
        """A layer like the last one of `model`, a transformers model; its weights are yet to come into `tensors`."""
        decoder, hidden = model.get_decoder(), model.config.hidden_size
        layer, norm = copy.deepcopy(decoder.layers[-1]), decoder.norm
        layer.self_attn.layer_idx = 0  # in its own cache
        layer.enorm, layer.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        layer.eh_proj = nn.Linear(2 * hidden, hidden, bias=False, dtype=norm.weight.dtype, device=norm.weight.device)
        layer.shared_head = nn.Module()
        layer.shared_head.norm = copy.deepcopy(norm)
        self._policy, self._layer = model, layer.requires_grad_(False).eval()
        self.named = nn.Module()
        """The layer, under the names that a checkpoint gives it."""
        self.named.config = model.config
        self.named.model = nn.Module()
        self.named.model.layers = nn.ModuleDict({str(model.config.num_hidden_layers): layer})

    def opening(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return ids.roll(-1, dims=1), mask

    def __call__(
        self, ids: Tensor, states: Tensor | None, mask: Tensor, cache: DynamicCache, last: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        decoder, layer = self._policy.get_decoder(), self._layer
        both = torch.cat([layer.enorm(decoder.embed_tokens(ids)), layer.hnorm(states)], dim=-1)
        projected = layer.eh_proj(both)
        positions = positions_of(mask, ids.shape[1])
        output = layer(
            projected,
            attention_mask=create_causal_mask(
                config=self._policy.config,
                inputs_embeds=projected,
                attention_mask=mask,
                past_key_values=cache,
                position_ids=positions,
            ),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=decoder.rotary_emb(projected, position_ids=positions),
        )
        rows = torch.arange(len(ids), device=ids.device)
        state = layer.shared_head.norm(output[rows, last])
        return self._policy.lm_head(state), state[:, None]
