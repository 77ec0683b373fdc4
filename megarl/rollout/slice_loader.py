"""Writes what senders have cut for this rank into the model's parameters, and reads it back; runs inside the server.

SGLang calls `load` (given as `--custom-weight-loader`) in each tensor-parallel rank. SGLang fuses q, k, v and gate, up and
the experts of a layer; where in these a tensor lies is said here. What is not cut goes through the model's own loader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megarl.reshard.pieces import Held
from megarl.reshard.targets import EVERY_RANK
from megarl.rollout.checksums import digest

# HF suffix -> (engine suffix, position in the fused parameter)
FUSED = {
    "self_attn.q_proj": ("self_attn.qkv_proj", 0),
    "self_attn.k_proj": ("self_attn.qkv_proj", 1),
    "self_attn.v_proj": ("self_attn.qkv_proj", 2),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}
PARTS = {"self_attn.qkv_proj": 3, "mlp.gate_up_proj": 2}
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")

EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight(?P<scale>_scale_inv)?")
# projection of an expert -> (engine suffix, position among the expert's projections in it, how many); w1, w3, w2: Mixtral's
EXPERT_FUSED = {
    "gate_proj": ("w13_weight", 0, 2),
    "w1": ("w13_weight", 0, 2),
    "up_proj": ("w13_weight", 1, 2),
    "w3": ("w13_weight", 1, 2),
    "down_proj": ("w2_weight", 0, 1),
    "w2": ("w2_weight", 0, 1),
}

_kept: dict[str, torch.Tensor] = {}
"""The senders' buffers by name: to map one anew for every load would take as long as reading it."""


def load(model: Any, named_tensors: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Take one payload: pairs of (name of a buffer, where in it what lies) and the buffer; or `checking(...)`."""
    parameters = dict(model.named_parameters())
    for (name, content), buffer in named_tensors:
        if name == CHECK:
            _answer(parameters, *content)
            continue
        if not buffer.is_cuda:
            _kept[name] = buffer
        whole = []
        for *place, dtype, start, stop in content:
            held = Held(*place)
            values = buffer[start:stop].view(getattr(torch, dtype))
            if held.engine_rank == EVERY_RANK:
                whole.append((held.tensor, values.view(held.rows, held.cols)))
                continue
            slice_ = region(parameters, held)
            slice_[held.row : held.row + held.rows, held.col : held.col + held.cols].copy_(values.view(held.rows, held.cols))
        if whole:
            model.load_weights(whole)


def engine_name(name: str) -> tuple[str, int, int]:
    """(the engine's parameter, position among the tensors that it is fused of, how many these are) of a tensor.

    Experts' parameters have one more axis, the first, of which the tensor is in one entry.
    """
    if expert := EXPERT.fullmatch(name):
        suffix, position, count = EXPERT_FUSED[expert["projection"]]
        return f"{expert['experts']}.{suffix}{expert['scale'] or ''}", position, count
    for suffix, (fused, position) in FUSED.items():
        if f".{suffix}." in name:
            return name.replace(suffix, fused), position, PARTS[fused]
    return name, 0, 1


def region(parameters: Mapping[str, torch.Tensor], held: Held) -> torch.Tensor:
    """The rows of a parameter in which this rank holds a tensor, as a matrix.

    Raises:
        ValueError: the parameter has no place for a tensor of so many rows and columns.
    """
    name, position, count = engine_name(held.tensor)
    parameter = parameters[name].data
    if expert := EXPERT.fullmatch(held.tensor):
        parameter = parameter[int(expert["expert"]) % len(parameter)]
    matrix = parameter.unsqueeze(1) if parameter.ndim == 1 else parameter
    # of the tensors that are fused only the first may be of another length than the others (q beside k and v)
    first = 0 if position == 0 else len(matrix) - (count - position) * held.of_rows
    is_full = count > 1 or name.endswith(VOCABULARY) or held.of_rows == len(matrix)
    if not (is_full and 0 <= first <= len(matrix) - held.of_rows and held.col + held.cols <= matrix.shape[1]):
        raise ValueError(f"{held} has {held.of_rows} rows here, which have no place in {name} {list(parameter.shape)}")
    return matrix[first : first + held.of_rows]


CHECK = "check"
NAMED, ROOM = 32, 2**14
"""How many parameters that are not covered are named, and bytes for their names."""


def checking(boxes: Iterable[Held], answer: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
    """The content of a payload that asks a rank for the digests of `boxes`; `answer` is shared memory for `read_answer`."""
    return [((CHECK, ([tuple(box) for box in boxes], answer)), answer)]


def answer_bytes(boxes: int) -> int:
    """How much memory an answer needs."""
    return ROOM + 40 * boxes


def read_answer(answer: torch.Tensor) -> tuple[list[str], list[str]]:
    """What a rank has written: the digests, and the parameters that the boxes do not cover."""
    digests, uncovered = json.loads(bytes(answer.numpy()).rstrip(b"\0"))
    return digests, uncovered


def _answer(parameters: Mapping[str, torch.Tensor], boxes: Iterable[tuple[Any, ...]], answer: torch.Tensor) -> None:
    digests, elements = [], dict.fromkeys(parameters, 0)
    for box in boxes:
        held = Held(*box)
        rows = region(parameters, held)[held.row : held.row + held.rows]
        digests.append(digest(rows[:, held.col : held.col + held.cols]))
        elements[engine_name(held.tensor)[0]] += held.rows * held.cols
    uncovered = [
        name for name, count in elements.items() if count != parameters[name].numel() and not name.endswith(VOCABULARY)
    ]
    text = json.dumps([digests, uncovered[:NAMED]]).encode()
    answer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
