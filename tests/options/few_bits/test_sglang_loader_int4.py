"""INT4 experts in the parameters of an SGLang server, by boxes as they are sent."""

from __future__ import annotations

import torch

from megarl.options.few_bits.int4 import packed, quantise_rows
from megarl.weights.checksums import digest
from megarl.weights.rank_plan import SliceKey
from tests.weights.test_sglang_loader import Model, asked, experts, send, slice_of


def test_int4_experts_lie_transposed_as_marlins_kernels_are_given_them() -> None:
    """By compressed_tensors_wNa16_moe.py: `[E, C / 8, R]` and `[E, C / group, R]`, and one float32 shape for gate and up.

    The rank has half of each expert: rows 64 to 127 of gate and up, of the columns of down the same.
    """
    hidden, ffn, group = 64, 128, 32
    shapes = {
        "w13_weight_packed": (2, hidden // 8, ffn),
        "w13_weight_scale": (2, hidden // group, ffn),
        "w13_weight_shape": (2, 2),
    }
    shapes |= {
        "w2_weight_packed": (2, ffn // 16, hidden),
        "w2_weight_scale": (2, ffn // 2 // group, hidden),
        "w2_weight_shape": (2, 2),
    }
    dtypes = {"packed": torch.int32, "scale": torch.bfloat16, "shape": torch.float32}
    model = Model()
    for name, shape in shapes.items():
        values = torch.zeros(shape, dtype=dtypes[name.rpartition("_")[2]])
        model.parameters[f"x.experts.{name}"] = parameter = torch.nn.Parameter(values, requires_grad=False)
        parameter.is_transposed = True  # type: ignore[attr-defined]
    model.experts = {"x.experts": experts()}
    del model.experts["x.experts"].w13_weight
    model.experts["x.experts"].w13_weight_packed = None
    weights = {name: torch.randn(2, *((hidden, ffn) if name == "down_proj" else (ffn, hidden))) for name in
               ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
    sent: list[tuple[SliceKey, str]] = []
    for name, of_experts in weights.items():
        for expert, weight in enumerate(of_experts):
            numbers, scales = quantise_rows(weight, group)
            parts = {"packed": packed(numbers), "scale": scales}
            half = [slice(None), slice(None)]
            for suffix, whole in parts.items():
                half[name == "down_proj"] = slice(whole.shape[name == "down_proj"] // 2, None)
                piece = slice_of(f"x.experts.{expert}.{name}.weight_{suffix}", whole[tuple(half)].contiguous())
                send(model, piece)
                sent.append((piece.held, str(piece.tensor.dtype).removeprefix("torch.")))
            piece = slice_of(f"x.experts.{expert}.{name}.weight_shape", torch.tensor(weight.shape))
            send(model, piece)
            sent.append((piece.held, "int64"))
    for expert in range(2):
        held = {name: model.parameters[f"x.experts.{name}"][expert] for name in shapes}
        halves = [weights[name][expert, ffn // 2 :] for name in ("gate_proj", "up_proj")]
        numbers, scales = quantise_rows(torch.cat(halves), group)
        assert torch.equal(held["w13_weight_packed"], packed(numbers).T)
        assert torch.equal(held["w13_weight_scale"], scales.T)
        numbers, scales = quantise_rows(weights["down_proj"][expert][:, ffn // 2 :], group)
        assert torch.equal(held["w2_weight_packed"], packed(numbers).T)
        assert torch.equal(held["w2_weight_scale"], scales.T)
        assert held["w13_weight_shape"].tolist() == [ffn, hidden]
        assert held["w2_weight_shape"].tolist() == [hidden, ffn]
    assert {dtype for _, dtype in sent} == {"int32", "bfloat16", "int64"}
    by_dtype = {dtype: [held for held, own in sent if own == dtype] for _, dtype in sent}
    wanted = quantise_rows(weights["up_proj"][1, ffn // 2 :], group)[1]
    answers, _ = asked(model, *by_dtype["bfloat16"], dtype="bfloat16")
    assert answers[by_dtype["bfloat16"].index(slice_of("x.experts.1.up_proj.weight_scale", wanted).held)] == digest(wanted)
    assert set(asked(model, *by_dtype["int64"], dtype="int64")[0]) == {digest(torch.tensor(s)) for s in ([128, 64], [64, 128])}
    _, uncovered = asked(model, *by_dtype["int64"], dtype="int64")
    assert [name for name in uncovered if "shape" in name] == []
