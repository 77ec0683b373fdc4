"""DeepSeek-V4: what is refused, how it is split, its names, kinds of layers and parameters, the order of its streams, plans."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from megarl.config.layout import Layout
from megarl.data.stream import Response, Unit, context_parallel_shard, pack
from megarl.errors import ConfigError, LayoutError, ModelError
from megarl.models import registry
from megarl.models.check_layouts import _check_layout
from megarl.models.flops import FlopsModel
from megarl.models.registry import architecture_for
from megarl.models.shape import shape_of
from megarl.options.compressed_attention.attention_variant import put_into
from megarl.options.compressed_attention.compressor import best
from megarl.options.compressed_attention.deepseek_v4 import ARCHITECTURE, text_config
from megarl.options.compressed_attention.families import ARCHITECTURES
from megarl.options.compressed_attention.windows import CompressedOrder, compressed_order
from tests.families import build_folder, hub_tensors, hugging_face

SLIDING, CHOSEN, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
REFUSED = [
    (
        {"layer_types": [SLIDING, CHOSEN, HEAVY, "full_attention"]},
        "layer_types has 'full_attention'; its entries must be",
    ),
    ({"layer_types": [SLIDING] * 3}, "layer_types has 3 entries; it must have one for each of 4 layers"),
    ({"layer_types": None, "compress_ratios": [0, 4, 8, 128]}, "compress_ratios has 8; its entries must be among 0, 4, 128"),
    ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types has 'dense'; its entries must be among 'hash_moe', 'moe'"),
    ({"compress_rate_csa": 0}, "compress_rate_csa is 0; it must be a positive integer"),
    ({"index_n_heads": 0}, "index_n_heads is 0; it must be a positive integer"),
    ({"index_head_dim": 4}, "index_head_dim is 4; it must be at least 8, which rotate"),
    ({"o_groups": 3}, "o_groups is 3; it must divide num_attention_heads=4"),
    ({"hc_mult": 0}, "hc_mult is 0; it must be a positive integer"),
    ({"hc_eps": 0}, "hc_eps is 0; it must be a number above 0"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is 2; it must be 1"),
    ({"n_shared_experts": 2}, "n_shared_experts is 2; it must be 1"),
    ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; it must be 'sqrtsoftplus'"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"swiglu_limit": 0}, "swiglu_limit is 0; it must be a number above 0"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is of method 'fp8'"),
]


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """config.json of the tiny model."""
    model = hugging_face("deepseek_v4")
    return model.config.to_dict() | {"architectures": [type(model).__name__]}


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_cannot_be_represented_is_refused_by_field(config: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architecture_for(config).transformer_config_kwargs(config | change)


def test_layouts_that_do_not_divide_it_are_refused_by_name(config: Any) -> None:
    shape = shape_of(config)
    _check_layout("policy.layout", Layout(tp=2, pp=2, ep=2, dp=2, sequence_parallel=True), shape)
    with pytest.raises(ConfigError, match=r"policy\.layout\.cp is 2"):
        _check_layout("policy.layout", Layout(cp=2), shape)
    with pytest.raises(ConfigError, match=r"policy\.layout\.tp is 4"):
        _check_layout("policy.layout", Layout(tp=4, etp=4, sequence_parallel=True), shape_of(config | {"o_groups": 2}))


def test_layers_that_are_not_the_reference_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"model\.layer_spec is 'transformer_engine', but .*; it must be 'reference'"):
        put_into(None, "transformer_engine", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hash_layers": 1, "compress_rate_hca": 64},
        {"compress_ratios": [0, 4, 128, 4, 0, 128]},
        {"qk_rope_head_dim": 32},
        {"rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}},
    ],
)
def test_fields_of_earlier_versions_mean_what_they_mean_to_transformers(fields: dict[str, Any]) -> None:
    given = {"num_hidden_layers": 5, **fields}
    theirs, ours = transformers.DeepseekV4Config(**given), text_config(given)
    for name in ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor"):
        assert ours[name] == getattr(theirs, name), name
    for name, kind in (("rope_parameters", "main"), ("compressed_rope_parameters", "compress")):
        expected = {key: value for key, value in theirs.rope_parameters[kind].items() if key != "type"}
        assert {key: value for key, value in ours[name].items() if key != "type"} == expected
    assert text_config(theirs.to_dict())["compressed_rope_parameters"] == theirs.rope_parameters["compress"]


def test_the_model_of_transformers_defaults_has_as_many_parameters() -> None:
    """Those are the sizes of DeepSeek-V4-Flash."""
    with torch.device("meta"):
        model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config())
    hf_config = {"architectures": ["DeepseekV4ForCausalLM"], **model.config.to_dict()}
    shapes = architecture_for(hf_config).weight_map(hf_config).hf_shapes()
    chosen = sum(b.numel() for key, b in model.named_buffers() if key.endswith(("e_score_correction_bias", "tid2eid")))
    assert sum(map(prod, shapes.values())) == sum(parameter.numel() for parameter in model.parameters()) + chosen


def test_names_are_those_that_transformers_writes_and_reads(tmp_path: Path) -> None:
    """It writes those of layers behind `model.`, and calls one norm otherwise than it reads it from published folders."""
    model = hugging_face("deepseek_v4")
    model.save_pretrained(tmp_path / "written")
    with safe_open(tmp_path / "written" / "model.safetensors", "pt") as opened:
        written = {name.removeprefix("model.") for name in opened.keys() if ".layers." in name}  # noqa: SIM118
    ours = {name.replace(".attn.kv_norm.", ".attn.norm.") for name in hub_tensors(model)}
    assert ours - written == {"embed.weight", "norm.weight", "head.weight", *(f"hc_head_{x}" for x in ("fn", "base", "scale"))}
    assert not written - ours
    build_folder("deepseek_v4", tmp_path / "published")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "published", dtype=torch.float32).state_dict()
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())


def test_the_sentence_for_an_installation_without_the_option_knows_its_family() -> None:
    named = {family for family, option in registry.OPTION_OF_FAMILY.items() if option == "compressed_attention"}
    assert named == {architecture.name for architecture in ARCHITECTURES}


def test_sglang_is_refused_with_its_reason(config: Any) -> None:
    assert "the embedded engine serves it" in str(ARCHITECTURE.sglang.refusal(config))


def order_of(lengths: list[tuple[int, list[int]]], rate: int, window: int) -> tuple[Any, CompressedOrder]:
    """A stream of prompts and responses of these lengths, and its order."""
    generator = torch.Generator().manual_seed(3)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, 99, (length,), generator=generator)

    def response(length: int) -> Response:
        return Response(0, tokens(length), torch.ones(length, dtype=torch.bool))

    stream = pack([Unit(tokens(prompt), [response(length) for length in of]) for prompt, of in lengths])
    return stream, compressed_order(stream, context_parallel_shard(stream, 1, 0), [0, rate], window, 4)


def test_windows_begin_anew_with_each_sequence_and_shared_ones_are_compressed_once() -> None:
    rate, window = 3, 4
    stream, order = order_of([(7, [6, 10]), (2, [2]), (1, [1])], rate, window)
    windows = order.windows[rate]
    of_token: dict[int, tuple[set[int], list[int]]] = {}
    for call in order.calls[rate]:
        tokens, compressed = call.sees_tokens(window), call.sees_compressed(rate)
        for place in call.source.tolist():
            block, row = divmod(place, call.queries.shape[1])
            seen = (
                {*call.tokens[block][tokens[block, row]].tolist()},
                call.compressed[block][compressed[block, row]].tolist(),
            )
            assert of_token.setdefault(int(call.queries[block, row]), seen) == seen
    for segment in stream.segments:
        path = [stream.segments[number] for number in segment.path] + [segment]
        sequence = [place for part in path for place in range(part.start, part.start + part.length)]
        for place in range(segment.start, segment.start + segment.length):
            position = sequence.index(place)
            tokens, numbers = of_token.pop(place)
            assert tokens == {*sequence[max(0, position - window + 1) : position + 1]}
            whole = (position + 1) // rate
            assert windows.tokens[numbers].tolist() == [sequence[n * rate : (n + 1) * rate] for n in range(whole)]
            assert windows.positions[numbers].tolist() == [n * rate for n in range(whole)]
            assert windows.is_first[numbers].tolist() == [n == 0 for n in range(whole)]
            before = [sequence[(n - 1) * rate : n * rate] for n in range(1, whole)]
            assert windows.before[numbers[1:]].tolist() == before
    assert not of_token
    shared = stream.segments[0].length // rate
    assert len(windows.tokens) == shared + sum((s.before + s.length) // rate - s.before // rate for s in stream.segments[1:])


def test_of_equal_scores_the_first_windows_are_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0], [5.0, 1.0, 3.0, 9.0], [1.0, 1.0, 1.0, 1.0]])
    visible = torch.tensor([[True] * 4, [True, True, True, False], [False] * 4])
    assert best(scores, visible, 2).tolist() == [[1, 0], [0, 2], [0, 0]]
    assert best(scores[:1], visible[:1] & (scores[:1] > 1), 3).tolist() == [[1, 1, 1]]


def test_operations_are_those_of_the_model_by_hand(config: Any) -> None:
    flops, shape = FlopsModel.of(shape_of(config)), shape_of(config)
    hidden, width, streams, groups = 32, 4 * 16, 3, 4
    attention = hidden * 24 + 24 * width + hidden * 16 + width * 6 + groups * 6 * hidden
    connections = 2 * streams * hidden * (streams * (2 + streams) + 2 + streams)
    compressed = (2 + 1 + 2) * 2 * hidden * 16 + 2 * (hidden * (4 * 12 + 16) + 24 * 16 * 12)
    experts = 4 * (hidden * 8 + (3 + 1) * 3 * hidden * 24)
    assert flops.per_token == 2 * (4 * (attention + connections + compressed // 4) + experts)
    assert shape.attention_layers == 0
    pairs = dict(flops.further_pairs)
    assert pairs[6] == 2 * 4 * 2 * width + 2 * 2 * width  # windows of all layers, and of 6 tokens three chosen keys
    assert pairs[None] == round(2 * (2 * 16 * 13 / 2 + 2 * width / 5))
    assert flops.attention(0, 4) == 10 * (pairs[6] + pairs[None])
