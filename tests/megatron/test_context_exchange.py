"""How context-parallel ranks are to exchange tokens reaches the attention of megatron-core's layers, and Transformer Engine."""

from __future__ import annotations

import ast
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config.layout import Layout
from megarl.errors import LayoutError
from megarl.megatron.options import ModelOptions
from megarl.models.registry import load_hf_config
from tests.families import build_folder
from tests.world import World


def given_to_attention(rank: int, world_size: int, model: ModelOptions, hf_config: dict[str, Any]) -> Any:
    """By layer the arguments that megatron-core gives its core attention, and the window that this reads in its config."""
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.utils import is_layer_window_attention

    from megarl.megatron.attention import ReferenceAttention
    from megarl.megatron.build import initialize_layout
    from megarl.megatron.layer_specs import block_spec
    from megarl.megatron.model_config import transformer_config

    class Recorded(ReferenceAttention):
        def __init__(self, config: Any, layer_number: int, *args: Any, **named: Any) -> None:
            super().__init__(config, layer_number, *args, **named)
            seen = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
            found.append((named.get("cp_comm_type"), config.window_size if seen else None))

    found: list[Any] = []
    initialize_layout(model.layout, seed=1)
    config = transformer_config(model, hf_config)
    try:
        block_spec("transformer_engine", config, range(config.num_layers))
    except LayoutError as error:
        return str(error)
    except Exception:  # where Transformer Engine is not installed there are no such layers
        pass
    for number, layer in enumerate(block_spec("reference", config, range(config.num_layers)).layer_specs):
        layer.submodules.self_attention.submodules.core_attention = Recorded
        build_module(layer, config=config, layer_number=number + 1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ways", ["a2a", "all_gather", ["a2a", "all_gather", "a2a", "a2a"], "p2p", None])
def test_each_layer_is_told_the_way_and_its_window(world: World, ways: Any, tmp_path: Path) -> None:
    build_folder("qwen2", tmp_path / "model")  # whose last two layers of four have windows of 9 tokens
    given = {} if ways is None else {"cp_comm_type": ways}
    model = ModelOptions("unread", Layout(cp=2), layer_spec="reference", dtype="bfloat16", megatron=given)
    for found in world.call(given_to_attention, model, load_hf_config(tmp_path / "model"), size=2):
        if ways in ("p2p", None):
            assert "cp is 2, which Transformer Engine's attention does not support for the sliding windows" in found
        elif isinstance(ways, list) and version("megatron-core").startswith("0.16"):
            assert "cp is 2, which needs one megatron.cp_comm_type for all layers" in found
        else:
            of_layers = ways if isinstance(ways, list) else [ways] * 4
            assert found == list(zip(of_layers, [None, None, (8, 0), (8, 0)], strict=True))


def test_megatron_cores_wrapper_hands_both_on_to_transformer_engine() -> None:
    """By its source: it cannot be imported without Transformer Engine."""
    package = find_spec("megatron.core")
    assert package is not None
    assert package.submodule_search_locations
    source = Path(package.submodule_search_locations[0], "extensions/transformer_engine.py").read_text()
    wrapper = next(
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == "TEDotProductAttention"
    )
    (made,) = (node for node in wrapper.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert "cp_comm_type" in {argument.arg for argument in made.args.args}
    handed_on = {
        (node.targets[0].slice.value, ast.unparse(node.value))
        for node in ast.walk(made)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
        if isinstance(node.targets[0].slice, ast.Constant)
    }
    assert {("cp_comm_type", "cp_comm_type"), ("window_size", "config.window_size")} <= handed_on
    assert ("softmax_type", "self.config.softmax_type") in handed_on
