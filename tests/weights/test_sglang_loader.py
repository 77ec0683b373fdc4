"""Boxes land where SGLang's fused parameters hold them, are read back from there, and what does not fit is refused."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megarl.option_list import OPTIONS
from megarl.weights import sglang_loader
from megarl.weights.checksums import digest, digests
from megarl.weights.digests import combined
from megarl.weights.payloads import checking, read_answer, summing
from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.weights.received import ReceivedBoxes
from megarl.weights.sglang_loader import load
from megarl.weights.staging import Staging, serialize


class Model:
    """A rank's parameters as SGLang names them, and what its own loader was given."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.parameters = {
            name.replace("__", "."): torch.nn.Parameter(torch.full(shape, -1.0)) for name, shape in shapes.items()
        }
        self.loaded: list[tuple[str, Tensor]] = []
        self.derived: list[dict[str, Tensor]] = []
        self.experts: dict[str, Any] = {}
        self.config = SimpleNamespace(num_hidden_layers=2)

    def named_modules(self) -> Any:
        """As torch.nn.Module's."""
        return self.experts.items()

    def named_parameters(self) -> Any:
        """As torch.nn.Module's."""
        return self.parameters.items()

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        """What is not cut comes here."""
        self.loaded += [(name, weight.clone()) for name, weight in weights]

    def post_load_weights(self, weight_names: Iterable[str] = (), is_nextn: bool = False) -> None:
        """As DeepSeek's: takes copies of the named parameters; of a draft, of the one of its only layer."""
        names = ["model.decoder.self_attn.kv_b_proj.weight"] if is_nextn else weight_names
        self.derived.append({name: self.parameters[name].detach().clone() for name in names})


def send(model: Model, *pieces: WeightSlice, rank: int = 0, checked: bool = False) -> None:
    """One load, as its payload for `rank` holds it; `checked`: its digests will be asked for."""
    staged = Staging(1).stage(pieces)
    staged.checked = checked
    load(
        model,
        pickle.loads(base64.b64decode(staged.payloads(1 + max(rank, *(piece.held.engine_rank for piece in pieces)))[rank])),
    )


def slice_of(name: str, tensor: Tensor, rank: int = 0) -> WeightSlice:
    """All that a rank holds of a tensor."""
    return WeightSlice(SliceKey.whole(name.replace("__", "."), tensor)._replace(engine_rank=rank), tensor)


def test_parts_of_a_fused_parameter_lie_one_after_the_other() -> None:
    model = Model(x__self_attn__qkv_proj__weight=(8, 3), x__mlp__gate_up_proj__weight=(6, 3), x__self_attn__qkv_proj__bias=(8,))
    q, k, v, gate, up = torch.randn(4, 3), torch.randn(2, 3), torch.randn(2, 3), torch.randn(3, 3), torch.randn(3, 3)
    bias = k[:, 0].contiguous()
    send(
        model,
        slice_of("x.self_attn.v_proj.weight", v),
        slice_of("x.mlp.up_proj.weight", up),
        slice_of("x.self_attn.k_proj.bias", bias),
    )
    first = [("x.self_attn.k_proj.weight", k), ("x.mlp.gate_proj.weight", gate), ("x.self_attn.q_proj.weight", q)]
    send(model, *(slice_of(name, tensor) for name, tensor in first))
    assert torch.equal(model.parameters["x.self_attn.qkv_proj.weight"], torch.cat([q, k, v]))
    assert torch.equal(model.parameters["x.mlp.gate_up_proj.weight"], torch.cat([gate, up]))
    assert torch.equal(model.parameters["x.self_attn.qkv_proj.bias"][4:6], bias)


def test_the_down_projections_of_latent_attention_are_fused_where_the_model_fuses_them() -> None:
    """Without `q_lora_rank` there is one less, and nothing is fused; the queries are then a parameter of their own."""
    q_a, kv_a, scale = torch.randn(5, 3), torch.randn(2, 3), torch.randn(1, 3)
    fused = Model(
        x__self_attn__fused_qkv_a_proj_with_mqa__weight=(7, 3), x__self_attn__fused_qkv_a_proj_with_mqa__weight_scale_inv=(4, 3)
    )
    send(fused, slice_of("x.self_attn.kv_a_proj_with_mqa.weight", kv_a), slice_of("x.self_attn.q_a_proj.weight", q_a))
    send(fused, slice_of("x.self_attn.kv_a_proj_with_mqa.weight_scale_inv", scale))
    assert torch.equal(fused.parameters["x.self_attn.fused_qkv_a_proj_with_mqa.weight"], torch.cat([q_a, kv_a]))
    assert torch.equal(fused.parameters["x.self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv"][3:], scale)
    apart = Model(x__self_attn__q_proj__weight=(5, 3), x__self_attn__kv_a_proj_with_mqa__weight=(2, 3))
    send(apart, slice_of("x.self_attn.kv_a_proj_with_mqa.weight", kv_a), slice_of("x.self_attn.q_proj.weight", q_a))
    assert torch.equal(apart.parameters["x.self_attn.q_proj.weight"], q_a)
    assert torch.equal(apart.parameters["x.self_attn.kv_a_proj_with_mqa.weight"], kv_a)


def test_what_is_derived_from_a_parameter_is_derived_from_the_values_just_written() -> None:
    model = Model(
        x__self_attn__kv_b_proj__weight=(4, 3), y__self_attn__kv_b_proj__weight=(4, 3), x__self_attn__o_proj__weight=(3, 3)
    )
    kv_b = torch.randn(4, 3)
    send(model, slice_of("x.self_attn.o_proj.weight", torch.randn(3, 3)))
    assert model.derived == []
    send(model, slice_of("x.self_attn.kv_b_proj.weight", kv_b))
    ((name, derived),) = model.derived[0].items()
    assert name == "x.self_attn.kv_b_proj.weight"
    assert torch.equal(derived, kv_b)


def test_boxes_of_a_slice_come_in_any_order_and_only_their_own_rank_takes_them() -> None:
    model = Model(x__self_attn__qkv_proj__weight=(8, 6), x__mlp__down_proj__weight=(4, 6))
    k, down = torch.randn(2, 6), torch.randn(4, 6)
    for row, col in ((1, 0), (0, 3), (0, 0), (1, 3)):
        send(model, WeightSlice(SliceKey("x.self_attn.k_proj.weight", 0, 2, row, col, 1, 3), k[row : row + 1, col : col + 3]))
    for col in (2, 0, 4):
        ours = WeightSlice(SliceKey("x.mlp.down_proj.weight", 0, 4, 0, col, 4, 2), down[:, col : col + 2])
        send(model, ours, WeightSlice(ours.held._replace(engine_rank=1), torch.zeros(4, 2)))
    assert torch.equal(model.parameters["x.self_attn.qkv_proj.weight"][4:6], k)
    assert torch.equal(model.parameters["x.mlp.down_proj.weight"], down)


def test_an_experts_boxes_lie_in_its_own_entry_of_the_layers_parameters() -> None:
    """The rank has experts 4 to 7 of a layer; gate comes before up."""
    model = Model(x__experts__w13_weight=(4, 6, 5), x__experts__w2_weight=(4, 5, 3))
    gate, up, down = torch.randn(4, 3, 5), torch.randn(4, 3, 5), torch.randn(4, 5, 3)
    for expert in range(4):
        names = {"w1": gate, "w3": up, "w2": down} if expert % 2 else {"gate_proj": gate, "up_proj": up, "down_proj": down}
        for name, tensors in names.items():
            send(model, slice_of(f"x.experts.{4 + expert}.{name}.weight", tensors[expert]))
    assert torch.equal(model.parameters["x.experts.w13_weight"], torch.cat([gate, up], dim=1))
    assert torch.equal(model.parameters["x.experts.w2_weight"], down)


def experts(**chosen: Any) -> Any:
    """A layer's experts as SGLang's FusedMoE, with what it says of the kernels that were chosen."""
    method = SimpleNamespace(load_up_proj_weight_first=chosen.pop("up_first", False), w13_swiglu_interleaved=False)
    flags = {"use_triton_kernels": False, "use_flashinfer_trtllm_moe": False, "num_fused_shared_experts": 0}
    return SimpleNamespace(w13_weight=None, quant_method=method, **flags | chosen)


@pytest.mark.parametrize("chosen", [{"up_first": True}, {"use_flashinfer_trtllm_moe": True}])
def test_where_the_chosen_kernels_want_up_before_gate_it_lies_there(chosen: dict[str, bool]) -> None:
    model = Model(
        x__experts__w13_weight=(2, 6, 5), x__experts__w13_weight_scale_inv=(2, 2, 1), y__experts__w13_weight=(2, 6, 5)
    )
    model.experts = {"x.experts": experts(**chosen), "y.experts": experts()}
    gate, up, scales = torch.randn(2, 3, 5), torch.randn(2, 3, 5), torch.randn(2, 2)
    for expert in range(2):
        for layer in "xy":
            send(
                model,
                slice_of(f"{layer}.experts.{expert}.gate_proj.weight", gate[expert]),
                slice_of(f"{layer}.experts.{expert}.up_proj.weight", up[expert]),
            )
        for place, name in enumerate(("gate_proj", "up_proj")):
            scale = scales[expert, place].reshape(1, 1)
            send(model, slice_of(f"x.experts.{expert}.{name}.weight_scale_inv", scale))
    assert torch.equal(model.parameters["x.experts.w13_weight"], torch.cat([up, gate], dim=1))
    assert torch.equal(model.parameters["y.experts.w13_weight"], torch.cat([gate, up], dim=1))
    assert torch.equal(model.parameters["x.experts.w13_weight_scale_inv"][:, :, 0], scales.flip(1))
    box = slice_of("x.experts.1.up_proj.weight", up[1])
    assert asked(model, box.held)[0] == [digest(up[1])]


def test_experts_that_lie_otherwise_are_refused() -> None:
    model = Model(x__experts__w13_weight=(2, 8, 5))
    model.experts = {"x.experts": experts()}
    with pytest.raises(ValueError, match=r"3 rows here, which have no place in x\.experts\.w13_weight"):  # padded to 4
        send(model, slice_of("x.experts.0.gate_proj.weight", torch.randn(3, 5)))
    model.experts = {"x.experts": experts(use_triton_kernels=True)}
    with pytest.raises(ValueError, match=r"moe_runner_backend must not be 'triton_kernel'"):
        send(model, slice_of("x.experts.0.gate_proj.weight", torch.randn(4, 5)))
    model.experts = {"x.experts": experts(num_fused_shared_experts=1)}
    with pytest.raises(ValueError, match=r"shared experts among x\.experts; .*disable_shared_experts_fusion must be true"):
        send(model, slice_of("x.experts.0.gate_proj.weight", torch.randn(4, 5)))


def test_what_is_not_cut_goes_through_the_models_own_loader() -> None:
    model = Model()
    expert = torch.randn(4, 2)
    send(model, WeightSlice(SliceKey.whole("x.experts.3.w1.weight", expert), expert))
    ((name, loaded),) = model.loaded
    assert name == "x.experts.3.w1.weight"
    assert torch.equal(loaded, expert)


@pytest.mark.parametrize(("rows", "of_rows"), [(3, 3), (9, 9)])
def test_rows_that_have_no_place_are_refused(rows: int, of_rows: int) -> None:
    model = Model(
        x__norm__weight=(8,), x__self_attn__qkv_proj__weight=(8, 3), x__mlp__shared_experts__gate_up_proj__weight=(8, 3)
    )
    with pytest.raises(ValueError, match=r"no place in x\.norm\.weight"):
        send(model, slice_of("x.norm.weight", torch.randn(rows)))
    with pytest.raises(ValueError, match=r"no place in x\.self_attn\.qkv_proj\.weight"):
        send(model, slice_of("x.self_attn.k_proj.weight", torch.randn(of_rows, 4)))
    with pytest.raises(ValueError, match=r"no place in x\.mlp\.shared_experts\.gate_up_proj\.weight"):  # every rank has all
        send(model, slice_of("x.mlp.shared_experts.up_proj.weight", torch.randn(rows, 3)))


def asked(model: Model, *boxes: SliceKey, dtype: str = "float32") -> tuple[list[str], list[str]]:
    """What a rank answers when it is asked for digests of what was sent in a dtype."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    question = checking([(box, dtype) for box in boxes], ("127.0.0.1", store.port), "rank 0")
    load(model, pickle.loads(base64.b64decode(serialize(question))))
    return read_answer(store.get("rank 0"))


def test_digests_of_whole_rows_are_taken_as_they_are_copied_unless_something_else_writes_after() -> None:
    model = Model(x__self_attn__qkv_proj__weight=(8, 6), x__norm__weight=(4,), x__o_proj__weight=(3, 6))
    q, k, norm = torch.randn(4, 6), torch.randn(2, 6), torch.randn(4)
    half = WeightSlice(SliceKey("x.o_proj.weight", 0, 3, 0, 3, 3, 3), torch.randn(3, 3))  # columns
    wide = slice_of("x.self_attn.v_proj.weight", torch.randn(2, 6).bfloat16())
    named = (("self_attn.q_proj", q), ("self_attn.k_proj", k), ("norm", norm))
    rows = [slice_of(f"x.{name}.weight", values) for name, values in named]
    pieces = [*rows, half, wide]

    def found(**given: bool) -> tuple[list[str], int]:
        send(model, *pieces, **given)
        with mock.patch.object(sglang_loader, "digests", side_effect=digests) as read:
            return asked(model, *(piece.held for piece in pieces))[0], read.call_count

    wanted = [digest(values) for values in (q, k, norm, half.tensor, wide.tensor.float())]
    assert found(checked=True) == (wanted, 2)  # columns, and what the engine holds in another dtype, are read
    assert found() == (wanted, 5)
    send(model, *pieces, checked=True)
    send(model, slice_of("x.self_attn.k_proj.weight", -k))  # again, without a digest
    assert asked(model, *(piece.held for piece in pieces))[0] == [wanted[0], digest(-k), *wanted[2:]]
    send(model, *pieces, checked=True)
    send(model, WeightSlice(SliceKey.whole("x.other.weight", k), k))  # by the model's own loader, which may write anywhere
    with torch.no_grad():
        model.parameters["x.norm.weight"] += 1
    assert asked(model, *(piece.held for piece in pieces))[0][2] == digest(norm + 1)


def test_digests_are_of_what_the_parameters_hold_now_and_what_no_box_covers_is_named() -> None:
    model = Model(x__self_attn__qkv_proj__weight=(8, 6), x__norm__weight=(4,), model__embed_tokens__weight=(5, 2))
    k, half = torch.randn(2, 6), torch.randn(2, 3)
    send(model, slice_of("x.self_attn.k_proj.weight", k), slice_of("x.norm.weight", torch.randn(4)))
    boxes = [slice_of("x.self_attn.k_proj.weight", k).held, SliceKey("x.self_attn.q_proj.weight", 0, 4, 2, 3, 2, 3)]
    answered, uncovered = asked(model, *boxes)
    assert answered == [digest(k), digest(torch.full((2, 3), -1.0))]
    # of the embedding the rows behind the last are padding, which nobody sends
    assert uncovered == ["x.self_attn.qkv_proj.weight", "x.norm.weight"]
    with torch.no_grad():
        model.parameters["x.self_attn.qkv_proj.weight"][4, 0] += 1
        model.parameters["x.self_attn.qkv_proj.weight"][2:4, 3:] = half
    assert asked(model, *boxes)[0] == [digest(k + torch.eye(2, 6) * torch.tensor([[1.0], [0.0]])), digest(half)]


def test_what_is_held_in_a_wider_dtype_has_the_digest_of_what_was_sent_unless_it_differs() -> None:
    """As SGLang holds the router of GLM-4.5 in float32 beside weights in bfloat16."""
    model = Model(x__mlp__gate__weight=(4, 6))
    router = torch.randn(4, 6).bfloat16()
    piece = slice_of("x.mlp.gate.weight", router)
    send(model, piece)
    assert asked(model, piece.held, dtype="bfloat16")[0] == [digest(router)]
    with torch.no_grad():
        model.parameters["x.mlp.gate.weight"][3, 5] += 1e-4  # less than bfloat16 tells apart
    assert asked(model, piece.held, dtype="bfloat16")[0] != [digest(router)]


POLICY = {"model__layers__1__self_attn__qkv_proj__weight": (8, 6), "model__norm__weight": (4,)}
DRAFT = {
    "model__eh_proj__weight": (3, 6),
    "model__shared_head__norm__weight": (3,),
    "model__decoder__self_attn__qkv_proj__weight": (8, 6),
    "model__decoder__self_attn__kv_b_proj__weight": (4, 2),
    "model__decoder__mlp__experts__w2_weight": (2, 4, 2),
    "model__embed_tokens__weight": (5, 2),
    "lm_head__weight": (5, 2),
}


@pytest.mark.skipif("prediction" not in OPTIONS, reason="names of drafts are the option prediction's")
@mock.patch.object(sglang_loader, "_boxes", ReceivedBoxes())
def test_a_layer_behind_the_decoder_goes_to_the_draft_and_is_answered_for_by_it() -> None:
    """SGLang calls the loader for both models with each payload, for the policy first."""
    policy, draft = Model(**POLICY), Model(**DRAFT)
    layer = "model.layers.2."
    sent = {
        "model.layers.1.self_attn.q_proj.weight": torch.randn(4, 6),
        f"{layer}eh_proj.weight": torch.randn(3, 6),
        f"{layer}shared_head.norm.weight": torch.randn(3),
        f"{layer}self_attn.k_proj.weight": torch.randn(2, 6),
        f"{layer}self_attn.kv_b_proj.weight": torch.randn(4, 2),
        f"{layer}mlp.experts.1.down_proj.weight": torch.randn(4, 2),
    }
    pieces = [slice_of(name, tensor) for name, tensor in sent.items()]
    router = WeightSlice(SliceKey.whole(f"{layer}mlp.gate.weight", torch.ones(2, 3))._replace(engine_rank=-1), torch.ones(2, 3))
    for model in (policy, draft):
        send(model, *pieces, router)
    assert torch.equal(policy.parameters["model.layers.1.self_attn.qkv_proj.weight"][:4], pieces[0].tensor)
    assert policy.loaded == policy.derived == []
    values = draft.parameters
    assert torch.equal(values["model.eh_proj.weight"], sent[f"{layer}eh_proj.weight"])
    assert torch.equal(values["model.shared_head.norm.weight"], sent[f"{layer}shared_head.norm.weight"])
    assert torch.equal(values["model.decoder.self_attn.qkv_proj.weight"][4:6], sent[f"{layer}self_attn.k_proj.weight"])
    assert torch.equal(values["model.decoder.mlp.experts.w2_weight"][1], sent[f"{layer}mlp.experts.1.down_proj.weight"])
    assert [name for name, _ in draft.loaded] == [f"{layer}mlp.gate.weight"]
    [derived] = draft.derived
    assert torch.equal(derived["model.decoder.self_attn.kv_b_proj.weight"], sent[f"{layer}self_attn.kv_b_proj.weight"])

    with torch.no_grad():
        values["model.eh_proj.weight"][0, 0] += 1
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    question = checking([(piece.held, "float32") for piece in pieces], ("127.0.0.1", store.port), "both")
    for model in (policy, draft):
        assert not store.check(["both"])
        load(model, pickle.loads(base64.b64decode(serialize(question))))
    answered, uncovered = read_answer(store.get("both"))
    same = [held == digest(tensor) for held, tensor in zip(answered, sent.values(), strict=True)]
    assert same == [True, False, True, True, True, True]
    assert uncovered == [
        "model.layers.1.self_attn.qkv_proj.weight",
        "model.norm.weight",
        "model.decoder.self_attn.qkv_proj.weight",
        "model.decoder.mlp.experts.w2_weight",
    ]
    question = summing(("127.0.0.1", store.port), "sums", since_base=False)
    for model in (policy, draft):
        load(model, pickle.loads(base64.b64decode(serialize(question))))
    held = {piece.held: checksum for piece, checksum in zip(pieces, answered, strict=True)}
    assert read_answer(store.get("sums")) == ([*combined(held.items())], uncovered)

    send(draft, *pieces)  # nothing waits for it
    assert values["model.eh_proj.weight"][0, 0] == sent[f"{layer}eh_proj.weight"][0, 0] + 1


def test_a_tensor_of_the_decoder_that_is_not_there_is_still_an_error() -> None:
    with pytest.raises(KeyError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        send(Model(**POLICY), slice_of("model.layers.1.mlp.down_proj.weight", torch.ones(2, 2)))
