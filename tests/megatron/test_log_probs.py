"""The chunked log-prob head against float64 log_softmax, values and gradients, and what it keeps in memory."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.megatron import heads, kept_tokens, logit_passes, parameter_gradients
from megarl.megatron.heads import VocabParallelLogProbs
from megarl.megatron.options import SamplingLimits, default_chunk_tokens
from tests.algorithms.test_memory import peak_bytes, size


class OneRank:
    """A group of one, as far as the head asks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("top_k", [0, 6])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [3, 64])
def test_log_probs_entropy_and_gradients_equal_dense_float64(
    temperature: float, chunk_tokens: int, cap: float | None, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 16, generator=generator).requires_grad_()
    weight = torch.randn(40, 16, generator=generator).requires_grad_()
    vocab = 37  # three rows of padding
    targets = torch.randint(0, vocab, (10,), generator=generator)
    grad_log_probs, grad_entropy = torch.randn(2, 10, generator=generator)
    limits = SamplingLimits(top_k=top_k) if top_k else None
    log_probs, entropy, *_ = VocabParallelLogProbs.apply(
        hidden, weight, targets, 0, vocab, temperature, chunk_tokens, OneRank(), limits, False, None, None, cap
    )
    (log_probs * grad_log_probs + entropy * grad_entropy).sum().backward()

    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = exact_hidden @ exact_weight[:vocab].T
    logits = logits if cap is None else cap * (logits / cap).tanh()
    kept = torch.ones_like(logits, dtype=torch.bool)
    if top_k:
        kept = (logits >= logits.topk(top_k).values[:, -1:]).scatter(1, targets[:, None], True)
    log_p = (logits / temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)
    exact_log_probs = log_p[torch.arange(10), targets]
    exact_entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
    (exact_log_probs * grad_log_probs + exact_entropy * grad_entropy).sum().backward()
    torch.testing.assert_close(log_probs.double(), exact_log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-5, atol=1e-5)
    assert exact_hidden.grad is not None
    assert exact_weight.grad is not None
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=1e-4, atol=1e-5)
    assert not weight.grad[vocab:].any()


class Products(TorchDispatchMode):
    """Counts products that give logits of a vocabulary of 40."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.shape[1] == 40:
            self.rows.append(len(result))
        return result


def test_the_first_chunks_logits_are_computed_once() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, generator=generator).requires_grad_() for rows in (10, 40))
    targets = torch.randint(0, 40, (10,), generator=generator)
    with Products() as products:
        results = VocabParallelLogProbs.apply(hidden, weight, targets, 0, 40, 1.0, 4, OneRank())
        assert products.rows == [2, 4, 4]  # the last chunk is the short one
        loss = results[0].sum() + results[1].sum()
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        assert products.rows == [2, 4, 4, 4, 2]
        again = torch.autograd.grad(loss, (hidden, weight))  # a second time there is nothing left of the forward pass
        assert products.rows == [2, 4, 4, 4, 2, 4, 4, 2]
    assert all(map(torch.equal, first, again))


class OutputLayer:
    """As far as `LogProbHead` asks: `[V, H]`, and a group of one."""

    config, tp_group = None, OneRank()

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = torch.nn.Parameter(weight)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_head_that_is_asked_answers_collision_probabilities_too(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients Σ p² of every row, padding left out; with gradients what any head answers."""
    monkeypatch.setattr(heads, "enter_tensor_parallel_region", lambda hidden, config, group: hidden)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(10, 1, 16, generator=generator), torch.randn(40, 16, generator=generator)
    rows, targets = torch.tensor([0, 2, 3, 7, 9]), torch.randint(0, 37, (5,), generator=generator)
    settings: dict[str, Any] = {"vocab_size": 37, "temperature": temperature, "chunk_tokens": 2}
    made = {asked: heads.LogProbHead(OutputLayer(weight), collision=asked, **settings) for asked in (True, False)}  # type: ignore[arg-type]
    for head in made.values():
        head.request = heads.HeadRequest(rows, targets)
    with torch.no_grad():
        found, plain = (made[asked](hidden)[0][:, 0] for asked in (True, False))
    p = (hidden[rows, 0].double() @ weight[:37].double().T / temperature).softmax(-1)
    torch.testing.assert_close(found[:, 2].double(), p.square().sum(-1), rtol=1e-5, atol=1e-7)
    assert torch.equal(found[:, :2], plain)
    assert torch.equal(made[True](hidden)[0][:, 0], plain)


def test_a_gpu_computes_twelve_times_the_rows_at_once() -> None:
    assert (default_chunk_tokens("cpu", 131072), default_chunk_tokens("cuda", 131072)) == (128, 1536)


def test_a_small_vocabulary_slice_has_larger_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is told a number of tokens, the head takes as many as its budget of bytes holds."""
    seen = []
    monkeypatch.setattr(heads, "row_chunks", lambda total, size: seen.append(size) or [slice(0, total)])
    monkeypatch.setattr(heads, "enter_tensor_parallel_region", lambda hidden, config, group: hidden)
    for slice_size, told, expected in ((131072, None, 128), (49152, None, 341), (10**9, None, 1), (131072, 5, 5)):
        weight = torch.empty(slice_size, 0)
        output_layer = types.SimpleNamespace(weight=torch.nn.Parameter(weight), config=None, tp_group=OneRank())
        head = heads.LogProbHead(output_layer, vocab_size=slice_size, temperature=1.0, chunk_tokens=told)
        head.request = heads.HeadRequest(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
        monkeypatch.setattr(heads, "_chunk_forward", lambda *unused: torch.zeros(3, 0))
        head(torch.zeros(1, 1, 0))
        assert seen.pop() == expected


@pytest.mark.parametrize(("backward", "collision"), [(False, False), (False, True), (True, False)])
def test_one_buffer_of_logits_exists_at_once_and_no_more(
    backward: bool, collision: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the gradients of its inputs the head allocates a chunk of logits, and twice a block of its rows, whatever the
    number of tokens."""
    tokens, hidden_size, vocab, chunk_tokens = 512, 8, 4000, 16
    block = 4 * 2 * vocab
    monkeypatch.setitem(logit_passes.BLOCK_BYTES, "cpu", block)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, requires_grad=backward)
    weight = torch.randn(vocab, hidden_size, generator=generator, requires_grad=backward)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)

    def run() -> object:
        if collision:
            vocabulary = heads.VocabularySlice(weight, 0, vocab, 1.0, OneRank())  # type: ignore[arg-type]
            return heads._forward(hidden, vocabulary, targets, chunk_tokens, heads.Asked(collision=True))
        outputs = VocabParallelLogProbs.apply(hidden, weight, targets, 0, vocab, 1.0, chunk_tokens, OneRank())
        if backward:
            (outputs[0].sum() + outputs[1].sum()).backward()
        return outputs

    chunk, gradients = 4 * chunk_tokens * vocab, (size(hidden) + size(weight)) * backward
    assert peak_bytes(run) <= chunk + 2 * block + gradients + 60 * tokens + 100 * chunk_tokens


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


class Allocations(TorchDispatchMode):
    """Remembers the operations that answer with a new tensor of as many elements as are counted."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(answer):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.numel() == self.numel
                and tensor.untyped_storage()._cdata not in given
            ):
                self.found.append(str(func))
        return answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_chunk_makes_a_tensor_as_large_as_the_weight(dtype: torch.dtype) -> None:
    tokens, hidden_size, vocab = 24, 16, 40
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    outputs = VocabParallelLogProbs.apply(hidden, weight, targets, 0, vocab, 1.0, 3, OneRank())
    with Allocations(vocab * hidden_size) as allocations:
        torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), [hidden, weight])
    # For eight chunks together: the sum, and its copy in the weight's type.
    assert len(allocations.found) == (1 if dtype == torch.float32 else 2), allocations.found


def test_on_a_device_the_product_is_added_where_the_sum_is() -> None:
    """The operation that GPUs run, on a device without values: it takes these types and makes nothing."""
    total = torch.empty(40, 16, device="meta")
    left, right = (torch.empty(*shape, device="meta", dtype=torch.bfloat16) for shape in ((40, 3), (3, 16)))
    with Allocations(total.numel()) as allocations:
        parameter_gradients.add_product(total, left, right)
    assert allocations.found == []


def test_a_bfloat16_weights_gradient_is_the_dense_one() -> None:
    """Against float64 of the same bfloat16 values, element by element: the only rounding left is that of the answer."""
    tokens, hidden_size, vocab = 50, 16, 40
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=torch.bfloat16)
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    log_probs, _ = VocabParallelLogProbs.apply(hidden, weight, targets, 0, vocab, 1.0, 3, OneRank())
    log_probs.sum().backward()
    exact = weight.detach().double().requires_grad_()
    (hidden.double() @ exact.T).log_softmax(-1)[torch.arange(tokens), targets].sum().backward()
    assert exact.grad is not None
    # Logits are bfloat16 products, so each probability is off by up to 1/128 of itself for every unit of its logit.
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=2e-2, atol=5e-2)


def with_main_gradient(parameter: torch.nn.Parameter, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What megatron-core gives a parameter to sum gradients in, with something in it already."""
    parameter.main_grad = torch.ones_like(parameter, dtype=dtype)  # type: ignore[attr-defined]
    return parameter.main_grad  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_is_added_to_megatrons_buffer(dtype: torch.dtype, overlaps: bool) -> None:
    """The same sum as without the buffer, and nothing as large as the weight is made but zeros, where these are asked for."""
    tokens, hidden_size, vocab = 24, 16, 40
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocab, hidden_size, generator=generator, dtype=dtype))
    targets = torch.randint(0, vocab, (tokens,), generator=generator)

    def loss() -> torch.Tensor:
        outputs = VocabParallelLogProbs.apply(hidden, weight, targets, 0, vocab, 1.0, 3, OneRank(), None, overlaps)
        return outputs[0].sum() + outputs[1].sum()

    apart = torch.autograd.grad(loss(), [hidden, weight])
    main, outputs = with_main_gradient(weight), loss()
    with Allocations(vocab * hidden_size) as allocations:
        outputs.backward()
    assert len(allocations.found) == overlaps, allocations.found
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, apart[0])
    rtol, atol = (2**-7, 2**-7) if dtype == torch.bfloat16 else (1e-5, 1e-5)  # that of bfloat16 is rounded without the buffer
    torch.testing.assert_close(main - 1, apart[1].float(), rtol=rtol, atol=atol)
    if overlaps:
        assert torch.equal(weight.grad, torch.zeros_like(weight))
    else:
        assert weight.grad is None
    with_main_gradient(weight, torch.bfloat16)  # too coarse to sum chunks in
    assert torch.equal(torch.autograd.grad(loss(), [weight])[0], apart[1])


def test_a_weight_that_is_not_trained_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As below adapters; the gradient of hidden states is the same."""
    hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(40, 16)
    targets, found = torch.randint(0, 40, (6,)), []
    products: list[int] = []
    monkeypatch.setattr(heads, "add_product", lambda total, left, right: products.append(len(right)))
    for trained in (True, False):
        outputs = VocabParallelLogProbs.apply(hidden, weight.requires_grad_(trained), targets, 0, 40, 1.0, 3, OneRank())
        (outputs[0].sum() + outputs[1].sum()).backward()
        found.append(hidden.grad)
        hidden.grad = None
    assert products == [3, 3]
    assert torch.equal(*found)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("limits", [None, SamplingLimits(top_k=30)])
def test_products_of_low_rank_enter_each_chunk_of_logits(
    monkeypatch: pytest.MonkeyPatch, limits: SamplingLimits | None, summed: bool
) -> None:
    """Values and gradients against dense float64, where fewer columns are added than there are; `summed`: into buffers."""
    generator = torch.Generator().manual_seed(0)
    vocab, real, chunk_tokens = 40, 37, 3
    hidden, low = (torch.randn(10, width, generator=generator).requires_grad_() for width in (16, 4))
    weight, added = (torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((vocab, 16), (real, 4)))
    weight.requires_grad_(False)
    targets = torch.randint(0, real, (10,), generator=generator)
    monkeypatch.setattr(kept_tokens, "least_kept", lambda logits, *_: logits.topk(30, dim=-1).values[:, -1:])  # of one rank
    grad_log_probs, grad_entropy = torch.randn(2, 10, generator=generator)
    main = with_main_gradient(added) if summed else None
    log_probs, entropy, *_ = VocabParallelLogProbs.apply(
        hidden, weight, targets, 0, real, 0.7, chunk_tokens, OneRank(), limits, False, low, added
    )
    (log_probs * grad_log_probs + entropy * grad_entropy).sum().backward()

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, low, added)]
    logits = (exact[0] @ weight[:real].double().T + exact[1] @ exact[2].T) / 0.7
    if limits is not None:
        least = logits.topk(limits.top_k, dim=-1).values[:, -1:]
        left_out = (logits < least).scatter(1, targets[:, None], False)
        logits = logits.masked_fill(left_out, -torch.inf)
    log_p = logits.log_softmax(-1)
    exact_log_probs = log_p[torch.arange(10), targets]
    exact_entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    (exact_log_probs * grad_log_probs + exact_entropy * grad_entropy).sum().backward()
    torch.testing.assert_close(log_probs.double(), exact_log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-5, atol=1e-5)
    assert (added.grad is None) == summed
    of_added = added.grad if main is None else main - 1
    for found, expected in ((hidden.grad, exact[0]), (low.grad, exact[1]), (of_added, exact[2])):
        assert found is not None
        assert expected.grad is not None
        torch.testing.assert_close(found.double(), expected.grad, rtol=1e-4, atol=1e-5)
