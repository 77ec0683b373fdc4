"""Adapters beside layers of every kind, also of those that only a GPU computes: what is added is the product of the matrices.

Whole models in every layout: `tests/themes/parallel/test_adapters.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from megarl.config.layout import Layout
from megarl.options.lora.weight_map import Lora
from tests.families import build_folder
from tests.megatron.moments import trained, update
from tests.options.lora.adapters import LORA
from tests.world import World


class NormedLinear(torch.nn.Module):
    """As Transformer Engine's layers, which norm their input first."""

    def __init__(self, *, less_one: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4))
        self.layer_norm_weight = torch.nn.Parameter(torch.randn(4))
        self.eps, self.zero_centered_gamma = 1e-5, less_one

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        scale = self.layer_norm_weight + 1 if self.zero_centered_gamma else self.layer_norm_weight
        return linear(rms_norm(hidden, (4,), scale, self.eps), self.weight), None


class GroupedLinear(torch.nn.Module):
    """As Transformer Engine's experts: the tokens of one expert after those of another, and how many each has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight0, self.weight1 = (torch.nn.Parameter(torch.randn(6, 4)) for _ in range(2))

    def forward(self, hidden: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        first, second = hidden.split(counts)
        return torch.cat([linear(first, self.weight0), linear(second, self.weight1)]), None


def adapters_beside(rank: int, world_size: int, kind: str) -> dict[str, Tensor]:
    """What a layer with random adapters gives, and what the same layer gives with them merged into its weights."""
    from megarl.megatron.build import initialize_layout
    from megarl.models.packings import Copy
    from megarl.models.weight_map import BoundRule
    from megarl.options.lora.layers import Adapter, AdapterSwitch, ExpertAdapters, Split, put_beside
    from megarl.options.lora.weight_map import site_of

    initialize_layout(Layout(), seed=1)
    torch.manual_seed(5)
    layer = GroupedLinear() if kind == "grouped" else NormedLinear(less_one=kind == "normed, less one")
    made = []
    for name, weight in [(name, weight) for name, weight in layer.named_parameters() if name.startswith("weight")]:
        rule = BoundRule(f"decoder.layers.0.mlp.linear_fc1.{name}", ("up.weight",), Copy((6, 4)))
        site = site_of(rule, LORA, None)
        assert site is not None
        made.append(Adapter(weight, rule, site, LORA, split=Split(rule, _Config())))
        for parameter in made[-1].parameters():
            torch.nn.init.normal_(parameter)
    adapter = ExpertAdapters(made) if kind == "grouped" else made[0]
    more = ([2, 3],) if kind == "grouped" else ()
    hidden, switch = torch.randn(5, 4), AdapterSwitch()
    plain = layer(hidden, *more)[0]
    put_beside(layer, adapter, switch)
    found = layer(hidden, *more)[0]
    with switch.as_begun():
        off = layer(hidden, *more)[0]
    with torch.no_grad():
        for weight, one in zip([w for n, w in layer.named_parameters() if n.startswith("weight")], made, strict=True):
            weight += one.product()
    with switch.as_begun():
        merged = layer(hidden, *more)[0]
    return {name: values.detach() for name, values in {"plain": plain, "found": found, "off": off, "merged": merged}.items()}


class _Config:
    params_dtype, sequence_parallel = torch.float32, False


@pytest.mark.parametrize("kind", ["normed", "normed, less one", "grouped"])
def test_layers_as_transformer_engine_has_them(world: World, kind: str) -> None:
    [answer] = world.call(adapters_beside, kind, size=1)
    torch.testing.assert_close(answer["found"], answer["merged"], rtol=1e-5, atol=1e-5)
    assert torch.equal(answer["off"], answer["plain"])
    assert float((answer["found"] - answer["plain"]).abs().max()) > 1


def begun(rank: int, world_size: int, folder: Path, layout: Layout, lora: Lora) -> dict[str, Any]:
    """New adapters, and after two updates how many elements the optimizer has, and what is trained."""
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.options import ModelOptions, OptimizerOptions
    from megarl.megatron.rank_model import RankModel
    from megarl.options.lora.layers import role_as_begun

    initialize_layout(layout, seed=1)
    options = ModelOptions(str(folder), layout, lora=lora, lora_seed=3, logit_chunk_tokens=5)
    role = RankModel(options, OptimizerOptions(lr=1e-2))
    new, weights = trained(role), {name: tensor.clone() for name, tensor in role.export()}
    for _ in range(2):
        update(role, rank)
    elements = sum(p.numel() for chunk in role.chunks for buffer in chunk.buffers for p in buffer.param_index_map)
    with role_as_begun(role, options):
        pass
    frozen = [p for chunk in role.chunks for name, p in chunk.named_parameters() if "_lora." not in name]
    assert not any(parameter.requires_grad for parameter in frozen)
    after = {name: tensor.clone() for name, tensor in role.export()}
    return {"new": new, "weights": weights, "elements": elements, "trained": trained(role), "after": after}


def test_new_adapters_add_nothing_and_are_the_same_in_every_layout(world: World, tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    [alone] = world.call(begun, tmp_path / "model", Layout(), LORA, size=1)
    of_ranks = world.call(begun, tmp_path / "model", Layout(tp=2, sequence_parallel=True), LORA, size=2)
    for name, values in alone["new"].items():
        assert torch.equal(of_ranks[0]["new"][name], values), name
        bound = values.shape[1] ** -0.5
        if name.endswith("lora_A.weight"):  # peft's kaiming_uniform_(a=sqrt(5))
            assert 0.5 * bound < float(values.abs().max()) <= bound
        else:
            assert not values.any()
    for name, values in alone["trained"].items():
        torch.testing.assert_close(of_ranks[0]["trained"][name], values, rtol=1e-4, atol=1e-5, msg=name)
    assert alone["elements"] == sum(values.numel() for values in alone["new"].values())
    untouched = {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    for name, values in alone["weights"].items():
        changed = not torch.equal(values, alone["after"][name])
        assert changed == name.endswith("_proj.weight"), name
    assert untouched <= alone["weights"].keys()


def test_only_the_targets_have_adapters(world: World, tmp_path: Path) -> None:
    build_folder("qwen2", tmp_path / "model")
    lora = Lora(rank=2, alpha=4.0, rslora=True, targets=("v_proj", "*.layers.0.mlp.*"), exclude=("down_proj",))
    [answer] = world.call(begun, tmp_path / "model", Layout(), lora, size=1)
    layers = {name.rsplit(".lora_", 1)[0] for name in answer["new"]}
    expected = {f"model.layers.{layer}.self_attn.v_proj" for layer in range(4)}
    assert layers == expected | {f"model.layers.0.mlp.{which}_proj" for which in ("gate", "up")}
    for name, weight in answer["weights"].items():
        layer = name.removesuffix(".weight")
        if layer in layers:
            a, b = (answer["trained"][f"{layer}.lora_{which}.weight"] for which in "AB")
            torch.testing.assert_close(answer["after"][name], weight + 4.0 / 2**0.5 * b @ a)
        else:
            assert torch.equal(answer["after"][name], weight), name
