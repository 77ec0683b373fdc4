"""The weight map in one process: values against slices written out by hand, both directions, every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.errors import LayoutError, ModelError
from megarl.models.packings import GateUp, GroupedQKV, Vocabulary
from megarl.models.registry import architecture_for
from megarl.models.weight_map import BoundRule
from megarl.models.weight_tensors import hf_from_shards, shard_from_hf
from tests.models.megatron_models import megatron_names

CASES = [
    pytest.param(family, heads, groups, tied, id=f"{family}-{heads}:{groups}-{'tied' if tied else 'untied'}")
    for family in ("llama", "qwen2", "qwen3")
    for heads, groups in ((4, 2), (4, 1), (4, 4))
    for tied in (False, True)
]
PADDED_VOCAB = 72  # of 61: with tp 4 the last rank holds nothing but padding and one before it a part


def _shards(rule: BoundRule, tensors: dict[str, Tensor], tp_size: int, padded_vocab: int | None = PADDED_VOCAB) -> list[Tensor]:
    return [shard_from_hf(rule, tensors.__getitem__, rank, tp_size, padded_vocab) for rank in range(tp_size)]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(("family", "heads", "groups", "tied"), CASES)
def test_hf_to_shards_to_hf_is_byte_equal_and_complete(
    tiny: Any, family: str, heads: int, groups: int, tied: bool, tp_size: int
) -> None:
    model = tiny(family, heads=heads, groups=groups, tied=tied)
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    exported: dict[str, Tensor] = {}
    for name in megatron_names(weight_map, range(3), True, True):
        rule = weight_map.rule_for(name)
        shards = _shards(rule, model.tensors, tp_size)
        assert {tuple(shard.shape) for shard in shards} == {weight_map.rule_for(name).shape(tp_size, PADDED_VOCAB)}
        for hf_name, tensor in hf_from_shards(rule, shards):
            assert hf_name not in exported
            exported[hf_name] = tensor
    assert exported.keys() == model.tensors.keys() == set(weight_map.hf_names())
    assert len(weight_map.hf_names()) == len(model.tensors)
    for hf_name, tensor in exported.items():
        assert torch.equal(tensor, model.tensors[hf_name]), hf_name


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 1), (4, 4), (8, 2)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_packed_projection_gives_every_head_its_own_q_k_and_v(
    tiny: Any, family: str, heads: int, groups: int, tp_size: int
) -> None:
    """The ranks' outputs, gathered and split as megatron-core's SelfAttention does it, against q_proj, k_proj, v_proj."""
    model, dim = tiny(family, heads=heads, groups=groups), 12
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    hidden = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    outputs = []
    for rank in range(tp_size):
        prefix = "decoder.layers.1.self_attention.linear_qkv."
        weight = shard_from_hf(weight_map.rule_for(prefix + "weight"), model.tensors.__getitem__, rank, tp_size)
        output = hidden @ weight.double().T
        if family == "qwen2":
            output += shard_from_hf(weight_map.rule_for(prefix + "bias"), model.tensors.__getitem__, rank, tp_size).double()
        outputs.append(output)
    if groups < tp_size:
        by_group = list(torch.cat(outputs, dim=-1).chunk(groups, dim=-1))
    else:
        by_group = [chunk for output in outputs for chunk in output.chunk(groups // tp_size, dim=-1)]

    def head_of(which: str, index: int) -> Tensor:
        rows = slice(index * dim, (index + 1) * dim)
        projection = f"model.layers.1.self_attn.{which}_proj."
        out = hidden @ model.tensors[projection + "weight"][rows].double().T
        return out + model.tensors[projection + "bias"][rows].double() if family == "qwen2" else out

    per_group = heads // groups
    for head in range(heads):
        group = by_group[head // per_group]
        place = head % per_group
        torch.testing.assert_close(group[:, place * dim : (place + 1) * dim], head_of("q", head), rtol=1e-12, atol=1e-12)
        key, value = group[:, per_group * dim : (per_group + 1) * dim], group[:, (per_group + 1) * dim :]
        torch.testing.assert_close(key, head_of("k", head // per_group), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(value, head_of("v", head // per_group), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_gated_mlp_shard_is_the_ranks_gate_rows_then_its_up_rows(tiny: Any, tp_size: int) -> None:
    model = tiny("llama")
    rule = architecture_for(model.hf_config).weight_map(model.hf_config).rule_for("decoder.layers.2.mlp.linear_fc1.weight")
    share = 24 // tp_size
    for rank, shard in enumerate(_shards(rule, model.tensors, tp_size)):
        gate, up = shard.chunk(2)
        rows = slice(rank * share, (rank + 1) * share)
        assert torch.equal(gate, model.tensors["model.layers.2.mlp.gate_proj.weight"][rows])
        assert torch.equal(up, model.tensors["model.layers.2.mlp.up_proj.weight"][rows])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_row_parallel_layers_are_split_by_columns(tiny: Any, tp_size: int) -> None:
    model = tiny("qwen3")
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    for name, hf_name in (("self_attention.linear_proj", "self_attn.o_proj"), ("mlp.linear_fc2", "mlp.down_proj")):
        rule = weight_map.rule_for(f"decoder.layers.0.{name}.weight")
        assert rule.tp_axis == 1
        for shard, expected in zip(
            _shards(rule, model.tensors, tp_size),
            model.tensors[f"model.layers.0.{hf_name}.weight"].chunk(tp_size, dim=1),
            strict=True,
        ):
            assert torch.equal(shard, expected)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_vocabulary_padding_is_zero_and_never_leaves(tiny: Any, tp_size: int) -> None:
    model = tiny("llama")
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    for name, hf_name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        rule = weight_map.rule_for(name)
        shards = _shards(rule, model.tensors, tp_size)
        whole = torch.cat(shards)
        assert whole.shape == (PADDED_VOCAB, 32)
        assert torch.equal(whole[:61], model.tensors[hf_name])
        assert not whole[61:].any()
        whole[61:] = torch.nan  # whatever training leaves in the padding
        [(exported_name, exported)] = hf_from_shards(rule, list(whole.chunk(tp_size)))
        assert exported_name == hf_name
        assert torch.equal(exported, model.tensors[hf_name])


def test_both_layer_spec_spellings_mean_the_same_tensors(tiny: Any) -> None:
    model = tiny("qwen3")
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    local = megatron_names(weight_map, [1], True, True)
    fused = megatron_names(weight_map, [1], True, True, te_names=True)
    differing = {(a, b) for a, b in zip(local, fused, strict=True) if a != b}
    layer = "decoder.layers.1."
    assert differing == {
        (layer + "input_layernorm.weight", layer + "self_attention.linear_qkv.layer_norm_weight"),
        (layer + "pre_mlp_layernorm.weight", layer + "mlp.linear_fc1.layer_norm_weight"),
    }
    for a, b in zip(local, fused, strict=True):
        assert weight_map.rule_for(a).hf_names == weight_map.rule_for(b).hf_names


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_export_every_tensor_exactly_once(tiny: Any, tied: bool) -> None:
    model = tiny("qwen2", tied=tied)
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    stages = [([0], True, False), ([1], False, False), ([2], False, True)]
    names = [megatron_names(weight_map, *stage) for stage in stages]
    assert ["output_layer.weight" in stage for stage in names] == [False, False, True]
    exported = [
        hf_name
        for stage in names
        for name in stage
        for hf_name, _ in hf_from_shards(weight_map.rule_for(name), _shards(weight_map.rule_for(name), model.tensors, 2))
    ]
    assert sorted(exported) == sorted(model.tensors)


def test_a_tied_output_layer_is_filled_from_the_embedding_and_absent_where_the_embedding_is(tiny: Any) -> None:
    model = tiny("llama", tied=True)
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    assert "output_layer.weight" not in megatron_names(weight_map, range(3), True, True)
    last = weight_map.rule_for("output_layer.weight")
    first = weight_map.rule_for("embedding.word_embeddings.weight")
    for a, b in zip(_shards(last, model.tensors, 4), _shards(first, model.tensors, 4), strict=True):
        assert torch.equal(a, b)
    assert hf_from_shards(last, _shards(last, model.tensors, 4)) == []


def test_a_critic_has_no_output_layer_and_a_reward_model_has_a_score_head(tiny: Any) -> None:
    model = tiny("llama")
    architecture = architecture_for(model.hf_config)
    critic = architecture.weight_map(model.hf_config).without_output()
    assert "output_layer.weight" not in megatron_names(critic, range(3), True, True)
    assert "lm_head.weight" not in critic.hf_names()
    reward_config = model.hf_config | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
    head = architecture_for(reward_config).weight_map(reward_config).rule_for("output_layer.weight")
    assert (head.hf_names, head.tp_axis, head.shape(4)) == (("score.weight",), None, (1, 32))
    with pytest.raises(ModelError, match="id2label has 2 labels"):
        architecture.weight_map(reward_config | {"id2label": {"0": "a", "1": "b"}})


class Recording:
    """A tensor that notes how many elements were read of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.elements_read = tensor, 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        self.elements_read += self.tensor[index].numel()
        return self.tensor[index]


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_rank_reads_no_more_than_its_shard(tiny: Any, tp_size: int) -> None:
    model = tiny("qwen2")
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    for rule in weight_map.bound_rules():
        for rank in range(tp_size):
            sources = {name: Recording(model.tensors[name]) for name in rule.hf_names}
            shard = shard_from_hf(rule, sources.__getitem__, rank, tp_size, PADDED_VOCAB)
            pieces = rule.pieces(rank, tp_size, PADDED_VOCAB)
            padding = sum(piece.stop - piece.start for piece in pieces if piece.hf_name is None)
            one_row = 32 if padding == shard.shape[0] else 0  # nothing but padding: a row is read for its dtype
            assert sum(source.elements_read for source in sources.values()) == shard.numel() - padding * 32 + one_row


@given(data=st.data(), dim=st.integers(1, 5), per_group=st.integers(1, 6), groups=st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_the_ranks_of_any_grouping_cover_q_k_and_v_exactly_once(data: Any, dim: int, per_group: int, groups: int) -> None:
    heads = groups * per_group
    allowed = [tp for tp in range(1, heads + 1) if heads % tp == 0 and (groups % tp == 0 or tp % groups == 0)]
    packing = GroupedQKV(heads, groups, dim, hidden_size=None)
    tp_size = data.draw(st.sampled_from([tp for tp in allowed if (heads + 2 * groups) * dim % tp == 0]))
    _assert_covers_once(BoundRule("qkv", ("q", "k", "v"), packing), tp_size, padded_vocab=None)


@given(tp_size=st.integers(1, 8), share=st.integers(1, 9), missing=st.integers(0, 30))
def test_the_ranks_of_any_vocabulary_and_mlp_cover_them_exactly_once(tp_size: int, share: int, missing: int) -> None:
    padded = tp_size * share
    vocabulary = Vocabulary(max(1, padded - missing), 3)
    _assert_covers_once(BoundRule("embedding", ("embedding",), vocabulary), tp_size, padded)
    _assert_covers_once(BoundRule("fc1", ("gate", "up"), GateUp(padded, 3)), tp_size, None)


def _assert_covers_once(rule: BoundRule, tp_size: int, padded_vocab: int | None) -> None:
    counts = {name: [0] * shape[0] for name, shape in rule.hf_shapes.items()}
    for rank in range(tp_size):
        pieces = rule.pieces(rank, tp_size, padded_vocab)
        assert sum(piece.stop - piece.start for piece in pieces) == rule.shape(tp_size, padded_vocab)[0]
        for piece in pieces:
            for row in range(piece.start, piece.stop) if piece.hf_name else ():
                counts[piece.hf_name][row] += 1
    assert all(count == 1 for rows in counts.values() for count in rows)


def test_what_does_not_fit_is_a_sentence(tiny: Any) -> None:
    model = tiny("llama")
    weight_map = architecture_for(model.hf_config).weight_map(model.hf_config)
    with pytest.raises(
        ModelError, match=r"input_layernorm\.bias' is not in .*did you mean 'decoder\.layers\.0\.input_layernorm\.weight'"
    ):
        weight_map.rule_for("decoder.layers.0.input_layernorm.bias")
    with pytest.raises(ModelError, match="of 3 layers"):
        weight_map.rule_for("decoder.layers.3.input_layernorm.weight")
    qkv = weight_map.rule_for("decoder.layers.0.self_attention.linear_qkv.weight")
    with pytest.raises(LayoutError, match="tp is 3; it must divide num_attention_heads, which is 4"):
        shard_from_hf(qkv, model.tensors.__getitem__, 0, 3)
    with pytest.raises(LayoutError, match="must divide num_key_value_heads=2 or be a multiple"):
        GroupedQKV(6, 2, 4, None).runs(0, 3, None)
    with pytest.raises(LayoutError, match="padded vocabulary, which is 61"):
        shard_from_hf(weight_map.rule_for("output_layer.weight"), model.tensors.__getitem__, 0, 2)
    with pytest.raises(LayoutError, match="padded_vocab is 60"):
        shard_from_hf(weight_map.rule_for("output_layer.weight"), model.tensors.__getitem__, 0, 2, 60)
    wrong = model.tensors | {"model.layers.0.self_attn.k_proj.weight": torch.zeros(23, 32)}
    with pytest.raises(ModelError, match=r"k_proj.weight' has shape \[23, 32\], but .* implies \[24, 32\]"):
        shard_from_hf(qkv, wrong.__getitem__, 0, 1)
    with pytest.raises(
        ModelError, match=r"shard 1 of 2 of 'decoder.layers.0.self_attention.linear_qkv.weight' has shape \[47, 32\]"
    ):
        hf_from_shards(qkv, [torch.zeros(48, 32), torch.zeros(47, 32)])
