"""Families whose queries are scaled, whose scores are capped, or that are alike: refused configs and published sizes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megarl.errors import LayoutError, ModelError
from megarl.megatron.core_traits import query_factors, scaling_queries
from megarl.megatron.layer_specs import _check_spec
from megarl.models.architecture import DecoderTraits, QueryScale
from megarl.models.registry import architecture_for
from megarl.models.transformers_names import auto_class
from megarl.weights.checksums import check_model
from tests.families import FAMILIES, VARIANTS, build_folder, hugging_face
from tests.families.positions_and_caps import FAMILIES as OURS
from tests.families.positions_and_caps import SCALED_ROPE

ROPE = "rope_parameters"
NOT_SAID = {name: value for name, value in SCALED_ROPE.items() if name != "llama_4_scaling_beta"}
WINDOWS = ["sliding_attention", "full_attention"] * 2


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """config.json of each family's tiny model."""
    models = {name: hugging_face(name) for name in OURS}
    return {name: model.config.to_dict() | {"architectures": [type(model).__name__]} for name, model in models.items()}


REFUSED = [
    ("ministral3", {ROPE: NOT_SAID}, r"rope_parameters\.llama_4_scaling_beta is None; it must be a number"),
    ("ministral3", {"original_max_position_embeddings": 7}, "by which queries are scaled, is 5; they must be equal"),
    ("ministral3", {ROPE: SCALED_ROPE | {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5; it must be 1"),
    ("ministral3", {"layer_types": WINDOWS, "sliding_window": 8}, "layer_types names other layers than 'sliding_attention'"),
    ("ministral3", {"attention_bias": True}, "attention_bias is True"),
    ("ministral3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'; it must be a pos"),
    ("exaone4", {"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
    ("exaone4", {"sliding_window": None}, "layer_types has 'sliding_attention', but sliding_window is None"),
    ("exaone4", {"attention_bias": True}, "attention_bias is True"),
    ("exaone4", {ROPE: {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5"),
    ("exaone_moe", {"mlp_layer_types": ["dense", "moe"] * 2}, "must say 'dense' or 'sparse' for each of the 4 layers"),
    ("exaone_moe", {"mlp_layer_types": ["dense"] * 4}, "none of the layers has experts"),
    ("exaone_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("exaone_moe", {"num_shared_experts": 0}, "num_shared_experts is 0; it must be a positive integer"),
    ("exaone_moe", {"n_group": 3}, "n_group must divide n_routed_experts=8|num_experts_per_tok // topk_group is 2"),
    ("gemma2", {"attention_bias": True}, "attention_bias is True"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; it must be 'gelu_pytorch_tanh'"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; it must be False"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, r"attn_logit_softcapping is 0\.0; it must be a number above 0"),
    ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping is '30'; it must be a number above 0"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number above 0"),
    ("gemma2", {"sliding_window": None}, "layer_types has 'sliding_attention', but sliding_window is None"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 2}, r"the layers \[0, 2\] have experts"),
    ("glm4_moe_lite", {"first_k_dense_replace": 2}, "and first_k_dense_replace is 2; these must be all layers from that one"),
    ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave is False"),
    ("glm4_moe_lite", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ("glm4_moe_lite", {"attention_bias": True}, "attention_bias is True"),
    ("glm4_moe_lite", {"n_shared_experts": 0}, "n_shared_experts is 0; it must be a positive integer"),
    ("glm4_moe_lite", {ROPE: {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5; it must be 1"),
    ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2; it must be 1"),
    ("llama4", {"layer_types": WINDOWS}, "it must say 'chunked_attention' or 'full_attention' for 4 layers"),
    ("llama4", {"attention_chunk_size": None}, "attention_chunk_size is None; it must be a positive integer"),
    ("llama4", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]"),
    ("llama4", {"attention_bias": True}, "attention_bias is True"),
    ("llama4", {"floor_scale": 0}, "floor_scale is 0; it must be a number above 0"),
    ("llama4", {"moe_layers": []}, "none of the layers has experts"),
    ("llama4", {ROPE: {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5"),
    ("mistral4", {"n_group": 2}, "n_group is 2; it must be 1"),
    ("mistral4", {"rope_interleave": False}, "rope_interleave is False"),
    ("mistral4", {"attention_bias": True}, "attention_bias is True"),
    ("mistral4", {ROPE: NOT_SAID}, r"rope_parameters\.llama_4_scaling_beta is None"),
    ("mistral4", {ROPE: {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "rope_type is 'default'; it must be 'yarn'"),
    ("mistral4", {ROPE: SCALED_ROPE | {"partial_rotary_factor": 0.5}}, "the share of qk_rope_head_dim = 4 in a head's 10"),
    ("mistral4", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused_by_field(
    configs: Any, family: str, change: dict[str, Any], message: str
) -> None:
    hf_config = configs[family] | change
    architecture = architecture_for(hf_config)
    with pytest.raises(ModelError, match=message):
        architecture.transformer_config_kwargs(hf_config) | architecture.gpt_kwargs(hf_config)


@pytest.mark.parametrize("family", ["exaone_moe", "glm4_moe_lite", "mistral4", "llama4"])
def test_what_a_config_leaves_out_is_what_transformers_fills_in(family: str) -> None:
    sizes = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = getattr(transformers, FAMILIES[family].config_class)
    name = f"{FAMILIES[family].class_prefix}ForCausalLM"
    bare = {"architectures": [name], "model_type": config.model_type, **sizes}
    filled = config(**sizes, num_key_value_heads=4, pad_token_id=None).to_dict() | {"architectures": [name]}
    architecture = architecture_for(bare)
    found, expected = (architecture.transformer_config_kwargs(one) for one in (bare | {"num_key_value_heads": 4}, filled))
    assert found == expected
    assert architecture.gpt_kwargs(bare | {"num_key_value_heads": 4}) == architecture.gpt_kwargs(filled)
    assert architecture.traits(bare) == architecture.traits(filled)
    shapes = architecture.weight_map(bare | {"num_key_value_heads": 4}).hf_shapes()
    assert shapes == architecture.weight_map(filled).hf_shapes()


@pytest.mark.parametrize("family", ["ministral3", "mistral4"])
def test_positions_of_the_tests_are_scaled_by_several_factors(configs: Any, family: str) -> None:
    """Else the comparisons in every layout would prove nothing of them. As transformers computes them, up to 40 tokens."""
    scale = architecture_for(configs[family]).traits(configs[family]).query_scale
    assert scale is not None
    module = getattr(transformers.models, family)
    of_transformers = getattr(module, f"modeling_{family}").get_llama_4_attn_scale(
        torch.arange(40)[None], scale.beta, scale.span
    )
    factors = query_factors(torch.arange(40), scale)
    assert torch.equal(factors, of_transformers.flatten())
    assert len(factors[:30].unique()) >= 4
    model = hugging_face(family)
    ids = torch.arange(30)[None]
    logits = model(ids).logits.detach()
    for layer in model.model.layers:
        layer.self_attn.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    assert float((model(ids).logits.detach() - logits).abs().max()) > 1e-3


@pytest.mark.parametrize(("field", "of"), [("attn_logit_softcapping", "layers"), ("final_logit_softcapping", "model")])
def test_caps_of_the_tiny_model_bend_what_they_cap(field: str, of: str) -> None:
    model, ids = hugging_face("gemma2"), torch.arange(30)[None]
    logits = model(ids).logits.detach()
    setattr(model.config, field, None)
    for layer in model.model.layers if of == "layers" else ():
        layer.self_attn.attn_logit_softcapping = None
    assert float((model(ids).logits.detach() - logits).abs().max()) > 1e-2


def test_chunks_of_the_tiny_model_hide_tokens_and_its_queries_are_scaled() -> None:
    model, ids = hugging_face("llama4"), torch.arange(30)[None]
    logits = model(ids).logits.detach()
    model.config.attention_chunk_size = 40
    whole = model(ids).logits.detach()
    assert float((whole - logits).abs().max()) > 1e-2
    for layer in model.model.layers:
        layer.self_attn.attn_temperature_tuning = False
    assert float((model(ids).logits.detach() - whole).abs().max()) > 1e-3


def test_layers_without_a_window_do_not_rotate_beside_those_with_one(configs: Any) -> None:
    def no_rope(family: str, **change: Any) -> Any:
        hf_config = configs[family] | change
        return architecture_for(hf_config).transformer_config_kwargs(hf_config).get("no_rope_freq")

    for family in ("exaone4", "exaone_moe"):
        assert no_rope(family) == [0, 0, 1, 0]
        assert no_rope(family, layer_types=None, sliding_window_pattern=2) == [0, 1, 0, 1]
        assert no_rope(family, sliding_window=10**6) == [0, 0, 1, 0]
    assert no_rope("exaone4", sliding_window=None, layer_types=None) is None


class _Core(torch.nn.Module):
    def forward(self, query: Tensor, *rest: Any, packed_seq_params: Any = None) -> Tensor:
        return query


def test_queries_of_a_core_attention_are_scaled_by_the_positions_that_travel_with_them() -> None:
    class Packed:
        position_ids = torch.tensor([0, 9, 10, 25, 3])

    core = scaling_queries(_Core, QueryScale(0.5, 10.0, shift=1))()
    expected = 1 + 0.5 * torch.tensor([1.0, 2.0, 2.0, 3.0, 1.0]).log()
    for shape in ((5, 2, 3), (5, 1, 2, 3)):
        found = core(torch.ones(shape), packed_seq_params=Packed())
        assert torch.equal(found.flatten(1)[:, 0], expected)
        assert found.flatten(1).std(1).max() == 0


def test_layers_that_know_no_positions_or_no_cap_are_refused() -> None:
    class Config:
        window_size = experimental_attention_variant = cp_comm_type = num_query_groups = None
        tensor_model_parallel_size, num_attention_heads, softmax_type = 1, 4, "vanilla"
        context_parallel_size, multi_latent_attention, layernorm_zero_centered_gamma = 1, False, False

    scaled, capped = DecoderTraits(query_scale=QueryScale(0.1, 8.0)), DecoderTraits(score_cap=50.0)

    class Chunked(Config):
        window_size = (7, 0)

    with pytest.raises(LayoutError, match="attends within chunks, which layers of"):
        _check_spec("transformer_engine", Chunked(), DecoderTraits(chunks=True), "spec")  # type: ignore[arg-type]
    _check_spec("reference", Chunked(), DecoderTraits(chunks=True), "spec")  # type: ignore[arg-type]
    for name, traits, core, match in (
        ("local", scaled, "spec", "model.layer_spec is 'local', but this model scales queries"),
        ("local", capped, "spec", "caps attention scores, which layers of model.layer_spec = 'local' do not"),
        ("transformer_engine", capped, "spec", "model.layer_spec = 'transformer_engine' do not; .* must be 'reference'"),
        ("reference", capped, "segments", "caps attention scores, which attention by segments do not"),
    ):
        with pytest.raises(LayoutError, match=match):
            _check_spec(name, Config(), traits, core)  # type: ignore[arg-type]
    for name, traits, core in (
        ("local", scaled, "segments"),
        ("transformer_engine", scaled, "spec"),
        ("reference", scaled, "spec"),
        ("reference", capped, "spec"),
    ):
        _check_spec(name, Config(), traits, core)  # type: ignore[arg-type]


def test_sglang_serves_no_config_that_it_reads_otherwise(configs: Any) -> None:
    def refusal(family: str, **change: Any) -> str | None:
        return architecture_for(configs[family]).sglang.refusal(configs[family] | change)

    assert "it scales queries beyond 16384 tokens" in str(refusal("ministral3"))
    assert refusal("ministral3", original_max_position_embeddings=5) is None
    assert "attends to all tokens" in str(refusal("ministral3", original_max_position_embeddings=5, sliding_window=8))
    assert "must be a string such as 'LLLG'" in str(refusal("exaone4"))
    assert "must be a string such as 'LLLG'" in str(refusal("exaone4", sliding_window_pattern="LG"))
    assert "whatever rope_theta = 10000 says" in str(refusal("exaone4", sliding_window_pattern="LLG"))
    million = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert refusal("exaone4", sliding_window_pattern="LLG", **million) is None
    assert "windows are a token longer" in str(refusal("exaone_moe", **million))
    assert "must say is_moe_layer" in str(refusal("exaone_moe", sliding_window=10**6, **million))
    assert refusal("exaone_moe", sliding_window=10**6, is_moe_layer=[False, True, True, False], **million) is None
    assert refusal("gemma2") is None
    assert "gives every other layer a window" in str(refusal("gemma2", layer_types=WINDOWS[::-1]))
    assert "no rotary embedding of type 'linear'" in str(refusal("gemma2", rope_parameters={"type": "linear", "factor": 2.0}))
    assert "must say first_k_dense_replace" in str(refusal("glm4_moe_lite"))
    assert refusal("glm4_moe_lite", first_k_dense_replace=1) is None
    assert "has no model of this family" in str(refusal("mistral4"))


def test_a_cpu_engine_does_not_cap_scores(tmp_path: Any) -> None:
    from megarl.errors import EngineError

    build_folder("gemma2", tmp_path / "model")
    check_model(tmp_path / "model", device="cuda")
    with pytest.raises(EngineError, match="on a CPU its attention does not cap scores"):
        check_model(tmp_path / "model", device="cpu")


def test_transformers_class_of_every_text_family_is_found() -> None:
    for name in VARIANTS:
        config = hugging_face(name).config
        assert type(config) in auto_class({"model_type": config.model_type})._model_mapping, name


def of_sizes(name: str, vocab: int, hidden: int, ffn: int, layers: int, heads: int, groups: int, **more: Any) -> Any:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    return name, {**sizes, "num_attention_heads": heads, "num_key_value_heads": groups, **more}


LLLG = ["sliding_attention"] * 3 + ["full_attention"]
K_EXAONE = {"head_dim": 128, "num_experts": 128, "moe_intermediate_size": 2048, "sliding_window": 128, "layer_types": LLLG * 12}
PUBLISHED = {
    "Mistral-Small-24B-2501": (
        of_sizes("Mistral", 131072, 5120, 32768, 40, 32, 8, head_dim=128, sliding_window=None),
        23.572,
    ),
    "Ministral-3-8B": (of_sizes("Ministral3", 131072, 4096, 14336, 34, 32, 8), 8.490),
    "Ministral-3-3B": (of_sizes("Ministral3", 131072, 3072, 9216, 26, 32, 8, tie_word_embeddings=True), 3.429),
    "EXAONE-4.0-32B": (
        of_sizes("Exaone4", 102400, 5120, 27392, 64, 40, 8, head_dim=128, sliding_window=4096, layer_types=LLLG * 16),
        32.003,
    ),
    "K-EXAONE-236B-A23B": (of_sizes("ExaoneMoe", 153600, 6144, 18432, 48, 64, 8, **K_EXAONE), 236.562),
    "gemma-2-2b": (of_sizes("Gemma2", 256000, 2304, 9216, 26, 8, 4), 2.614341888),
    "gemma-2-9b": (of_sizes("Gemma2", 256000, 3584, 14336, 42, 16, 8), 9.241705984),
    "gemma-2-27b": (of_sizes("Gemma2", 256000, 4608, 36864, 46, 32, 16, head_dim=128), 27.227128320),
    "GLM-4.7-Flash": (of_sizes("Glm4MoeLite", 154880, 2048, 10240, 47, 20, 20), 29.943),
    "Llama-4-Scout-17B-16E": (of_sizes("Llama4Text", 202048, 5120, 8192, 48, 40, 8), 107.770),
    "Llama-4-Maverick-17B-128E": (
        of_sizes("Llama4Text", 202048, 5120, 8192, 48, 40, 8, num_local_experts=128, interleave_moe_layer_step=2),
        400.712,
    ),
    "Mistral-Small-4-119B": (of_sizes("Mistral4", 131072, 4096, 12288, 36, 32, 32), 118.968),
}
"""Parameters in billions. Those of Gemma 2 are published; the others are what transformers counts for these sizes, without a
tower and without layers for multi-token prediction: publishers say 23.6, 8.4, 3.4, 32, 236, 30, 109, 400 and 119."""


@pytest.mark.parametrize(("sizes", "billions"), PUBLISHED.values(), ids=PUBLISHED)
def test_large_models_have_as_many_parameters_as_published_and_as_transformers_counts(sizes: Any, billions: float) -> None:
    name, fields = sizes
    config = getattr(transformers, f"{name}Config")(**fields)
    name = name.removesuffix("Text")
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    hf_config = config.to_dict() | {"architectures": [f"{name}ForCausalLM"]}
    shapes = architecture_for(hf_config).weight_map(hf_config).hf_shapes()
    biases = [shape for tensor, shape in shapes.items() if tensor.endswith("e_score_correction_bias")]
    counted = sum(map(prod, shapes.values()))
    assert counted == sum(parameter.numel() for parameter in model.parameters()) + sum(map(prod, biases))
    assert counted / 1e9 == pytest.approx(billions, rel=1e-3)
