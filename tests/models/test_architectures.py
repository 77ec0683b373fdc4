"""Architectures: the arguments megatron-core gets make the model Hugging Face has; what cannot be represented is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import ModelError
from megarl.models.hf_folder import write_hf_folder
from megarl.models.registry import architecture_for

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied": True, "groups": 1}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "llama-rope-linear": ("llama", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {"groups": 4}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(scope="module")
def facts(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What megarl's arguments and weight map make of each model in megatron-core, found in one other process."""
    root = tmp_path_factory.mktemp("models")
    for name, (family, settings) in MODELS.items():
        model = tiny(family, **settings)
        write_hf_folder(root / name, model.tensors.items(), model.hf_config)
    program = [sys.executable, str(Path(__file__).with_name("megatron_logits.py")), *(str(root / name) for name in MODELS)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS "))
    return {Path(path).name: found for path, found in json.loads(line.removeprefix("FACTS ")).items()}


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_megatron_core_equal_hugging_face(tiny: Any, facts: dict[str, Any], name: str) -> None:
    family, settings = MODELS[name]
    ids = torch.tensor([[(7 * place + 3) % 61 for place in range(40)]])
    with torch.no_grad():
        expected = tiny(family, **settings).model(ids).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(torch.tensor(facts[name]["logits"]), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_rotary_frequencies_equal_hugging_face(tiny: Any, facts: dict[str, Any], name: str) -> None:
    family, settings = MODELS[name]
    expected = tiny(family, **settings).model.model.rotary_emb.inv_freq
    torch.testing.assert_close(torch.tensor(facts[name]["rotary_frequencies"]), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", MODELS)
def test_the_map_names_every_parameter_of_megatron_core_in_its_shape(tiny: Any, facts: dict[str, Any], name: str) -> None:
    family, settings = MODELS[name]
    hf_config = tiny(family, **settings).hf_config
    weight_map = architecture_for(hf_config).weight_map(hf_config)
    names = weight_map.megatron_names(range(3), True, True)
    assert {name: list(weight_map.megatron_shape(name, 1)) for name in names} == facts[name]["shapes"]


def test_transformers_4_and_5_spellings_give_the_same_arguments(tiny: Any) -> None:
    new = tiny("llama", **MODELS["llama-rope-llama3"][1]).hf_config
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old |= {"rope_theta": 500000.0, "rope_scaling": scaling}
    architecture = architecture_for(new)
    assert architecture.gpt_kwargs(old) == architecture.gpt_kwargs(new)
    assert architecture.gpt_kwargs(new)["rotary_base"] == 500000
    unscaled = old | {"rope_scaling": None}
    assert architecture.gpt_kwargs(unscaled)["rope_scaling"] is False
    linear = old | {"rope_scaling": {"type": "linear", "factor": 2}}
    assert architecture.gpt_kwargs(linear)["seq_len_interpolation_factor"] == 2.0


REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("llama", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types names other"),
    (
        "qwen2",
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "use_sliding_window",
    ),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
    ("llama", {"hidden_size": None}, "hidden_size is None"),
    ("llama", {"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3, but it must divide num_attention_heads=4"),
    ("llama", {"head_dim": None, "hidden_size": 30}, "hidden_size is 30, but without head_dim"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, r"rope_parameters\.rope_type is 'yarn'"),
    ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, r"rope_parameters\.low_freq_factor is 2\.0"),
    ("llama", {"rope_parameters": LINEAR | {"factor": None}}, r"rope_parameters\.factor is None"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused_by_field(tiny: Any, family: str, change: dict[str, Any], message: str) -> None:
    hf_config = tiny(family).hf_config | change
    architecture = architecture_for(hf_config)
    with pytest.raises(ModelError, match=message):
        architecture.transformer_config_kwargs(hf_config) | architecture.gpt_kwargs(hf_config)


def test_a_sliding_window_that_no_layer_uses_is_accepted(tiny: Any) -> None:
    """Qwen2.5's own configs: the window is off, or starts after the last layer."""
    hf_config = tiny("qwen2").hf_config | {"layer_types": None, "sliding_window": 64, "max_window_layers": 3}
    architecture = architecture_for(hf_config)
    plain = architecture.transformer_config_kwargs(tiny("qwen2").hf_config)
    assert architecture.transformer_config_kwargs(hf_config | {"use_sliding_window": True}) == plain
    assert architecture.transformer_config_kwargs(hf_config | {"use_sliding_window": False, "max_window_layers": 1}) == plain


def test_an_unknown_architecture_names_the_known_ones_and_the_file_to_add() -> None:
    with pytest.raises(ModelError) as error:
        architecture_for({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3"})
    for part in ("Gemma3ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "megarl/models/gemma3.py"):
        assert part in str(error.value)
    with pytest.raises(ModelError, match=r"did you mean 'LlamaForCausalLM'"):
        architecture_for({"architectures": ["LLamaForCausalLM"], "model_type": "llama"})
    with pytest.raises(ModelError, match="model_type is 'None'"):
        architecture_for({})
    assert architecture_for({"model_type": "qwen3"}).name == "qwen3"
