"""gpt-oss: configs are filled in as transformers does, and layers need their sinks, windows and clamps."""

from __future__ import annotations

import pytest
import torch
import transformers

from megarl.config.layout import Layout
from megarl.errors import ConfigError
from megarl.megatron.attention import ReferenceAttention
from megarl.models.check_layouts import _check_layout
from megarl.models.registry import architecture_for
from megarl.models.rope_frequencies import inverse_frequencies
from megarl.models.shape import shape_of
from tests.families import hub_tensors, hugging_face


def test_fields_that_a_config_leaves_out_are_those_of_transformers() -> None:
    model = hugging_face("gpt_oss")
    given = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    sizes = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    sizes += (
        "num_attention_heads",
        "num_key_value_heads",
        "num_local_experts",
        "num_experts_per_tok",
        "max_position_embeddings",
    )
    bare = {name: given[name] for name in sizes} | {"max_position_embeddings": 131072}
    filled = transformers.GptOssConfig(**{k: v for k, v in bare.items() if k != "architectures"}).to_dict()
    filled["architectures"] = given["architectures"]
    architecture = architecture_for(bare)
    assert architecture.transformer_config_kwargs(bare) == architecture.transformer_config_kwargs(filled)
    assert architecture.gpt_kwargs(bare) == architecture.gpt_kwargs(filled)
    assert architecture.weight_map(bare) == architecture.weight_map(filled)
    wanted, _ = transformers.models.gpt_oss.modeling_gpt_oss.ROPE_INIT_FUNCTIONS["yarn"](transformers.GptOssConfig(**filled))
    assert shape_of(bare).window_layers == frozenset({0, 2})
    torch.testing.assert_close(inverse_frequencies(architecture.text_config(bare), 64), wanted, rtol=1e-6, atol=0)


def test_experts_with_biases_are_not_split_and_sglang_serves_no_mxfp4() -> None:
    model = hugging_face("gpt_oss")
    config = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    for layout, message in (
        (Layout(tp=2, etp=2, sequence_parallel=True), r"policy\.layout\.etp is 2, which splits experts that have biases"),
        (Layout(tp=2, sequence_parallel=True), r"policy\.layout\.ep is 1, which leaves experts .*; it must be at least 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            _check_layout("policy.layout", layout, shape_of(config))
    _check_layout("policy.layout", Layout(tp=2, dp=2, ep=2, sequence_parallel=True), shape_of(config))
    refusal = architecture_for(config).sglang.refusal
    assert "convert the folder" in str(refusal(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def test_the_tiny_model_needs_its_sinks_windows_and_clamps() -> None:
    """Each of them changes the logits; else the parity of the others would prove nothing."""
    ids = torch.arange(40)[None] % 131
    plain = hugging_face("gpt_oss")(ids).logits
    for change in ("sinks", "window", "clamp"):
        model = hugging_face("gpt_oss")
        for layer in model.model.layers:
            if change == "sinks":
                layer.self_attn.sinks.data.fill_(-50.0)
            if change == "clamp":
                layer.mlp.experts.limit = 100.0
        if change == "window":
            model.config.sliding_window = 60
        assert float((model(ids).logits - plain).abs().max()) > 1e-3, change
    assert len(hub_tensors(hugging_face("gpt_oss"))) == 4 * (4 * 6 + 13) + 3


def test_a_layer_without_sinks_has_no_parameter() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    assert list(ReferenceAttention(config, 1, None, "self").parameters()) == []
