"""Indexers that are trained: their gradients in every kind of layout, against the published formula on transformers' model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.option_list import OPTIONS
from tests.families import FAMILIES, build_folder, hugging_face
from tests.themes.parallel.comparison import compare
from tests.themes.parallel.test_parity import by_hugging_face
from tests.themes.parallel.worlds import MODES, layout_for, run_family, units
from tests.world import World

pytestmark = pytest.mark.skipif("sparse_attention" not in OPTIONS, reason="this installation does not have the option")
COEFF = 0.03
PACKED, RECOMPUTED, SELECTIVE = "packed", "packed, full recomputation", "packed, selective recomputation"
CELLS = [
    ("deepseek_v32", "tp2+sp", "dense", (PACKED,)),
    ("glm_moe_dsa", "cp2", "sparse", (PACKED, "unpacked")),
    ("glm_moe_dsa", "pp2", "dense", (RECOMPUTED, SELECTIVE)),
    pytest.param("deepseek_v32", "tp2·cp2+sp", "sparse", tuple(MODES), marks=pytest.mark.exhaustive),
    pytest.param("deepseek_v32", "ep2·tp2+sp", "sparse", (PACKED, RECOMPUTED), marks=pytest.mark.exhaustive),
    pytest.param("deepseek_v32", "dp2", "dense", tuple(MODES), marks=pytest.mark.exhaustive),
    pytest.param("deepseek_v32", "vpp2", "sparse", (PACKED,), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("family", "layout", "train", "names"), CELLS)
def test_indexers_learn_what_attention_does_and_nothing_else_changes(
    parity_world: World,
    folder: Callable[[str], Path],
    family: str,
    layout: str,
    train: str,
    names: tuple[str, ...],
) -> None:
    expected = dict(by_hugging_face(family))
    of_indexers = indexer_gradients(family, train)
    assert all(bool(gradient.any()) for gradient in of_indexers.values())
    assert of_indexers.keys() == {name for name in expected["gradients"] if ".indexer." in name}
    expected["gradients"] = expected["gradients"] | of_indexers
    variant = {"dsa_indexer_loss_coeff": COEFF, "dsa_indexer_use_sparse_loss": train == "sparse"}
    of_ranks = layout_for(layout, **FAMILIES[family].kind)
    assert of_ranks is not None
    arguments = (folder(family), of_ranks, units(), None, names, "reference", None, 0, "spec", variant)
    compare(expected, parity_world.call(run_family, *arguments, size=of_ranks.world_size), lambda *of_mode: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny model, each written once."""

    @cache
    def of_family(family: str) -> Path:
        path = tmp_path_factory.mktemp("indexed") / family
        build_folder(family, path)
        return path

    return of_family


def indexer_gradients(family: str, train: str) -> dict[str, Tensor]:
    """Float64 gradients of COEFF times the mean divergence over the tokens of all sequences, in each layer with an indexer."""
    model = hugging_face(family).double()
    sequences = [torch.cat([unit.prompt_ids, one.token_ids])[:-1] for unit in units() for one in unit.responses]
    tokens = sum(map(len, sequences))
    found: list[Tensor] = []
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.register_forward_pre_hook(_noted(found, model.config, train), with_kwargs=True)
    for ids in sequences:
        found.clear()
        with torch.no_grad():
            model(ids[None])
        (COEFF / tokens * sum(found)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if ".indexer." in name}


def _noted(found: list[Tensor], config: Any, train: str) -> Callable[..., None]:
    def note(attention: Any, positional: Any, named: dict[str, Any]) -> None:
        with torch.enable_grad():
            found.append(divergence(attention, config, named["hidden_states"][0].detach(), named["position_embeddings"], train))

    return note


def divergence(attention: Any, config: Any, hidden: Tensor, angles: tuple[Tensor, Tensor], train: str) -> Tensor:
    """Σ over the queries of one sequence of KL(p ‖ softmax(I)); DeepSeek-V3.2, eqs. 1, 3 and 4."""
    rope, (cos, sin) = config.qk_rope_head_dim, (wave[0, :, : config.qk_rope_head_dim // 2] for wave in angles)

    def turned(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        c, s = (wave.view(len(wave), *[1] * (first.dim() - 2), -1) for wave in (cos, sin))
        return first * c - second * s, second * c + first * s

    def pairs(heads: Tensor) -> Tensor:
        return torch.stack(turned(heads[..., 0::2], heads[..., 1::2]), -1).flatten(-2)

    def halves(heads: Tensor) -> Tensor:
        return torch.cat(turned(*heads.chunk(2, -1)), -1)

    with torch.no_grad():
        latent = attention.q_a_layernorm(attention.q_a_proj(hidden))
        query = attention.q_b_proj(latent).view(len(hidden), config.num_attention_heads, -1)
        low, key_rope = attention.kv_a_proj_with_mqa(hidden).split([config.kv_lora_rank, rope], -1)
        key = attention.kv_b_proj(attention.kv_a_layernorm(low)).view(len(hidden), config.num_attention_heads, -1)
        nope = config.qk_nope_head_dim
        scores = torch.einsum("shd,thd->hst", query[..., :nope], key[..., :nope])
        scores = scores + torch.einsum("shd,td->hst", pairs(query[..., nope:]), pairs(key_rope))
    indexer, turn = attention.indexer, halves if config.model_type == "deepseek_v32" else pairs
    index_query = indexer.wq_b(latent).view(len(hidden), config.index_n_heads, -1)
    index_query = torch.cat([turn(index_query[..., :rope]), index_query[..., rope:]], -1)
    index_key = indexer.k_norm(indexer.wk(hidden))
    index_key = torch.cat([turn(index_key[..., :rope]), index_key[..., rope:]], -1)
    of_heads = torch.einsum("shd,td->sht", index_query, index_key).clamp(min=0)
    predicted = (of_heads * indexer.weights_proj(hidden)[..., None]).sum(1)
    predicted = predicted * (config.index_n_heads * config.index_head_dim) ** -0.5
    compared = torch.ones(predicted.shape, dtype=torch.bool).tril()
    if train == "sparse":
        ranked = predicted.detach().masked_fill(~compared, -torch.inf).argsort(-1, descending=True)
        compared &= torch.zeros_like(compared).scatter_(1, ranked[:, : config.index_topk], True)
    target = (scores * attention.scaling).masked_fill(~compared, -torch.inf).softmax(-1).mean(0)
    log_shares = predicted.masked_fill(~compared, -torch.inf).log_softmax(-1)
    return torch.where(compared, target * (target.log() - log_shares), 0.0).sum()
