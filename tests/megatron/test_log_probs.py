"""The chunked log-prob head against float64 log_softmax, values and gradients, and what it keeps in memory."""

from __future__ import annotations

import pytest
import torch

from megarl.megatron.heads import VocabParallelLogProbs


class OneRank:
    """A group of one, as far as the head asks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [3, 64])
def test_log_probs_entropy_and_gradients_equal_dense_float64(temperature: float, chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 16, generator=generator).requires_grad_()
    weight = torch.randn(40, 16, generator=generator).requires_grad_()
    vocab = 37  # three rows of padding
    targets = torch.randint(0, vocab, (10,), generator=generator)
    grad_log_probs, grad_entropy = torch.randn(2, 10, generator=generator)
    log_probs, entropy = VocabParallelLogProbs.apply(hidden, weight, targets, 0, vocab, temperature, chunk_tokens, OneRank())
    (log_probs * grad_log_probs + entropy * grad_entropy).sum().backward()

    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    log_p = ((exact_hidden @ exact_weight[:vocab].T) / temperature).log_softmax(-1)
    exact_log_probs = log_p[torch.arange(10), targets]
    exact_entropy = -(log_p.exp() * log_p).sum(-1)
    (exact_log_probs * grad_log_probs + exact_entropy * grad_entropy).sum().backward()
    torch.testing.assert_close(log_probs.double(), exact_log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-5, atol=1e-5)
    assert exact_hidden.grad is not None
    assert exact_weight.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=1e-4, atol=1e-5)
    assert not weight.grad[vocab:].any()
