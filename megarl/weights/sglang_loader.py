"""Writes what senders have cut for this rank into the model's parameters, and reads it back; runs inside the server.

SGLang calls `load` (given as `--custom-weight-loader`) in each tensor-parallel rank. SGLang fuses q, k, v and gate, up and
the experts of a layer; where in these a tensor lies is said here. What is not cut goes through the model's own loader.
What SGLang derives from a parameter (`DERIVED_FROM`) is made anew as soon as the parameter was written.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from megarl.models.adapters import is_adapter_tensor
from megarl.models.transformers_names import with_prefix
from megarl.option_list import functions, part, parts
from megarl.weights.checksums import digest
from megarl.weights.copying import copy, in_threads
from megarl.weights.cuda_ipc import opened
from megarl.weights.group_ranks import give_up, join, receive
from megarl.weights.intake import Intake
from megarl.weights.intake_ranks import RankIntake
from megarl.weights.payloads import CHECK, INTAKE, JOIN, OPEN, READ, RECEIVE, send_answer
from megarl.weights.rank_plan import SliceKey
from megarl.weights.received import ReceivedDigests
from megarl.weights.sglang_targets import EVERY_RANK

PARTS_OF = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.shared_experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.shared_expert.gate_up_proj": ("gate_proj", "up_proj"),
    "linear_attn.in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "linear_attn.in_proj_ba": ("in_proj_b", "in_proj_a"),
    "merger.gate_up_proj": ("gate_proj", "up_proj"),
    "self_attn.fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""By the end of an engine's fused parameter, the hub's names for what it is fused of, in models that have it."""
FUSED = {
    f"{fused.rpartition('.')[0]}.{part}": (fused, position, len(parts))
    for fused, parts in PARTS_OF.items()
    for position, part in enumerate(parts)
}
"""Hugging Face suffix -> (engine suffix, position in the fused parameter, how many are fused there)."""
OF_TWO_LENGTHS = (".qkv_proj.", ".fused_qkv_a_proj_with_mqa.", ".in_proj_qkvz.")
"""Fused parameters of which the first tensor may be of another length than the others: q beside k and v, which Qwen3.5 has in
one tensor beside the gates."""
DERIVED_FROM = ".self_attn.kv_b_proj."
"""Name of a parameter that latent attention does not compute with itself, but by copies of its halves (`w_kc`, `w_vc`)."""
HUB_PREFIXES = (("model.visual.", "visual."), ("model.language_model.", "model."))
"""Beginnings of names of some vision-language models on the hub, and in engines."""
TOWER = "visual."
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")

EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\."
    r"(?:weight(?P<part>_scale_inv|_packed|_scale|_shape)?|(?P<bias>bias))"
)
# projection of an expert -> (engine suffix, position among the expert's projections in it, how many); w1, w3, w2: Mixtral's
EXPERTS, BIAS = "w13_weight", "_bias"
SUMMED_BIAS = "w2_weight_bias"
"""Bias of the experts' outputs, which the ranks that split an expert add up: the first has it, the others zeros."""
EXPERT_FUSED = {
    "gate_proj": (EXPERTS, 0, 2),
    "w1": (EXPERTS, 0, 2),
    "up_proj": (EXPERTS, 1, 2),
    "w3": (EXPERTS, 1, 2),
    "down_proj": ("w2_weight", 0, 1),
    "w2": ("w2_weight", 0, 1),
}

Whole = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class ModelParameters:
    """A rank's parameters and adapters by name, and of parameters of experts: in which up comes before gate, as some of
    SGLang's kernels want it, and in which rows of both alternate, as gpt-oss has them."""

    tensors: Mapping[str, torch.Tensor]
    up_first: Collection[str] = ()
    alternating: Collection[str] = ()
    of_draft: tuple[str, ...] = ()
    """Beginnings of names that are not this model's, but its draft's."""

    @property
    def device(self) -> torch.device:
        """The device of all of them."""
        return next(iter(self.tensors.values())).device

    @classmethod
    def of(cls, model: Any) -> ModelParameters:
        """The parameters of a model of SGLang's (0.5.23: layers/moe/fused_moe_triton/layer.py says how its experts lie).

        Raises:
            ValueError: its experts are transposed or interleaved for the kernels that were chosen, or the shared experts among
                them.
        """
        up_first, alternating = [], []
        for name, module in model.named_modules():
            if not (hasattr(module, EXPERTS) or hasattr(module, f"{EXPERTS}_packed")):
                continue
            method = getattr(module, "weight_load_method", None) or module.quant_method
            if module.use_triton_kernels or getattr(method, "w13_swiglu_interleaved", False):
                raise ValueError(
                    f"SGLang holds {name} transposed or interleaved; rollout.engine_args.moe_runner_backend must "
                    "not be 'triton_kernel', and SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED must not be set"
                )
            if module.num_fused_shared_experts:
                raise ValueError(
                    f"SGLang holds the shared experts among {name}; rollout.engine_args.disable_shared_experts_fusion must be "
                    "true, and enforce_shared_experts_fusion must not be set"
                )
            if module.use_flashinfer_trtllm_moe or getattr(method, "load_up_proj_weight_first", False):
                up_first += [f"{name}.{EXPERTS}", f"{name}.{EXPERTS}_scale_inv"]
            if hasattr(module, EXPERTS + BIAS) and module.moe_runner_config.gemm1_alpha is not None:
                alternating += [f"{name}.{EXPERTS}", f"{name}.{EXPERTS}{BIAS}"]
        tensors = dict(model.named_parameters())
        for tensors_of in functions("adapter_place", "tensors_of"):
            tensors |= tensors_of(model)
        of_draft = names.of_the_draft(model) if (names := _draft_names()) is not None else ()
        return cls(tensors, frozenset(up_first), frozenset(alternating), of_draft)


def _draft_names() -> ModuleType | None:
    """An option's `draft_weights.py`, which knows the draft that a server has beside the policy."""
    return next(iter(parts("draft_weights")), None)


_kept: dict[str, torch.Tensor] = {}
"""The senders' buffers by name: to map one anew for every load would take as long as reading it."""


def load(model: Any, named_tensors: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Take one payload: pairs of (name of a buffer, where in it what lies) and the buffer; or one of `payloads`' others."""
    parameters = ModelParameters.of(model)
    names = _draft_names()
    if names is not None and names.is_draft(parameters.tensors):
        _load_draft(model, parameters, names)
        return
    changed: set[str] = set()
    for (name, content), buffer in named_tensors:
        if name == CHECK:
            _answer(parameters, *content)
        elif name == INTAKE:
            intake, rank = content
            _wait_for_gpu(parameters.device)  # other threads have other streams
            of_rank = RankIntake(Intake(*intake), rank, parameters.device)
            of_rank.take_all(partial(_take_payload, model, parameters, changed), give_up)
            _wait_for_gpu(parameters.device)
        else:
            _take_payload(model, parameters, changed, [((name, content), buffer)])
    if changed:
        model.post_load_weights(weight_names=changed)
        _received.forget_all()


def _wait_for_gpu(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _take_payload(
    model: Any, parameters: ModelParameters, changed: set[str], named_tensors: Sequence[tuple[Any, torch.Tensor]]
) -> Future[None] | None:
    """Take one payload, of one thread beside others; adds to `changed` what other things are derived from.

    A future is done when what was announced has come.
    """
    later: Future[None] | None = None
    for (name, content), buffer in named_tensors:
        pieces: Sequence[Any] = ()
        if name == JOIN:
            join(parameters.device, *content)
        elif name == READ:
            read = part("transports", "reader", "rollout.weight_transport").read
            pieces = read(partial(_take, model, parameters), parameters.device, *content)
        elif name == RECEIVE:
            later = receive(_Arrivals(model, parameters), parameters.device, *content)
            pieces = list(chain.from_iterable(message for _, message in content[-1]))
        elif name == OPEN:
            shared, pieces = content
            _take(model, parameters, pieces, opened(shared))
        else:
            _kept[name], (pieces, checked) = buffer, content
            _take(model, parameters, pieces, buffer, checked=checked)
        changed |= {tensor for tensor, *_ in pieces if DERIVED_FROM in tensor and not tensor.startswith(parameters.of_draft)}
        if name == OPEN:
            torch.cuda.current_stream().synchronize()  # the sender fills its buffer again as soon as it is answered
    return later


_whole = threading.Lock()
"""Held by who calls the model's own loader."""


def _take(
    model: Any, parameters: ModelParameters, pieces: Sequence[Any], buffer: torch.Tensor, *, checked: bool = False
) -> None:
    """Copy what lies in a buffer to where it belongs. `checked`: its digests will be asked for."""
    _load_whole(model, _read(parameters, pieces, buffer, checked=checked))


def _load_whole(model: Any, whole: Whole) -> None:
    if whole:
        with _whole:
            model.load_weights(whole)
        _received.forget_all()


_received = ReceivedDigests()


@dataclass
class Waiting:
    """Weights that came for the draft, and questions about it, in the call for the policy."""

    boxes: list[tuple[SliceKey, torch.Tensor]] = field(default_factory=list)
    whole: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    asked: list[tuple[int, SliceKey, str]] = field(default_factory=list)
    """Place among all digests, box, and the dtype in which it was sent."""
    answer: tuple[list[str], list[str], tuple[str, int], str] | None = None
    """The digests of the policy's boxes, what is not covered, and where the answer goes."""


_waiting = Waiting()
"""For the call by which SGLang has the draft loaded, which follows."""


def _load_draft(model: Any, parameters: ModelParameters, names: ModuleType) -> None:
    """Give the draft what came for it in the call before, and answer what was asked of it."""
    global _waiting
    waiting, _waiting = _waiting, Waiting()
    for slice_key, values in waiting.boxes:
        box(parameters, slice_key._replace(tensor=names.draft_name(slice_key.tensor))).copy_(values)
    if waiting.whole:
        model.load_weights(waiting.whole)
    if any(DERIVED_FROM in slice_key.tensor for slice_key, _ in waiting.boxes):
        model.post_load_weights(is_nextn=True)
    if waiting.answer is None:
        return
    digests, uncovered, where, key = waiting.answer
    boxes = [
        (tuple(slice_key._replace(tensor=names.draft_name(slice_key.tensor))), dtype) for _, slice_key, dtype in waiting.asked
    ]
    draft_digests, missing = _digests(parameters, boxes)
    for (index, _, _), draft_digest in zip(waiting.asked, draft_digests, strict=True):
        digests[index] = draft_digest
    send_answer(digests, uncovered + [name for name in missing if name not in names.SHARED], where, key)


def _read(
    parameters: ModelParameters, content: Iterable[tuple[Any, ...]], buffer: torch.Tensor, *, checked: bool = False
) -> Whole:
    """Copy what lies in a buffer to where it belongs; gives what is whole. `checked`: its digests will be asked for."""
    whole, boxes = [], []
    for *key_fields, dtype, start, stop in content:
        key = SliceKey(*key_fields)
        values = buffer[start:stop].view(getattr(torch, dtype)).view(key.rows, key.cols)
        if key.tensor.startswith(parameters.of_draft):
            if key.engine_rank == EVERY_RANK:
                _waiting.whole.append((key.tensor, values.clone()))
            else:
                _waiting.boxes.append((key, values.clone()))
        elif key.engine_rank == EVERY_RANK:
            whole.append((key.tensor, values))
        else:
            _received.forget(key)
            boxes.append((key, box(parameters, key), values))
    in_threads(lambda number: _write(*boxes[number], checked=checked), [values for *_, values in boxes])
    return whole


def _write(held: SliceKey, to: torch.Tensor, values: torch.Tensor, *, checked: bool) -> None:
    if to.dtype != values.dtype:
        to.copy_(values)
    elif checked and to.is_contiguous() and not to.is_cuda:
        _received.copy(held, to, values)
    else:
        copy(to, values)


class _Arrivals:
    """Where messages of a call belong, and what they are when they have come."""

    def __init__(self, model: Any, parameters: ModelParameters) -> None:
        self._model, self._parameters = model, parameters
        self._whole: Whole = []

    def place(self, message: Sequence[Any]) -> torch.Tensor | None:
        """Where a message can be received as it comes; None: it must be copied from elsewhere."""
        return _in_place(self._parameters, message)

    def take(self, message: Sequence[Any], values: torch.Tensor, *, in_place: bool, checked: bool) -> None:
        """Take what has come."""
        if not in_place:
            self._whole += _read(self._parameters, message, values, checked=checked)
        elif checked and not values.is_cuda:
            _received.hash(_held(message[0]), values)  # while the next ones come
        else:
            _received.forget(_held(message[0]))

    def end(self) -> None:
        """Everything has come."""
        _load_whole(self._model, self._whole)
        _wait_for_gpu(self._parameters.device)


def _held(piece: tuple[Any, ...]) -> SliceKey:
    *key_fields, _, _, _ = piece
    return SliceKey(*key_fields)


def _in_place(parameters: ModelParameters, message: Any) -> torch.Tensor | None:
    """The place of a message's only piece, if it can be received there as it comes."""
    *_, dtype, _, _ = message[0]
    key = _held(message[0])
    if len(message) > 1 or key.engine_rank == EVERY_RANK or key.tensor.startswith(parameters.of_draft):
        return None
    to = box(parameters, key)
    return to if to.is_contiguous() and to.dtype == getattr(torch, dtype) else None


def engine_name(parameters: ModelParameters, name: str) -> tuple[str, int, int]:
    """(the engine's parameter, position among the tensors that it is fused of, how many these are) of a tensor.

    Experts' parameters have one more axis, the first, of which the tensor is in one entry.
    """
    name = with_prefix(name, HUB_PREFIXES)
    if name.startswith(TOWER):
        name = name.replace(".attn.qkv.", ".attn.qkv_proj.")
    if expert := EXPERT.fullmatch(name):
        suffix, position, count = EXPERT_FUSED[expert["projection"]]
        expert_name = f"{expert['experts']}.{suffix}{expert['part'] or ''}{BIAS if expert['bias'] else ''}"
        # SGLang has one shape for gate and up, which it does not read
        return (expert_name, 0, 1) if expert["part"] == "_shape" else (expert_name, position, count)
    for suffix, (fused, position, count) in FUSED.items():
        if f".{suffix}." in name and (fused_name := name.replace(suffix, fused)) in parameters.tensors:
            return fused_name, position, count
    return name, 0, 1


def region(parameters: ModelParameters, held: SliceKey) -> torch.Tensor:
    """The rows of a parameter in which this rank holds a tensor, as a matrix.

    Raises:
        ValueError: the parameter has no place for a tensor of so many rows and columns.
    """
    name, position, count = engine_name(parameters, held.tensor)
    parameter = parameters.tensors[name].data
    if expert := EXPERT.fullmatch(held.tensor):
        parameter = parameter[int(expert["expert"]) % len(parameter)]
        if parameter.ndim == 2 and getattr(parameters.tensors[name], "is_transposed", False):  # INT4
            parameter = parameter.T
        position = count - 1 - position if name in parameters.up_first else position
    matrix = parameter.unsqueeze(1) if parameter.ndim == 1 else parameter.flatten(1)
    if name in parameters.alternating:
        matrix, position, count = matrix[position::count], 0, 1
    first = 0 if position == 0 else len(matrix) - (count - position) * held.of_rows
    of_one_length = count * held.of_rows == len(matrix)
    if name.startswith(TOWER) and not of_one_length:  # padded at the end of each of its parts
        first, of_one_length = len(matrix) // count * position, count * held.of_rows < len(matrix)
    is_full = of_one_length or name.endswith(VOCABULARY) or any(fused in name for fused in OF_TWO_LENGTHS)
    if not (is_full and 0 <= first <= len(matrix) - held.of_rows and held.col + held.cols <= matrix.shape[1]):
        raise ValueError(f"{held} has {held.of_rows} rows here, which have no place in {name} {list(parameter.shape)}")
    return matrix[first : first + held.of_rows]


def box(parameters: ModelParameters, held: SliceKey) -> torch.Tensor:
    """The elements of a parameter that `held` names, as a matrix; raises ValueError as `region`."""
    return region(parameters, held)[held.row : held.row + held.rows, held.col : held.col + held.cols]


def _covers(name: str, parameter: torch.Tensor, filled: Sequence[torch.Tensor]) -> bool:
    """Return whether these parts, views that do not overlap, are all of a parameter, but for padding."""
    count = sum(values.numel() for values in filled)
    if count == parameter.numel() or name.endswith(VOCABULARY):
        return True
    if name.endswith(SUMMED_BIAS) and not count:
        return not parameter.any()
    if name.endswith(f"{EXPERTS}_shape"):  # which gate and up both fill
        return count == 2 * parameter.numel()
    if not is_adapter_tensor(name) and (not name.startswith(TOWER) or not count):
        return False
    # SGLang pads feed-forward widths of towers with zeros, which an engine computes with, and has room for more adapters
    return int(parameter.count_nonzero()) == sum(int(values.count_nonzero()) for values in filled)


def _as_sent(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo SGLang's wider dtype, so that digests match what was sent, as it does the router of GLM-4.5; others as they are."""
    if values.dtype == dtype:
        return values
    narrow = values.to(dtype)
    return narrow if torch.equal(narrow.to(values.dtype), values) else values


def _answer(
    parameters: ModelParameters, boxes: Iterable[tuple[tuple[Any, ...], str]], where: tuple[str, int], key: str
) -> None:
    """Answer for the policy; where boxes of the draft are asked for, too, it answers for both."""
    boxes = list(boxes)
    of_draft = [key_fields[0].startswith(parameters.of_draft) for key_fields, _ in boxes]
    digests, uncovered = _digests(
        parameters, [entry for entry, others in zip(boxes, of_draft, strict=True) if not others], _received
    )
    if not any(of_draft):
        send_answer(digests, uncovered, where, key)
        return
    rest = iter(digests)
    _waiting.answer = ["" if others else next(rest) for others in of_draft], uncovered, where, key
    drafts = enumerate(zip(boxes, of_draft, strict=True))
    _waiting.asked = [(number, SliceKey(*key_fields), dtype) for number, ((key_fields, dtype), others) in drafts if others]


def _digests(
    parameters: ModelParameters, boxes: Iterable[tuple[tuple[Any, ...], str]], received: ReceivedDigests | None = None
) -> tuple[list[str], list[str]]:
    """The digests of boxes, and the parameters that they do not cover; boxes of adapters alone need cover no weights.

    Some are known of those that were `received`; the others are read.
    """
    boxes, tensors = list(boxes), parameters.tensors
    weights_too = not all(is_adapter_tensor(place[0]) for place, _ in boxes)
    filled: dict[str, list[torch.Tensor]] = {name: [] for name in tensors if weights_too or is_adapter_tensor(name)}
    keys = [SliceKey(*place) for place, _ in boxes]
    came = received.boxes() if received is not None else {}
    read = [came[key] if key in came else box(parameters, key) for key in keys]
    for key, values in zip(keys, read, strict=True):
        filled[engine_name(parameters, key.tensor)[0]].append(values)
    taken = received.take(list(zip(keys, read, strict=True))) if received is not None else {}
    digests = [taken.get(key, "") for key in keys]
    left = [number for number, known in enumerate(digests) if not known]

    def take(place: int) -> None:
        number = left[place]
        digests[number] = digest(_as_sent(read[number], getattr(torch, boxes[number][1])))

    in_threads(take, [read[number] for number in left])
    return digests, [name for name, values in filled.items() if not _covers(name, tensors[name].data, values)]
