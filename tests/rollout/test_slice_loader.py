"""Slices land where SGLang's fused parameters hold them, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.rollout.slice_loader import load


class Held:
    """A rank's parameters as SGLang names them, and what its own loader was given."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.parameters = {
            name.replace("__", "."): torch.nn.Parameter(torch.full(shape, -1.0)) for name, shape in shapes.items()
        }
        self.loaded: list[tuple[str, Tensor]] = []

    def named_parameters(self) -> Any:
        """As torch.nn.Module's."""
        return self.parameters.items()

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        """Experts come here."""
        self.loaded += weights


def send(model: Held, **slices: Tensor) -> None:
    """One bucket, as the payload of a rank holds it."""
    places, start, parts = [], 0, []
    for name, part in slices.items():
        parts.append(part.reshape(-1).view(torch.uint8))
        places.append((name.replace("__", "."), "float32", tuple(part.shape), start, start + part.nbytes))
        start += part.nbytes
    load(model, [(places, torch.cat(parts))])


def test_parts_of_a_fused_parameter_lie_one_after_the_other() -> None:
    model = Held(x__self_attn__qkv_proj__weight=(8, 3), x__mlp__gate_up_proj__weight=(6, 3), x__self_attn__qkv_proj__bias=(8,))
    q, k, v, gate, up = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2, 3), torch.randn(3, 3), torch.randn(3, 3)
    send(model, x__self_attn__v_proj__weight=v, x__mlp__up_proj__weight=up, x__self_attn__k_proj__bias=k[:, 0].contiguous())
    send(model, x__self_attn__k_proj__weight=k, x__mlp__gate_proj__weight=gate, x__self_attn__q_proj__weight=q)
    assert torch.equal(model.parameters["x.self_attn.qkv_proj.weight"], torch.cat([q, k, v]))
    assert torch.equal(model.parameters["x.mlp.gate_up_proj.weight"], torch.cat([gate, up]))
    assert torch.equal(model.parameters["x.self_attn.qkv_proj.bias"][4:6], k[:, 0])


def test_rows_behind_the_vocabulary_are_zero_and_experts_go_through_the_models_own_loader() -> None:
    model = Held(model__embed_tokens__weight=(8, 2))
    rows, expert = torch.randn(5, 2), torch.randn(2, 2)
    send(model, model__embed_tokens__weight=rows, x__mlp__experts__3__up_proj__weight=expert)
    assert torch.equal(model.parameters["model.embed_tokens.weight"], torch.cat([rows, torch.zeros(3, 2)]))
    assert [name for name, _ in model.loaded] == ["x.mlp.experts.3.up_proj.weight"]
    assert torch.equal(model.loaded[0][1], expert)


@pytest.mark.parametrize("shape", [(4, 3), (3, 2), (9, 2)])
def test_a_slice_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model = Held(x__self_attn__o_proj__weight=(8, 2))
    with pytest.raises(ValueError, match=r"x\.self_attn\.o_proj\.weight"):
        send(model, x__self_attn__o_proj__weight=torch.zeros(shape))
