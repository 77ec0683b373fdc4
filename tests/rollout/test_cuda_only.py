"""What SGLang's expert parallelism lacks on a CPU, against a dense formula."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from megarl.rollout.engines.sglang.on_cpu.cuda_only import own_experts_only


class Chosen(NamedTuple):
    """SGLang's StandardTopKOutput: `[T, k]` weights and numbers of experts."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor | None = None


def moe(experts: torch.Tensor, x: torch.Tensor, chosen: Chosen, config: Any) -> torch.Tensor:
    """Experts `[E, H, H]` that multiply; as SGLang's loop, it knows no expert -1, and none twice for a token."""
    assert len(x) > 0
    assert bool((chosen.topk_ids >= 0).all())
    assert all(len(set(row)) == len(row) for row in chosen.topk_ids.tolist())
    each = torch.einsum("th,tkhg->tkg", x, experts[chosen.topk_ids])
    return (each * chosen.topk_weights[:, :, None]).sum(1)


@pytest.mark.parametrize("ids", [[[0, 1], [2, 0]], [[-1, 1], [-1, -1]], [[-1, -1], [-1, -1]], [[2, -1], [0, 1]]])
def test_experts_of_other_ranks_add_nothing(ids: list[list[int]]) -> None:
    torch.manual_seed(0)
    experts, x, weights = torch.randn(3, 4, 4), torch.randn(2, 4), torch.rand(2, 2)
    expected = torch.zeros(2, 4)
    for token, of_token in enumerate(ids):
        for place, expert in enumerate(of_token):
            if expert >= 0:
                expected[token] += weights[token, place] * (x[token] @ experts[expert])
    found = own_experts_only(moe)(experts, x, Chosen(weights, torch.tensor(ids)), None)
    assert torch.allclose(found, expected, atol=1e-6)
