"""The head in place of the output layer of a `GPTModel`: token log-probs from hidden states.

It never holds a full `[N, V]` logit matrix: it goes through the scored rows in chunks, forward and
backward, and each tensor-parallel rank sees only its slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.data.stream import TopK
from megarl.megatron.logit_passes import logits_to_gradient, row_sums
from megarl.megatron.options import SamplingLimits, default_chunk_tokens
from megarl.megatron.parameter_gradients import add_product, given_to_autograd, sum_of_gradients
from megarl.megatron.row_gradients import RowGradients
from megarl.megatron.slice_sums import largest_of_all, relative_to_all

LIMITED_BUFFERS = 4
"""How many times as many buffers of logits sampling limits need."""


class VocabParallelLogProbs(torch.autograd.Function):
    """Log-probs of targets and entropy of their distribution, over a vocabulary split across a group.

    Logits are recomputed chunk by chunk in the backward pass, but for the first chunk's, which the forward pass leaves as its
    last: they take no more memory than a chunk always does. float32 throughout the softmax and in the sum over chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_start: int,
        vocab_size: int,
        temperature: float,
        chunk_tokens: int,
        group: torch.distributed.ProcessGroup,
        limits: SamplingLimits | None = None,
        overlaps: bool = False,
        low: Tensor | None = None,
        added: Tensor | None = None,
        cap: float | None = None,
    ) -> tuple[Tensor, ...]:
        """`hidden` `[N, H]`, `weight` `[V/tp, H]`, `targets` int64 `[N]` or `[N, M]` → float32 log-probs in the shape of
        `targets`, entropy `[N]`, in nats.

        `vocab_start` is the first vocabulary id of this rank's slice; ids from `vocab_size` on are padding and have
        probability zero. The distribution is softmax(logits / temperature); with `limits`, over the tokens that they keep,
        the only target among them, and the third result `[N]` is the log of these tokens' probability, without a gradient.

        A weight with a float32 `main_grad`, as megatron-core gives it, has its gradient added to that and gets none of its own;
        if reductions of gradients overlap with the backward pass (`overlaps`) it gets zeros, which set off its reduction.

        `low` `[N, R]` and `added` `[W, R]`: logits of the first W ids of the slice have `low` @ `added`ᵀ added to them. `added`
        is a parameter as the weight is; `low` gets this rank's part of its gradient. `cap`: see `VocabularySlice`.
        """
        vocabulary = VocabularySlice(weight, vocab_start, vocab_size, temperature, group, added, cap)
        extra_outputs = Asked(limits=limits)
        results, of_first_chunk = _forward(hidden, vocabulary, targets, chunk_tokens, extra_outputs, low)
        log_z, entropy, log_probs = results[0], results[1], results[2 + extra_outputs.further :].t().view_as(targets)
        of_kept = results[2 : 2 + extra_outputs.further].unbind()
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy, low, added, *of_kept[1:])
        ctx.settings = (vocabulary, chunk_tokens, overlaps)
        ctx.logits = of_first_chunk if limits is None and any(ctx.needs_input_grad) else None
        ctx.mark_non_differentiable(*of_kept[:1])
        return log_probs, entropy, *of_kept[:1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """This rank's part of the gradient of `hidden` (the caller sums over the group) and of its `weight` slice."""
        hidden, weight, targets, log_z, entropy, low, added, *least = ctx.saved_tensors
        vocabulary, chunk_tokens, overlaps = ctx.settings
        to_hidden, to_weight, *_ = ctx.needs_input_grad
        to_low, to_added = ctx.needs_input_grad[10:12] or (False, False)
        grad_hidden, grad_low = (
            torch.empty_like(rows) if wanted else None for rows, wanted in ((hidden, to_hidden), (low, to_low))
        )
        of_weight, of_added = (
            sum_of_gradients(parameter) if wanted else None for parameter, wanted in ((weight, to_weight), (added, to_added))
        )
        grad_log_probs, targets = _as_columns(grads[0]), _as_columns(targets)
        logits, ctx.logits = ctx.logits, None
        for rows in row_chunks(len(hidden), chunk_tokens):
            of_kept = least[0][rows, None] if least else None
            target, here = vocabulary.local(targets[rows])
            row_gradients = RowGradients(log_z[rows], entropy[rows], grads[1][rows], grad_log_probs[rows], target, here)
            grad_logits = _chunk_backward(hidden[rows], vocabulary, row_gradients, of_kept, logits, _rows_of(low, rows))
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if of_weight is not None:
                add_product(of_weight, grad_logits.t(), hidden[rows])
            if grad_low is not None:
                torch.mm(grad_logits[:, : len(added)], added, out=grad_low[rows])
            if of_added is not None:
                add_product(of_added, grad_logits[:, : len(added)].t(), low[rows])
            del grad_logits  # before the next chunk's is made
            logits = None
        grad_weight, grad_added = (
            given_to_autograd(parameter, total, overlaps=overlaps)
            for parameter, total in ((weight, of_weight), (added, of_added))
        )
        return grad_hidden, grad_weight, *[None] * 8, grad_low, grad_added, None


@dataclass(frozen=True, eq=False)
class VocabularySlice:
    """A rank's part of the output layer, `weight` `[V/tp, H]`, and what its logits are divided by.

    `added` `[W, R]`: B of an adapter beside it, of the slice's first W ids; rows are then given with their products with A.
    `cap`: a logit is cap · tanh(product / cap), before the temperature (Gemma 2); None: the product itself.
    """

    weight: Tensor
    start: int
    vocab_size: int
    temperature: float
    group: torch.distributed.ProcessGroup
    added: Tensor | None = None
    cap: float | None = None

    @property
    def real(self) -> int:
        """Number of its ids that are not padding."""
        return max(0, min(self.weight.shape[0], self.vocab_size - self.start))

    def product(self, hidden: Tensor, low: Tensor | None = None) -> Tensor:
        """`[n, V/tp]` in the weight's dtype, before they are divided by the temperature; `low` `[n, R]` as `added` has it."""
        logits = hidden @ self.weight.t()
        if self.added is not None:
            assert low is not None, "rows come with their products with A"
            logits[:, : len(self.added)].addmm_(low, self.added.t())
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Derivatives of `logits` `[n, V/tp]`, before they are divided by the temperature, by what was capped; None: no cap."""
        return None if self.cap is None else 1 - (logits / self.cap).square_()

    def logits(self, hidden: Tensor, low: Tensor | None = None) -> Tensor:
        """float32 `[n, V/tp]`; those of padding are −∞. `low` as in `product`."""
        logits = self.product(hidden, low).float().div_(self.temperature)
        logits[:, self.real :] = -torch.inf
        return logits

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The places of `targets` in the slice, and which of them are."""
        local = targets - self.start
        here = (local >= 0) & (local < self.weight.shape[0])
        return local.clamp(0, self.weight.shape[0] - 1), here


@dataclass(frozen=True)
class Asked:
    """Further questions about a row's distribution besides its entropy and the log-probs of targets."""

    limits: SamplingLimits | None = None
    top_k: TopK | None = None
    collision: bool = False

    @property
    def further(self) -> int:
        """Results between the entropy and the log-probs."""
        return 2 * (self.limits is not None) + self.collision


def _forward(
    hidden: Tensor,
    vocabulary: VocabularySlice,
    targets: Tensor,
    chunk_tokens: int,
    asked: Asked,
    low: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Results and, without `limits`, the first chunk's logits `[n, V/tp]`, which are computed last.

    Results are float32 `[2 + further + M + 2k, N]`: log of the sum of exponentials and entropy; with `limits` the log of the
    kept tokens' probability and the least logit of them; with `collision` Σ p²; log-probs of the M targets of each row; then
    the ids of the k likeliest tokens, from the likeliest on, and their log-probs. Ids below 2²⁴ are exact in float32.
    """
    targets = _as_columns(targets)
    width = 2 + asked.further + targets.shape[1] + (2 * asked.top_k.k if asked.top_k else 0)
    results = torch.empty(width, len(hidden), dtype=torch.float32, device=hidden.device)
    logits = None
    for rows in reversed(row_chunks(len(hidden), chunk_tokens)):
        del logits  # before the next chunk's are made
        logits_of = vocabulary.product if asked.limits is None else vocabulary.logits
        logits = logits_of(hidden[rows], _rows_of(low, rows))
        results[:, rows] = _chunk_forward(logits, vocabulary, targets[rows], asked)
    return results, logits


def _chunk_forward(logits: Tensor, vocabulary: VocabularySlice, targets: Tensor, asked: Asked) -> Tensor:
    """The rows of `_forward` for n rows of logits; with `limits` they are overwritten, and up to seven buffers of `[n, V/tp]`
    in float32 are used, by what a sort takes."""
    group, temperature = vocabulary.group, vocabulary.temperature if asked.limits is None else 1.0
    target, here = vocabulary.local(targets)
    picked, top, least = logits.gather(1, target).float().div_(temperature), None, None
    if asked.top_k is not None:
        from megarl.megatron.likeliest import likeliest

        top = likeliest(logits, asked.top_k, temperature, vocabulary.start, vocabulary.real, group)
    if asked.limits is None:
        peak, *of_slice = relative_to_all(row_sums(logits, vocabulary.real, temperature, squares=asked.collision), group)
    else:
        from megarl.megatron import kept_tokens

        peak = largest_of_all(logits.amax(dim=1), group)
        least = kept_tokens.least_kept(logits, peak[:, None], asked.limits, group)
        absent = kept_tokens.left_out(logits, least, (target[:, 0], here[:, 0]))
        of_slice = kept_tokens.sums_of_kept(logits.sub_(peak[:, None]), absent, vocabulary.real, squares=asked.collision)
    of_targets = torch.where(here, picked - peak[:, None], 0.0).t()
    sums = torch.cat([torch.stack(of_slice), of_targets])
    if group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    # Everything relative to the peak: subtracting two large numbers last would cost digits.
    log_total = sums[0].log()
    of_row = [log_total + peak, log_total - sums[1] / sums[0]]
    if least is not None:
        of_row += [log_total - sums[2].log(), least[:, 0]]
    if asked.collision:
        of_row.append(sums[len(of_slice) - 1] / sums[0].square())
    results = [torch.stack(of_row), sums[len(of_slice) :] - log_total]
    if top is not None:
        ids, values = top
        results += [ids.t().float(), (values - peak[:, None]).t() - log_total]
    return torch.cat(results)


def _chunk_backward(
    hidden: Tensor,
    vocabulary: VocabularySlice,
    given: RowGradients,
    least: Tensor | None,
    logits: Tensor | None,
    low: Tensor | None,
) -> Tensor:
    """Gradient of n rows' logits, `[n, V/tp]` in the weight's type; `least` `[n, 1]` as `least_kept` gave it.

    `logits` are overwritten, if they are known already.
    """
    if least is None:
        logits = vocabulary.product(hidden, low) if logits is None else logits
        slope = vocabulary.slope(logits)
        gradient = logits_to_gradient(logits, vocabulary.real, vocabulary.temperature, given)
    else:
        from megarl.megatron.kept_tokens import gradient_of_kept

        slope = vocabulary.slope(vocabulary.product(hidden, low)) if vocabulary.cap is not None else None
        gradient = gradient_of_kept(vocabulary.logits(hidden, low), vocabulary.real, given, least)
        gradient = gradient.div_(vocabulary.temperature).to(vocabulary.weight.dtype)
    return gradient if slope is None else gradient.mul_(slope)


def _as_columns(values: Tensor) -> Tensor:
    """`[N]` or `[N, M]` as `[N, M]`."""
    return values[:, None] if values.dim() == 1 else values


def _rows_of(low: Tensor | None, rows: slice) -> Tensor | None:
    return None if low is None else low[rows]


def row_chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


class HeadRequest(NamedTuple):
    """The request to a head before a forward pass: the stream's `rows`, int64 `[N]`, and of a `LogProbHead` the log-probs of
    `targets`, int64 `[N]` or `[N, M]`, and the likeliest tokens of each row (without gradients alone)."""

    rows: Tensor
    targets: Tensor
    top_k: TopK | None = None


class LogProbHead(torch.nn.Module):
    """Takes the place of a model's output layer: same weight, same checkpoint, log-probs instead of logits.

    Set `request` before the forward pass. The output is float32 `[N, 1, C]`: of each scored row the log-prob of its first
    target and the entropy; with `limits` the log of the kept tokens' probability; with `collision`, in passes without
    gradients, Σ p²; the log-probs of its further targets, the ids of the k likeliest tokens and their log-probs.
    """

    def __init__(
        self,
        output_layer: tensor_parallel.ColumnParallelLinear,
        *,
        vocab_size: int,
        temperature: float,
        chunk_tokens: int | None,
        limits: SamplingLimits | None = None,
        collision: bool = False,
        overlaps: bool = False,
        cap: float | None = None,
    ) -> None:
        """`vocab_size` without padding; `temperature` and `limits` of sampling; `chunk_tokens` rows of logits held at a time
        (None: as many as fit in `options.LOGIT_CHUNK_BYTES`); `overlaps`: gradients are reduced in the backward pass; `cap` of
        logits."""
        super().__init__()
        self.weight = output_layer.weight
        self.config, self.tp_group = output_layer.config, output_layer.tp_group
        self.vocab_size, self.temperature, self.chunk_tokens = vocab_size, temperature, chunk_tokens
        self.limits, self.collision, self.overlaps, self.cap = limits, collision, overlaps, cap
        self.request: HeadRequest | None = None
        self.beside: Callable[[Tensor], tuple[Tensor, Tensor] | None] | None = None
        """Of an adapter beside the layer: by hidden states, what A makes of the whole stream `[S, 1, R]`, and B `[W, R]`."""

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """`hidden` `[S(/tp), 1, H]`, `weight` the tied embedding's slice if there is one → (`[N, 1, C]`, None)."""
        assert self.request is not None, "set request before the forward pass"
        rows, targets, top_k = self.request
        weight = self.weight if weight is None else weight
        buffers = (1 if self.limits is None else LIMITED_BUFFERS) + (self.cap is not None)
        chunk_tokens = self.chunk_tokens or default_chunk_tokens(weight.device.type, buffers * weight.shape[0])
        scored = enter_tensor_parallel_region(hidden, self.config, self.tp_group)[:, 0].index_select(0, rows)
        low, added = (self.beside(hidden) if self.beside is not None else None) or (None, None)
        low = low[:, 0].index_select(0, rows) if low is not None else None
        start = self.tp_group.rank() * weight.shape[0]
        if not torch.is_grad_enabled():
            vocabulary = VocabularySlice(weight, start, self.vocab_size, self.temperature, self.tp_group, added, self.cap)
            extra_outputs = Asked(self.limits, top_k, self.collision)
            _, entropy, *others = _forward(scored, vocabulary, targets, chunk_tokens, extra_outputs, low)[0]
            if self.limits is not None:
                del others[1]
            first = others.pop(extra_outputs.further - (self.limits is not None))
            return torch.stack([first, entropy, *others], dim=-1)[:, None], None
        assert top_k is None, "the likeliest tokens are asked for without gradients"
        log_probs, entropy, *kept_columns = VocabParallelLogProbs.apply(
            scored, weight, targets, start, self.vocab_size, self.temperature, chunk_tokens, self.tp_group, self.limits,
            self.overlaps, low, added, self.cap,
        )  # fmt: skip
        log_probs = _as_columns(log_probs)
        of_row = [log_probs[:, :1], entropy[:, None], *(column[:, None] for column in kept_columns), log_probs[:, 1:]]
        return torch.cat(of_row, dim=-1)[:, None], None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The weight for megatron-core's dist_checkpointing, split over the vocabulary."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


def enter_tensor_parallel_region(hidden: Tensor, config: TransformerConfig, group: torch.distributed.ProcessGroup) -> Tensor:
    """The whole stream on every TP rank; the backward pass sums the ranks' partial gradients."""
    if config.sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
