"""Kernels of attention by segments: torch's fused ones, given what was merged; flash attention's, by torch's own shapes."""

from __future__ import annotations

import pytest
import torch

from megarl.data.stream import Response, Unit, context_parallel_shard, pack
from megarl.errors import ConfigError
from megarl.options.shared_prefixes import core_attention as kernels_of
from megarl.options.shared_prefixes.core_attention import AttentionPass, CpuKernels, FlashKernels, check, segment_attention


def a_pass(lengths: tuple[tuple[int, int], ...], *, causal: bool, window: int | None, device: str = "cpu") -> AttentionPass:
    queries, keys = (torch.tensor(of_runs) for of_runs in zip(*lengths, strict=True))
    ends = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).int().to(device) for n in (queries, keys)]
    places = (torch.arange(int(n.sum())).to(device) for n in (queries, keys))
    return AttentionPass(*places, *ends, lengths, causal, window)


@pytest.mark.parametrize(("window", "causal"), [(None, True), (None, False), (4, True)])
def test_flash_attention_takes_what_it_is_given(window: int | None, causal: bool) -> None:
    """On tensors without values torch checks the arguments, and says which shapes a GPU would give."""
    of = a_pass(((3, 5), (4, 6)), causal=causal, window=window, device="meta")
    query = torch.empty(7, 4, 20, dtype=torch.bfloat16, device="meta")
    key, value = (torch.empty(11, 2, width, dtype=torch.bfloat16, device="meta") for width in (20, 12))
    kernels = FlashKernels()
    out, lse = kernels.forward(query, key, value, of, 0.3)
    assert (out.shape, lse.shape, lse.dtype) == ((7, 4, 12), (4, 7), torch.float32)
    gradients = kernels.backward(torch.empty_like(out), (query, key, value), (out, lse), of, 0.3)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def test_two_passes_merged_are_one_over_the_keys_of_both() -> None:
    """Gradients of a pass that is given the merged output and log-sum-exp are its part of those of all keys."""
    generator = torch.Generator().manual_seed(0)
    query, gradient = (torch.randn(6, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(10, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    kernels, whole = CpuKernels(), a_pass(((6, 10),), causal=False, window=None)
    out, lse = kernels.forward(query, key, value, whole, 0.3)
    expected = kernels.backward(gradient, (query, key, value), (out, lse), whole, 0.3)
    of_query = torch.zeros_like(query)
    for part in (slice(0, 7), slice(7, 10)):
        of = a_pass(((6, part.stop - part.start),), causal=False, window=None)
        of_part, of_key, of_value = kernels.backward(gradient, (query, key[part], value[part]), (out, lse), of, 0.3)
        of_query += of_part
        torch.testing.assert_close(of_key, expected[1][part])
        torch.testing.assert_close(of_value, expected[2][part])
    torch.testing.assert_close(of_query, expected[0])


@pytest.mark.parametrize("cp", [1, 2])
def test_a_pass_is_a_call_for_each_level_of_the_tree_and_nothing_is_gathered_twice(cp: int) -> None:
    begun, mask = torch.arange(20), torch.ones(25, dtype=torch.bool)
    responses = [Response(n, torch.cat([begun, 100 * n + torch.arange(5)]), mask) for n in range(3)]
    other = Response(3, 900 + torch.arange(25), mask)
    stream = pack([Unit(torch.arange(9), [*responses, other])], segment_multiple=2 * cp, pad_to_multiple=2 * cp)
    for rank in range(cp):
        share = context_parallel_shard(stream, cp, rank)
        passes = segment_attention(stream, share).calls[None]
        assert len(passes) == 3 + (cp > 1)  # own tokens, what is before them in their segment, the prompt, the history
        for of in passes:
            assert len(of.queries.unique()) == len(of.queries)
            assert len(of.keys.unique()) == len(of.keys) or (cp > 1 and of is passes[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_of_a_device_are_held_against_a_plain_softmax_before_they_are_used(dtype: torch.dtype) -> None:
    check(torch.device("cpu"), dtype)


class Miscaled(CpuKernels):
    """Computes with other scores than those that it is given."""

    def forward(self, query, key, value, of, scale):  # type: ignore[no-untyped-def]
        return super().forward(query, key * torch.linspace(1, 1.2, len(key))[:, None, None].to(key), value, of, scale)


class Absent(CpuKernels):
    def backward(self, *given):  # type: ignore[no-untyped-def]
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")


@pytest.mark.parametrize(
    ("kernels", "why"),
    [
        (Miscaled(), "from a plain softmax"),
        (Absent(), "FlashAttention only supports Ampere GPUs or newer.; it must be false here"),
    ],
)
def test_kernels_that_compute_something_else_or_nothing_are_refused_by_the_field_that_asks_for_them(
    kernels: CpuKernels, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernels_of._KERNELS, "cpu", kernels)
    with pytest.raises(
        ConfigError, match=r"^policy\.share_prefix is 'true', which needs torch's flash attention in float32 on cpu"
    ) as error:
        check(torch.device("cpu"), torch.float32)
    assert why in str(error.value)
    assert "\n" not in str(error.value)
