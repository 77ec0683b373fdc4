"""Decisions of the routers of this rank's layers in an update, counted where it is decided, and what keeps experts in balance.

megatron-core's own counts take padding for tokens, and a shared prompt once however many responses it has; these do not, so
they are the same in every layout and packing. Nothing here waits for the device before the update is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.stream import PackedStream, StreamShard
from megarl.data.stream_sequences import TokenSequences, token_sequences
from megarl.megatron.balance_losses import (
    BalanceTerms,
    WithLoss,
    batch_terms,
    normalised_scores,
    sequence_terms,
    squared_log_sum,
)
from megarl.megatron.options import ExpertBalance
from megarl.observe.expert_load import LayerRouting

_FIGURES = ("tokens", "entropy", "z_loss", "sequence_balance")
"""Sums of a layer besides those of each expert."""


class RouterWatch:
    """The routers of a role's chunks on this rank, in the order of their layers."""

    def __init__(self, chunks: Sequence[torch.nn.Module], layout: Layout, balance: ExpertBalance) -> None:
        self.layout, self.balance = layout, balance
        layers = [layer for chunk in chunks for layer in _core(chunk).decoder.layers if hasattr(layer.mlp, "router")]
        self.numbers: list[int] = [layer.layer_number - 1 for layer in layers]
        self.routers: list[Any] = [layer.mlp.router for layer in layers]
        self.experts = self.routers[0].num_experts if self.routers else 0
        for index, router in enumerate(self.routers):
            router.routing = partial(self._route, index, router.routing)
        width = 2 * self.experts + len(_FIGURES)
        device = torch.cuda.current_device()
        self.sums = torch.zeros(len(self.routers), width, dtype=torch.float64, device=device)
        self.aside = torch.zeros_like(self.sums)
        """Sums of earlier passes that the next `take` tells together with the last one's."""
        self.loads = torch.zeros(len(self.routers), self.experts, dtype=torch.float64, device=device)
        """Loads of the whole batch, where a loss must know them before the backward pass."""
        self.totals = torch.zeros(2, dtype=torch.float32, device=device)
        """Tokens and sequences of the whole batch, where losses are divided by them."""
        self._trains = False
        self._now: TokenSequences | None = None
        self._waiting: list[deque[BalanceTerms]] = [deque() for _ in self.routers]
        """By router the terms of micro-batches whose layer is computed anew going backward, in the order of their passes."""

    @property
    def counts_first(self) -> bool:
        """Return whether a pass without gradients must count the batch's loads before the one with them."""
        return self.balance.balance_coef > 0

    def begin(self, micro_batches: Sequence[TokenSequences | None], *, trains: bool) -> None:
        """Begin a pass over these micro-batches and forget what the last one counted; `trains`: with gradients."""
        self.sums.zero_()
        self._trains = trains and self.balance.has_losses
        for waiting in self._waiting:
            waiting.clear()
        if self._trains:
            lengths = torch.cat([sequences.lengths for sequences in micro_batches if sequences is not None])
            self.totals = torch.stack([lengths.sum(), (lengths > 0).sum().float()])
            torch.distributed.all_reduce(self.totals, group=parallel_state.get_data_parallel_group())

    def tokens_of(self, stream: PackedStream, share: StreamShard) -> TokenSequences:
        """The tokens of a micro-batch that this rank's routers are given, for `micro_batch`; in main memory."""
        positions = share.positions
        if self.layout.sequence_parallel:
            positions = positions.chunk(self.layout.tp)[parallel_state.get_tensor_model_parallel_rank()]
        return token_sequences(stream).held(positions)

    @contextmanager
    def micro_batch(self, tokens: TokenSequences) -> Iterator[None]:
        """The forward pass of a micro-batch: what it routes is counted, not again when that is computed anew going backward."""
        self._now = tokens
        try:
            yield
        finally:
            self._now = None

    def keep_loads(self) -> None:
        """Have what the pass counted as the batch's loads, for the losses of the next one; collective over the stage."""
        self._reduce(self.sums)
        self.loads = self.sums[:, : self.experts].clone()

    def set_aside(self) -> None:
        """Keep what the pass counted for the `take` after a later one."""
        self.aside += self.sums
        self.sums.zero_()

    def take(self) -> dict[int, LayerRouting]:
        """By layer what all ranks of this stage routed in the pass and in those set aside, on its leading rank; collective."""
        self._trains = False
        self.sums += self.aside
        self.aside.zero_()
        return self._told(self.sums)

    def tell(self) -> dict[int, LayerRouting]:
        """Return what `take` would of the last pass alone; its counts stay for the `take` after it. Collective."""
        return self._told(self.sums.clone())

    def _told(self, sums: Tensor) -> dict[int, LayerRouting]:
        self._reduce(sums)
        at = self.layout.coords(torch.distributed.get_rank())
        if not self.routers or at.tp or at.cp or at.dp:
            return {}
        biases = [router.expert_bias for router in self.routers if router.expert_bias is not None]
        spread = torch.stack([bias.max() - bias.min() for bias in biases]) if biases else sums.new_zeros(len(self.routers))
        rows = torch.cat([sums, spread[:, None].double()], dim=1).tolist()
        return {number: self._figures(row) for number, row in zip(self.numbers, rows, strict=True)}

    def move_biases(self) -> None:
        """Move each expert's bias against its load in the pass that was taken (DeepSeek-V3, arXiv 2412.19437, 2.1.2)."""
        if self.balance.bias_update_rate:
            loads = self.sums[:, : self.experts]
            steps = self.balance.bias_update_rate * (loads.mean(1, keepdim=True) - loads).sign()
            for router, step in zip(self.routers, steps, strict=True):
                router.expert_bias += step.float()

    def _reduce(self, sums: Tensor) -> None:
        if self.routers:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            torch.distributed.all_reduce(sums, group=group)

    def _figures(self, row: list[float]) -> LayerRouting:
        loads, scores, rest = row[: self.experts], row[self.experts : 2 * self.experts], row[2 * self.experts :]
        tokens, *sums = rest
        return LayerRouting(self.routers[0].topk, tokens, tuple(loads), tuple(scores), *sums)

    def _route(self, place: int, decide: Any, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The router's decision `decide(logits)`, weights and choices `[T, E]`, as it is: looked at, and with losses behind."""
        weights, chosen = decide(logits, *args, **kwargs)
        flat, terms = logits.view(-1, self.experts), None
        if self._now is not None:
            with torch.no_grad():
                terms = self._look(place, flat, chosen, self._now)
            if terms is not None and not torch.is_grad_enabled():
                self._waiting[place].append(terms)
        elif self._trains and torch.is_grad_enabled():
            terms = self._waiting[place].popleft()
        if terms is None or not torch.is_grad_enabled():
            return weights, chosen
        return WithLoss.apply(weights, terms.loss(flat, self.routers[place].score_function)), chosen

    def _look(self, place: int, logits: Tensor, chosen: Tensor, tokens: TokenSequences) -> BalanceTerms | None:
        """Count one decision; in a pass that trains also the losses that belong to it, if there are any."""
        router, balance = self.routers[place], self.balance
        by_segment = tokens.weights
        times = by_segment[tokens.segment][:, None]
        scores = normalised_scores(logits, router.score_function)
        figures = [times.sum(), (times * -torch.xlogy(scores, scores)).sum(), times.new_zeros(()), times.new_zeros(())]
        terms = None
        if self._trains:
            of_scores = scores.new_zeros(len(by_segment), self.experts)
            if balance.balance_coef:
                of_scores += balance.balance_coef * batch_terms(self.loads[place], self.totals[0], router.topk, tokens)
            if balance.sequence_balance_coef:
                group = parallel_state.get_tensor_and_context_parallel_group()
                of_sequences = sequence_terms(scores, router.topk, tokens, self.totals[1], group)
                figures[3] = (of_sequences[tokens.segment] * scores).sum()
                of_scores += balance.sequence_balance_coef * of_sequences
            if balance.z_loss_coef:
                figures[2] = (times[:, 0] * squared_log_sum(logits)).sum()
            terms = BalanceTerms(tokens.segment, of_scores, balance.z_loss_coef * by_segment / self.totals[0])
        of_experts = torch.cat([(times * chosen).sum(0), (times * scores).sum(0)])
        self.sums[place] += torch.cat([of_experts, torch.stack(figures)]).double()
        return terms


def _core(chunk: torch.nn.Module) -> Any:
    return unwrap_model(chunk)
