"""The chunked log-prob head against float64 log_softmax, values and gradients, and what it keeps in memory."""

from __future__ import annotations

import types

import pytest
import torch

from megarl.megatron import heads
from megarl.megatron.heads import VocabParallelLogProbs
from megarl.megatron.options import default_chunk_tokens
from tests.algorithms.test_memory import peak_bytes, size


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


def test_a_gpu_computes_sixteen_times_the_rows_at_once() -> None:
    assert (default_chunk_tokens("cpu", 131072), default_chunk_tokens("cuda", 131072)) == (128, 2048)


def test_a_small_vocabulary_slice_has_larger_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is told a number of tokens, the head takes as many as its budget of bytes holds."""
    seen = []
    monkeypatch.setattr(heads, "_chunks", lambda total, size: seen.append(size) or [slice(0, total)])
    monkeypatch.setattr(heads, "_enter_tensor_parallel_region", lambda hidden, config, group: hidden)
    for slice_size, told, expected in ((131072, None, 128), (49152, None, 341), (10**9, None, 1), (131072, 5, 5)):
        weight = torch.empty(slice_size, 0)
        output_layer = types.SimpleNamespace(weight=torch.nn.Parameter(weight), config=None, tp_group=OneRank())
        head = heads.LogProbHead(output_layer, vocab_size=slice_size, temperature=1.0, chunk_tokens=told)
        head.request = (torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
        monkeypatch.setattr(heads, "_chunk_forward", lambda *unused: torch.zeros(3, 0))
        head(torch.zeros(1, 1, 0))
        assert seen.pop() == expected


@pytest.mark.parametrize("backward", [False, True])
def test_two_buffers_of_logits_exist_at_once_and_no_more(backward: bool) -> None:
    """Beyond the gradients of its inputs the head allocates two chunks of logits, whatever the number of tokens."""
    tokens, hidden_size, vocab, chunk_tokens = 512, 8, 4000, 16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, requires_grad=backward)
    weight = torch.randn(vocab, hidden_size, generator=generator, requires_grad=backward)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)

    def run() -> object:
        outputs = VocabParallelLogProbs.apply(hidden, weight, targets, 0, vocab, 1.0, chunk_tokens, OneRank())
        if backward:
            (outputs[0].sum() + outputs[1].sum()).backward()
        return outputs

    chunk, gradients = 4 * chunk_tokens * vocab, (size(hidden) + size(weight)) * backward
    assert peak_bytes(run) <= 2 * chunk + gradients + 60 * tokens + 100 * chunk_tokens


def test_a_bfloat16_gradient_is_summed_over_chunks_in_float32() -> None:
    """Four hundred chunks that each add the same: summed in bfloat16, most of them would change nothing."""
    chunks, hidden_size, vocab = 400, 4, 8
    hidden = torch.ones(chunks, hidden_size, dtype=torch.bfloat16)
    weight = torch.zeros(vocab, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(chunks, dtype=torch.long)
    log_probs, _ = VocabParallelLogProbs.apply(hidden, weight, targets, 0, vocab, 1.0, 1, OneRank())
    log_probs.sum().backward()
    expected = torch.full((vocab, hidden_size), -chunks / vocab)
    expected[0] += chunks
    torch.testing.assert_close(weight.grad.float(), expected, rtol=2**-8, atol=0)
