"""What stands in for the output layer of a `GPTModel`: token log-probs from hidden states, or a scalar head.

The log-prob head never holds a full `[N, V]` logit matrix: it goes through the scored rows in chunks, forward and
backward, and each tensor-parallel rank sees only its slice of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.megatron.kept_tokens import least_kept, left_out
from megarl.megatron.options import SamplingLimits, default_chunk_tokens

LIMITED_BUFFERS = 4
"""How many times as many buffers of logits sampling limits need."""


class VocabParallelLogProbs(torch.autograd.Function):
    """Log-prob of a target and entropy of its distribution, over a vocabulary split across a group.

    Logits are recomputed chunk by chunk in the backward pass; float32 throughout the softmax and in the sum over chunks.
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
    ) -> tuple[Tensor, ...]:
        """`hidden` `[N, H]`, `weight` `[V/tp, H]`, `targets` int64 `[N]` → float32 log-probs `[N]`, entropy `[N]`, in nats.

        `vocab_start` is the first vocabulary id of this rank's slice; ids from `vocab_size` on are padding and have
        probability zero. The distribution is softmax(logits / temperature); with `limits`, over the tokens that they keep,
        the target among them, and the third result `[N]` is the log of these tokens' probability, without a gradient.
        """
        real = max(0, min(weight.shape[0], vocab_size - vocab_start))
        # Log-prob, log of the sum of exponentials, entropy; then log-prob of all that is kept, and the least logit of it.
        results = torch.empty(3 if limits is None else 5, len(hidden), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(len(hidden), chunk_tokens):
            local = _local(targets[rows], vocab_start, weight.shape[0])
            results[:, rows] = _chunk_forward(hidden[rows], weight, local, real, temperature, group, limits)
        log_probs, log_z, entropy, *of_kept = results.unbind()
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy, *of_kept[1:])
        ctx.settings = (vocab_start, real, temperature, chunk_tokens)
        ctx.mark_non_differentiable(*of_kept[:1])
        return log_probs, entropy, *of_kept[:1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """This rank's part of the gradient of `hidden` (the caller sums over the group) and of its `weight` slice."""
        hidden, weight, targets, log_z, entropy, *least = ctx.saved_tensors
        vocab_start, real, temperature, chunk_tokens = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(hidden), chunk_tokens):
            local = _local(targets[rows], vocab_start, weight.shape[0])
            per_row = torch.stack([log_z[rows], entropy[rows], grads[0][rows], grads[1][rows]])[..., None]
            least_kept = least[0][rows, None] if least else None
            grad_logits = _chunk_backward(hidden[rows], weight, local, real, temperature, per_row, least_kept)
            grad_hidden[rows] = grad_logits @ weight
            _add_product(grad_weight, grad_logits.t(), hidden[rows])
            del grad_logits  # before the next chunk's is made
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None, None


def _chunk_forward(
    hidden: Tensor,
    weight: Tensor,
    local: tuple[Tensor, Tensor],
    real: int,
    temperature: float,
    group: torch.distributed.ProcessGroup,
    limits: SamplingLimits | None,
) -> Tensor:
    """float32 `[3, n]`: log-prob, log of the sum of exponentials, and entropy of n rows. Two buffers of `[n, V/tp]` at once.

    With `limits` `[5, n]`, as `VocabParallelLogProbs.forward` has them, and up to seven buffers, by what a sort takes.
    """
    logits = _logits(hidden, weight, real, temperature)
    target, here = local
    picked = logits.gather(1, target[:, None])[:, 0]
    peak = logits.amax(dim=1)
    if group.size() > 1:
        torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX, group=group)
    least = least_kept(logits, peak[:, None], limits, group) if limits is not None else None
    absent = left_out(logits, least, local) if least is not None else None
    logits -= peak[:, None]
    exponentials = logits.exp()
    logits[:, real:] = 0.0
    of_all = []
    if absent is not None:
        of_all = [exponentials.sum(1)]
        logits.masked_fill_(absent, 0.0)
        exponentials.masked_fill_(absent, 0.0)
    total = exponentials.sum(1)
    sums = torch.stack([total, exponentials.mul_(logits).sum(1), torch.where(here, picked - peak, 0.0), *of_all])
    if group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    # Everything relative to the peak: subtracting two large numbers last would cost digits.
    log_total = sums[0].log()
    results = [sums[2] - log_total, log_total + peak, log_total - sums[1] / sums[0]]
    return torch.stack(results if least is None else [*results, log_total - sums[3].log(), least[:, 0]])


def _chunk_backward(
    hidden: Tensor,
    weight: Tensor,
    local: tuple[Tensor, Tensor],
    real: int,
    temperature: float,
    per_row: Tensor,
    least: Tensor | None,
) -> Tensor:
    """Gradient of n rows' logits, `[n, V/tp]`; `per_row` `[4, n, 1]`: log Z, entropy, the gradients of log-prob and entropy."""
    log_z, entropy, grad_log_prob, grad_entropy = per_row
    log_p = _logits(hidden, weight, real, temperature)
    absent = left_out(log_p, least, local) if least is not None else None
    p = log_p.sub_(log_z).exp()
    log_p[:, real:] = 0.0
    if absent is not None:
        p.masked_fill_(absent, 0.0)
        log_p.masked_fill_(absent, 0.0)
    # d log_prob / d logit_j = 1[j = target] - p_j ; d entropy / d logit_j = -p_j (log p_j + entropy)
    p.mul_(log_p.add_(entropy).mul_(grad_entropy).add_(grad_log_prob)).neg_()
    del log_p
    target, here = local
    p.scatter_add_(1, target[:, None], grad_log_prob * here[:, None])
    return p.div_(temperature).to(weight.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """float32 `total` `[V, H]` += `left` `[V, n]` @ `right` `[n, H]`, without a tensor of its size in between.

    A chunk has few rows, so one pass over `[V, H]` takes as long as the product itself.
    """
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif total.device.type == "cpu":
        total.addmm_(left.float(), right.float())
    else:  # GPUs add bfloat16 products to float32 inside the product
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)  # type: ignore[call-overload]


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _logits(hidden: Tensor, weight: Tensor, real: int, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float().div_(temperature)
    logits[:, real:] = -torch.inf
    return logits


def _local(targets: Tensor, vocab_start: int, slice_size: int) -> tuple[Tensor, Tensor]:
    local = targets - vocab_start
    here = (local >= 0) & (local < slice_size)
    return local.clamp(0, slice_size - 1), here


class LogProbHead(torch.nn.Module):
    """Takes the place of a model's output layer: same weight, same checkpoint, log-probs instead of logits.

    Set `request` = (rows, targets), both int64 `[N]`, before the forward pass. The output is float32 `[N, 1, 2]`:
    log-prob and entropy of each scored row; with `limits` `[N, 1, 3]`, the log of the kept tokens' probability besides.
    """

    def __init__(
        self,
        output_layer: tensor_parallel.ColumnParallelLinear,
        *,
        vocab_size: int,
        temperature: float,
        chunk_tokens: int | None,
        limits: SamplingLimits | None = None,
    ) -> None:
        """`vocab_size` without padding; `temperature` and `limits` of sampling; `chunk_tokens` rows of logits held at a time
        (None: as many as fit in `options.LOGIT_CHUNK_BYTES`)."""
        super().__init__()
        self.weight = output_layer.weight
        self.config, self.tp_group = output_layer.config, output_layer.tp_group
        self.vocab_size, self.temperature, self.chunk_tokens, self.limits = vocab_size, temperature, chunk_tokens, limits
        self.request: tuple[Tensor, Tensor] | None = None

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """`hidden` `[S(/tp), 1, H]`, `weight` the tied embedding's slice if there is one → (`[N, 1, 2]`, None)."""
        assert self.request is not None, "set request = (rows, targets) before the forward pass"
        rows, targets = self.request
        weight = self.weight if weight is None else weight
        buffers = 1 if self.limits is None else LIMITED_BUFFERS
        chunk_tokens = self.chunk_tokens or default_chunk_tokens(weight.device.type, buffers * weight.shape[0])
        scored = _enter_tensor_parallel_region(hidden, self.config, self.tp_group)[:, 0].index_select(0, rows)
        results = VocabParallelLogProbs.apply(
            scored,
            weight,
            targets,
            self.tp_group.rank() * weight.shape[0],
            self.vocab_size,
            self.temperature,
            chunk_tokens,
            self.tp_group,
            self.limits,
        )
        return torch.stack(results, dim=-1)[:, None], None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The weight for megatron-core's dist_checkpointing, split over the vocabulary."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


def _enter_tensor_parallel_region(hidden: Tensor, config: TransformerConfig, group: torch.distributed.ProcessGroup) -> Tensor:
    """The whole stream on every TP rank; the backward pass sums the ranks' partial gradients."""
    if config.sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)


class ValueHead(torch.nn.Linear):
    """hidden → 1 in place of the output layer, zero-initialised, replicated over tensor parallelism.

    Set `request` = (rows, targets) before the forward pass; the output is float32 `[N, 1, 1]`.
    """

    def __init__(self, config: TransformerConfig, group: torch.distributed.ProcessGroup) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=torch.float32)
        torch.nn.init.zeros_(self.weight)
        self.config, self.tp_group = config, group
        self.request: tuple[Tensor, Tensor] | None = None

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """`hidden` `[S(/tp), 1, H]` → (`[N, 1, 1]`, None)."""
        assert self.request is not None, "set request = (rows, targets) before the forward pass"
        if self.config.sequence_parallel:
            # Every rank computes the same values from the gathered stream, so its slice of the gradient is its own.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        scored = hidden[:, 0].index_select(0, self.request[0]).float()
        return torch.nn.functional.linear(scored, self.weight)[:, None], None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The weight for megatron-core's dist_checkpointing, replicated over tensor parallelism."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)
