"""Speculative decoding in the embedded engine: one pass of the policy verifies what a draft proposed, for all rows at once.

Responses are distributed as without, whatever the draft (`drawing.verify`); log-probs and token columns are those of the
passes of the policy. Caches are cut back to the tokens that stayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache

from megarl.errors import ConfigError
from megarl.models.hf_folder import HFFolder
from megarl.models.registry import load_hf_config
from megarl.models.transformers_names import config_in_transformers, hub_tensors
from megarl.options.prediction.column import NAME, NO_DRAFTS, DraftCounts
from megarl.options.prediction.embedded_drafts import (
    Draft,
    LanguageModel,
    ModelDraft,
    MtpLayer,
    NgramDraft,
    cut_back,
    positions_of,
)
from megarl.options.prediction.section import SpeculativeConfig
from megarl.rollout.engines.drawing import random_numbers, verify, weights_and_log_probs
from megarl.rollout.engines.embedded_batch import DecodeBatch, OpenResponse, Recorder
from megarl.rollout.engines.embedded_turns import refusal
from megarl.rollout.engines.protocol import SamplingParams


class TrunkStates:
    """The states behind the last norm in the latest pass of a transformers model, which a prediction layer begins with."""

    def __init__(self, model: Any) -> None:
        self._latest: Tensor | None = None
        model.get_decoder().register_forward_hook(self._keep)

    def _keep(self, module: Any, given: Any, output: Any) -> None:
        self._latest = output.last_hidden_state

    def take(self) -> Tensor | None:
        """`[B, S, H]`."""
        latest, self._latest = self._latest, None
        return latest


class Speculation:
    """The drafting of an engine: what its batches share."""

    def __init__(
        self, num_steps: int, open_draft: Callable[[SamplingParams], Draft], states: TrunkStates | None = None
    ) -> None:
        """`open_draft` makes the draft of one batch; `states` if it begins with those of the policy."""
        self.num_steps, self.open_draft, self.states = num_steps, open_draft, states
        self.held: dict[str, Tensor] = {}
        """Weights of the draft that are updated with the policy, by hub name."""

    @classmethod
    def of(cls, settings: SpeculativeConfig, folder: str | Path, policy: Any, load: Callable[[str], Any]) -> Speculation | None:
        """Make the drafts that a config asks for; None: tokens are sampled one by one. `load` reads the transformers
        model in a folder.

        Raises:
            ConfigError: as `check_drafts`.
        """
        if settings.algorithm == "none":
            return None
        check_drafts(settings, folder)
        if settings.algorithm == "ngram":
            return cls(settings.num_steps, lambda params: NgramDraft())
        if settings.algorithm == "mtp":
            layer = MtpLayer(policy)
            speculation = cls(settings.num_steps, lambda params: ModelDraft(layer, params), TrunkStates(policy))
            speculation.held, stored = hub_tensors(layer.named), HFFolder(folder)
            for name, tensor in speculation.held.items():
                tensor.copy_(stored.get_slice(name)[:])
            return speculation
        assert settings.draft_model is not None, "the config has been checked"
        small = LanguageModel(load(settings.draft_model))
        return cls(settings.num_steps, lambda params: ModelDraft(small, params))

    def open_batch(
        self, model: Any, rows: list[OpenResponse], params: SamplingParams, recorders: Sequence[Recorder]
    ) -> SpeculativeBatch:
        """The rows as a batch that drafts."""
        return SpeculativeBatch(model, rows, params, recorders, self)


def check_drafts(settings: SpeculativeConfig, folder: str | Path) -> None:
    """Refuse drafts for the model in `folder` that could not be taken back, or do not fit it; reads no weights.

    Raises:
        ConfigError: names the field.
    """
    field, algorithm = "rollout.speculative.algorithm", settings.algorithm
    if algorithm == "none":
        return
    policy = _config_of(folder)
    if why := refusal(policy):
        raise ConfigError.of(field, algorithm, f"needs a cache that can be cut back, but {why}", allowed="'none'")
    if algorithm == "mtp":
        missing = f"model.layers.{policy.num_hidden_layers}.eh_proj.weight"
        if missing not in HFFolder(folder).names:
            reason = f"drafts with the layer for multi-token prediction behind the decoder, but '{folder}' has no {missing}"
            raise ConfigError.of(field, "mtp", reason, allowed="'none', 'ngram' or 'standalone'")
    if settings.draft_model is not None:
        small, field = _config_of(settings.draft_model), "rollout.speculative.draft_model"
        why = refusal(small)
        if small.vocab_size != policy.vocab_size:
            why = f"it has {small.vocab_size} tokens"
        if why:
            allowed = f"a model with the policy's {policy.vocab_size} tokens, attention in every layer and no pictures"
            raise ConfigError.of(field, settings.draft_model, f"cannot draft: {why}", allowed=allowed)


def _config_of(folder: str | Path) -> Any:
    """The config of a folder as transformers reads it."""
    load_hf_config(folder)  # says what is wrong with it
    return config_in_transformers(folder) or AutoConfig.from_pretrained(folder, trust_remote_code=False)


class SpeculativeBatch(DecodeBatch):
    """A `DecodeBatch` of which a call of `next_tokens` may give a row several tokens."""

    def __init__(
        self,
        model: Any,
        rows: list[OpenResponse],
        params: SamplingParams,
        recorders: Sequence[Recorder],
        speculation: Speculation,
    ) -> None:
        super().__init__(model, rows, params, None, recorders)
        self._speculation, self._draft = speculation, speculation.open_draft(params)
        self._is_computed = False

    @torch.inference_mode()
    def prefill(self) -> None:
        # layers with a window would otherwise forget what a cut brings back into it
        ids, rows = self._prefill(DynamicCache())
        states = self._take_states()
        self._draft.restart(ids[rows], self._mask, states[rows] if states is not None else None)
        self._is_computed = True

    def _take_states(self) -> Tensor | None:
        return self._speculation.states.take() if self._speculation.states is not None else None

    @torch.inference_mode()
    def next_tokens(self, version: int) -> None:
        """Sample a token behind a prefill; else verify a draft for every row, and sample a token behind it."""
        if self._is_computed:
            self._is_computed = False
            self._sample_one(version)
            return
        steps, rows = self._speculation.num_steps, self.rows
        numbers = random_numbers([row.generator for row in rows], 2 * steps + 1)
        room = torch.tensor([self._params.max_new_tokens - len(row.response) for row in rows], device=self._mask.device)
        counts = (room - 1).clamp(max=steps)
        sequences = [[*row.prompt, *row.response] for row in rows]
        proposals = self._draft.propose(sequences, counts, numbers[:, :steps])
        ids = torch.cat([torch.tensor([[tokens[-1]] for tokens in sequences], device=counts.device), proposals.tokens], dim=1)
        logits = self._verified(ids)
        weights, log_probs = weights_and_log_probs(logits.float().flatten(0, 1), self._params)
        shape = (*ids.shape, -1)
        accepted, behind = verify(weights.view(shape), proposals, numbers[:, steps:])
        self._take(version, accepted.tolist(), proposals.counts.tolist(), proposals.tokens, behind, log_probs.view(shape))
        self._draft.advance(ids, self._take_states(), accepted)
        remaining = self._leave_out_ended()
        if self.rows:
            self._mask = cut_back(self._cache, self._mask, ids.shape[1] - 1 - accepted[remaining])

    def _verified(self, ids: Tensor) -> Tensor:
        """Logits [B, W, V] of the policy behind each of `ids` [B, W]."""
        self._mask = torch.cat([self._mask, torch.ones_like(ids)], dim=1)
        output = self._computed(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions_of(self._mask, ids.shape[1]),
            past_key_values=self._cache,
            use_cache=True,
        )
        return output.logits  # type: ignore[no-any-return]

    def _take(
        self, version: int, accepted: list[int], counts: list[int], drafted: Tensor, behind: Tensor, log_probs: Tensor
    ) -> None:
        """Append what each row gained, until a token ends it."""
        recorded = self._recorded(len(self.rows))
        for number, row in enumerate(self.rows):
            tokens = [*drafted[number, : accepted[number]].tolist(), int(behind[number])]
            before = len(row.response)
            for index, token in enumerate(tokens):
                if row.finish_reason is None:
                    self._append(row, token, float(log_probs[number, index, token]), version)
            gained = len(row.response) - before
            row.extra[NAME] = row.extra.get(NAME, NO_DRAFTS) + DraftCounts(1, counts[number], min(gained, accepted[number]))
            for name, values in recorded:
                row.pieces[name].append(values[number, :gained])

    def _leave_out_ended(self) -> Tensor:
        before = len(self.rows)
        remaining = super()._leave_out_ended()
        if self._cache is not None and self.rows and len(self.rows) < before:
            self._draft.keep(remaining)
        return remaining
