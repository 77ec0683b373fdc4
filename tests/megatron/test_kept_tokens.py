"""Log-probs over the tokens that top-p, top-k and min-p keep: dense float64, any number of tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.megatron.heads import VocabParallelLogProbs
from megarl.megatron.options import SamplingLimits
from tests.world import World

LIMITS = [
    SamplingLimits(top_p=0.8),
    SamplingLimits(top_p=1e-6),
    SamplingLimits(top_k=5),
    SamplingLimits(top_k=1000),
    SamplingLimits(min_p=0.05),
    SamplingLimits(top_p=0.95, top_k=6),
    SamplingLimits(top_p=0.9, min_p=0.1),
    SamplingLimits(top_p=0.99, top_k=12, min_p=0.02),
]
ROWS, HIDDEN, VOCAB, PADDED, TEMPERATURE, CHUNK = 13, 16, 37, 42, 0.7, 4


def inputs() -> tuple[Tensor, ...]:
    """Hidden states, weight, targets (some of which no limit keeps), and what log-probs and entropies are multiplied by."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(PADDED, HIDDEN, generator=generator) / 2
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    likeliest = (hidden @ weight[:VOCAB].T).argmax(1)
    targets[::3] = likeliest[::3]
    return hidden, weight, targets, *torch.randn(2, ROWS, generator=generator)


def kept_one_by_one(p: Tensor, target: int, limits: SamplingLimits) -> Tensor:
    """bool `[V]`: the tokens of one distribution that are kept, by going through them from the likeliest on."""
    kept, before = torch.zeros(len(p), dtype=torch.bool), 0.0
    for number, token in enumerate(p.argsort(descending=True).tolist()):
        in_top_k = not limits.top_k or number < limits.top_k
        kept[token] = in_top_k and before < limits.top_p and p[token] >= limits.min_p * p.max()
        before += float(p[token])
    kept[target] = True
    return kept


def dense(limits: SamplingLimits) -> dict[str, Tensor]:
    """The same in float64, with all logits at once, by autograd."""
    hidden, weight, targets, *factors = (tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs())
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight[:VOCAB].T / TEMPERATURE
    p = logits.detach().softmax(1)
    kept = torch.stack([kept_one_by_one(row, int(target), limits) for row, target in zip(p, targets, strict=True)])
    log_p = logits.masked_fill(~kept, -torch.inf).log_softmax(1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(1)
    (log_probs * factors[0] + entropy * factors[1]).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "log_probs": log_probs.detach(), "entropy": entropy.detach(), "kept": (p * kept).sum(1).log(),
        "hidden": hidden.grad, "weight": weight.grad,
    }  # fmt: skip


def of_rank(rank: int, world_size: int, limits: SamplingLimits) -> dict[str, Tensor]:
    """This rank's part of the vocabulary: values, its part of the gradient of the hidden states, its rows of the weight's."""
    group = torch.distributed.group.WORLD
    assert group is not None
    hidden, weight, targets, *factors = inputs()
    share = PADDED // world_size
    hidden.requires_grad_()
    weight = weight[rank * share : (rank + 1) * share].clone().requires_grad_()
    arguments = (rank * share, VOCAB, TEMPERATURE, CHUNK, group, limits)
    log_probs, entropy, kept = VocabParallelLogProbs.apply(hidden, weight, targets, *arguments)
    assert not kept.requires_grad
    (log_probs * factors[0] + entropy * factors[1]).sum().backward()
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "kept": kept,
        "hidden": hidden.grad,
        "weight": weight.grad,
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_kept_tokens_are_those_of_dense_float64(world: World, limits: SamplingLimits, ranks: int) -> None:
    expected, found = dense(limits), world.call(of_rank, limits, size=ranks)
    for name in ("log_probs", "entropy", "kept"):
        for answer in found:
            torch.testing.assert_close(answer[name].double(), expected[name], rtol=1e-5, atol=1e-5)
    hidden, weight = sum(answer["hidden"] for answer in found), torch.cat([answer["weight"] for answer in found])
    torch.testing.assert_close(hidden.double(), expected["hidden"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.double(), expected["weight"], rtol=1e-4, atol=1e-5)
    assert (expected["kept"] < -1e-3).any() == (limits.top_k < VOCAB)  # else nothing was left out


def test_log_probs_of_all_tokens_train_another_policy_than_the_one_that_sampled() -> None:
    """Exact expectations over all tokens: the score function over kept tokens gives the gradient of the mean reward of what is
    sampled, that over all tokens does not, and a baseline does not even cancel in it."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, generator=generator, dtype=torch.float64)
    rewards = torch.randn(8, generator=generator, dtype=torch.float64)
    kept = kept_one_by_one(logits.softmax(0), int(logits.argmax()), SamplingLimits(top_p=0.8))
    assert 1 < kept.sum() < 8

    def gradient_of(over: Tensor, values: Tensor) -> Tensor:
        parameters = logits.clone().requires_grad_()
        sampled = logits.masked_fill(~kept, -torch.inf).softmax(0)
        log_p = parameters.masked_fill(~over, -torch.inf).log_softmax(0)
        (sampled[kept] * values[kept] * log_p[kept]).sum().backward()
        assert parameters.grad is not None
        return parameters.grad

    parameters = logits.clone().requires_grad_()
    (parameters.masked_fill(~kept, -torch.inf).softmax(0) * rewards).sum().backward()
    everything = torch.ones(8, dtype=torch.bool)
    assert parameters.grad is not None
    torch.testing.assert_close(gradient_of(kept, rewards), parameters.grad)
    assert (gradient_of(everything, rewards) - parameters.grad).abs().max() > 0.01
    assert gradient_of(kept, torch.ones(8).double()).abs().max() < 1e-12
    assert gradient_of(everything, torch.ones(8).double()).abs().max() > 0.01
