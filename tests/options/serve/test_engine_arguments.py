"""Servers behind `megarl serve`: their arguments, and the numbers by which seeded requests draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import parse_config
from megarl.errors import ConfigError
from megarl.options.serve.engine_arguments import adapter_room
from megarl.options.serve.sglang import check_servers, server_arguments
from megarl.options.serve.sglang_process import seed_of, uniform
from megarl.rollout.engines.sglang.server import ServerOptions
from tests.families import build_folder


def test_servers_have_room_for_adapters_by_name_and_obey_seeds(tmp_path: Path) -> None:
    build_folder("llama", tmp_path / "model")
    tree: dict[str, Any] = {"model": {"path": str(tmp_path / "model")}, "serve": {"max_rank": 16, "live_models": 20}}
    chosen = server_arguments(parse_config(tree), str(tmp_path / "model"))
    modules = ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert chosen == {
        "served_model_name": "megarl-serve",
        "sampling_backend": "pytorch",
        "enable_lora": True,
        "lora_target_modules": modules,
        "max_lora_rank": 16,
        "max_loras_per_batch": 9,
        "max_loaded_loras": 20,
    }
    line = ServerOptions(str(tmp_path / "model"), tmp_path / "log", extra=chosen).arguments(1, "start")
    at = line.index("--lora-target-modules")
    assert line[at + 1 : at + 1 + len(modules)] == modules
    assert {"--enable-lora", "--max-loaded-loras", "megarl-serve"} <= {*line}
    whole = parse_config(tree | {"serve": {"full_weights": True}})
    assert [*server_arguments(whole, str(tmp_path / "model"))] == ["served_model_name", "sampling_backend"]
    assert adapter_room([], 8, 1)["max_loaded_loras"] == 2, "SGLang wants as many as a pass may have"


def test_adapters_that_engines_do_not_add_are_refused_before_anything_starts(tmp_path: Path) -> None:
    build_folder("qwen3_moe", tmp_path / "model")
    tree: dict[str, Any] = {"model": {"path": str(tmp_path / "model")}, "serve": {}}
    sentence = (
        r"policy.lora.targets is \['all-linear', 'lm_head'\], and the engines of a server cannot sample with adapters of "
        r"'model.layers.\d.mlp.experts.0.\w+'.*; set it to layers that they can, such as \[q_proj, k_proj, v_proj, o_proj, "
    )
    with pytest.raises(ConfigError, match=sentence):
        check_servers(parse_config(tree), "cpu")
    attention = tree | {"policy": {"lora": {"rank": 32, "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]}}}
    check_servers(parse_config(attention), "cpu")
    modules = server_arguments(parse_config(attention), str(tmp_path / "model"))["lora_target_modules"]
    assert modules == ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]
    check_servers(parse_config(tree | {"serve": {"full_weights": True}}), "cpu")


def test_hashed_numbers_are_uniform_and_of_each_seed_and_position() -> None:
    seeds, positions = torch.arange(-500, 500).repeat_interleave(100), torch.arange(100).repeat(1000)
    numbers = uniform(seeds, positions)
    assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
    assert len(numbers.unique()) == len(numbers)
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 148.3  # 0.999 of chi-squared with 99 degrees of freedom
    neighbours = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
    assert abs(float(neighbours)) < 0.01
    assert seed_of(None, "a") == seed_of(None, "a") != seed_of(None, "b")
    assert seed_of(7, "a") == 7
