"""`rollout.kv_cache_dtype`: what it does not go with, servers' arguments and scales, what a plan counts, and gates' bounds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl import cli
from megarl.config import parse_config
from megarl.errors import ConfigError
from megarl.experience.parity_checks import bounds
from megarl.options.fp8_cache.checks import SET_BY_IT
from megarl.options.fp8_cache.embedded import model_change
from megarl.options.fp8_cache.scales import key_bound, row_bound, scale_for
from megarl.options.fp8_cache.section import MARK
from megarl.options.fp8_cache.sglang import check_servers, server_arguments
from megarl.options.fp8_cache.sglang_process import _bounds, install, set_scales
from megarl.rollout.engines.sglang.arguments import server_arguments as arguments_of_sglang
from megarl.rollout.engines.sglang.repairs import clear_unsent
from tests.planning.printed import planned

ROOT = Path(__file__).parents[3]
PLAN = "examples/plans/qwen3-32b-grpo-128xh100-32k-async.yaml"
FP8 = {"kv_cache_dtype": "fp8_e4m3"}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(rollout: dict[str, Any], path: str = "examples/models/llama-3.1-8b", **sections: Any) -> Any:
    """A run with this section `rollout`."""
    tree: dict[str, Any] = {
        "model": {"path": path},
        "data": {"train": {"source": "reasoning_gym", "name": "chain_sum", "limit": 64}},
        "rewards": [{"name": "exact_number"}],
        "rollout": rollout,
    }
    return parse_config(tree | sections)


def test_engines_get_what_the_field_says_and_others_nothing() -> None:
    assert server_arguments(config_of(FP8), "m") == FP8 | {MARK: True}
    assert server_arguments(config_of({}), "m") == {}
    assert model_change(config_of({"engine": "embedded"})) is None
    assert model_change(config_of(FP8 | {"engine": "embedded"})) is not None
    assert {*SET_BY_IT} <= arguments_of_sglang()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "rollout.kv_cache_dtype is 'fp8'; it must be 'auto' or 'fp8_e4m3'"),
        (FP8 | {"engine_args": {"kv_cache_dtype": "fp8_e4m3"}}, "kv_cache_dtype is set by rollout.kv_cache_dtype; remove one"),
        (FP8 | {"engine_args": {"quantization_param_path": "s"}}, "quantization_param_path is set by rollout.kv_cache_dtype"),
        (FP8 | {"engine": "replay", "replay_from": "r"}, "is for engines that megarl starts"),
        (FP8 | {"engine": "embedded", "speculative": {"algorithm": "ngram"}}, "does not go with drafts"),
        (FP8 | {"disaggregation": {"prefill": 1, "decode": 1}, "engines": 2}, "does not go with keys and values that engines"),
        (FP8 | {"engine_args": {"attention_backend": "fa3"}}, "attention_backend is 'fa3', which rounds queries too"),
        (FP8 | {"engine_args": {"load_format": "dummy"}}, "reads the weights that a server starts with"),
        (FP8 | {"engine": "embedded", "engines": {"min": 1, "max": 2}, "sites": {}}, "does not go with engines of other sites"),
    ],
)
def test_what_it_does_not_go_with_is_one_sentence(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        config_of(rollout, resources={"placement": "separate"})


def test_adapters_that_engines_add_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not go with adapters that engines add"):
        config_of(FP8, policy={"lora": {"rank": 4, "sync": "adapters"}})


def test_a_server_without_the_mark_is_left_alone() -> None:
    """Whoever gives SGLang the argument has SGLang's scales."""
    arguments = ["--kv-cache-dtype", "fp8_e4m3", "--speculative-draft-kv-cache-dtype", "fp8_e4m3"]
    install(arguments)
    assert arguments == ["--kv-cache-dtype", "fp8_e4m3", "--speculative-draft-kv-cache-dtype", "fp8_e4m3"]


def test_models_without_such_a_bound_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(FP8, "examples/models/deepseek-v3")
    said = (
        "rollout.kv_cache_dtype is 'fp8_e4m3', which cannot be had: the model in examples/models/deepseek-v3 is of the family"
    )
    for check in (lambda: check_servers(config, "cpu"), lambda: model_change(config)):
        with pytest.raises(ConfigError, match=said):
            check()
    assert cli.main(["plan", "examples/plans/deepseek-v3-grpo-2048xh100.yaml", "rollout.kv_cache_dtype=fp8_e4m3"]) == 2
    assert "rollout.kv_cache_dtype is 'fp8_e4m3', which cannot be had" in capsys.readouterr().err


def test_a_plan_counts_half_of_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    plain, few = planned(capsys, PLAN), planned(capsys, PLAN, "rollout.kv_cache_dtype=fp8_e4m3")

    def tokens(tree: Any) -> int:
        return int(tree["memory"]["kv_cache_tokens"])

    def seconds(tree: Any) -> float:
        return float(tree["times"]["phases"]["generate"]["seconds"])

    assert tokens(few) == pytest.approx(2 * tokens(plain), abs=2)
    assert seconds(few) < 0.7 * seconds(plain)


def test_a_gate_has_no_bound_for_what_depends_on_the_model() -> None:
    differences = {"log_prob_max_difference_as_loaded", "log_prob_max_difference_after_sync"}
    assert differences <= bounds(config_of({}), 32).keys()
    assert not differences & bounds(config_of(FP8), 32).keys()


class Layer(torch.nn.Module):
    """A decoder layer as SGLang names its parts, whose attention has `scale` (None, or a parameter of a checkpoint's)."""

    def __init__(self, scale: torch.Tensor | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        weight = 9 * torch.randn(16, 256, generator=generator)
        self.input_layernorm = torch.nn.RMSNorm(256)
        self.self_attn = torch.nn.Module()
        self.self_attn.q_size, self.self_attn.kv_size = 8, 4
        self.self_attn.rotary_emb = torch.nn.Module()
        self.self_attn.qkv_proj = torch.nn.Linear(256, 16)
        self.self_attn.qkv_proj.weight.data = weight
        self.self_attn.attn = torch.nn.Module()
        for name in ("k_scale", "v_scale"):
            setattr(
                self.self_attn.attn, name, None if scale is None else torch.nn.Parameter(scale.clone(), requires_grad=False)
            )
            setattr(self.self_attn.attn, f"{name}_float", None)


@pytest.mark.parametrize("scale", [None, torch.tensor(1.0)])
def test_attention_has_its_scales_again_when_memory_comes_back(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.options.fp8_cache.sglang_process._largest_of_ranks", lambda bounds: bounds)
    model = torch.nn.ModuleList([Layer(scale)])
    set_scales(model)
    layer, attention = model[0].self_attn.qkv_proj, model[0].self_attn.attn
    norm = model[0].input_layernorm.weight
    expected = (
        scale_for(key_bound(layer.weight[8:12], norm, layer.bias[8:12], None)),
        scale_for(row_bound(layer.weight[12:], norm, layer.bias[12:])),
    )
    assert min(expected) > 1
    assert (attention.k_scale_float, attention.v_scale_float) == expected
    attention.k_scale.data.fill_(7.0)
    clear_unsent(model)
    assert (float(attention.k_scale), float(attention.v_scale)) == expected


def test_the_bound_of_weights_in_fp8_is_that_of_what_they_stand_for() -> None:
    layer = Layer(None)
    weight, norm = layer.self_attn.qkv_proj.weight.detach(), layer.input_layernorm.weight
    scales = torch.tensor([[0.25, 0.5]])
    stored = (weight / scales.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    decoded = stored.float() * scales.repeat_interleave(128, 1)
    few = SimpleNamespace(weight=stored, weight_scale_inv=scales, bias=None)
    attention = SimpleNamespace(qkv_proj=few, q_size=8, kv_size=4, rotary_emb=SimpleNamespace(mscale=1.5))
    assert _bounds(attention, norm) == (key_bound(decoded[8:12], norm, None, None, 1.5), row_bound(decoded[12:], norm, None))


def test_a_model_whose_layers_it_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer of the model has an input_layernorm"):
        set_scales(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
