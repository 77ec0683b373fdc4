"""Writes what senders have cut for this rank into the model's parameters, and reads it back; runs inside the server.

SGLang calls `load` (given as `--custom-weight-loader`) in each tensor-parallel rank. Where a tensor lies is said in
`sglang_places.py`. What is not cut goes through the model's own loader.
What SGLang derives from a parameter (`DERIVED_FROM`) is made anew as soon as the parameter was written.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed

from megarl.models.adapters import is_adapter_tensor
from megarl.option_list import part
from megarl.weights.checksums import digests
from megarl.weights.copying import copy, in_threads
from megarl.weights.cuda_ipc import opened
from megarl.weights.digests import combined
from megarl.weights.intake import Intake
from megarl.weights.intake_ranks import RankIntake
from megarl.weights.payloads import CHECK, INTAKE, JOIN, OPEN, READ, RECEIVE, SUM, send_answer
from megarl.weights.rank_plan import SliceKey
from megarl.weights.received import ReceivedBoxes, ReceivedDigests, Whole
from megarl.weights.sglang_places import (
    DERIVED_FROM,
    EXPERTS,
    SUMMED_BIAS,
    TOWER,
    VOCABULARY,
    ModelParameters,
    box,
    draft_names,
    engine_name,
)
from megarl.weights.sglang_targets import EVERY_RANK

_kept: dict[str, torch.Tensor] = {}
"""The senders' buffers by name: to map one anew for every load would take as long as reading it."""


def load(model: Any, named_tensors: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Take one payload: pairs of (name of a buffer, where in it what lies) and the buffer; or one of `payloads`' others."""
    parameters = ModelParameters.of(model)
    names = draft_names()
    if names is not None and names.is_draft(parameters.tensors):
        names.load_draft(model, parameters, partial(_digests, parameters))
        return
    changed: set[str] = set()
    for (name, content), buffer in named_tensors:
        if name == CHECK:
            _answer(parameters, *content)
        elif name == SUM:
            since_base, *answered_at = content
            _answer(parameters, _boxes.take(since_base=since_base), *answered_at, summed=True)
        elif name == INTAKE:
            intake, rank = content
            _wait_for_gpu(parameters.device)  # other threads have other streams
            of_rank = RankIntake(Intake(*intake), rank, parameters.device)
            of_rank.take_all(partial(_take_payload, model, parameters, changed), _give_up)
            _wait_for_gpu(parameters.device)
        else:
            _take_payload(model, parameters, changed, [((name, content), buffer)])
    if changed:
        model.post_load_weights(weight_names=changed)
        _received.forget_all()


def _give_up() -> None:
    """Have nothing wait for further senders of a process group, if this rank has been in one."""
    if (groups := sys.modules.get("megarl.weights.group_ranks")) is not None:
        groups.give_up()


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
            from megarl.weights.group_ranks import join

            join(parameters.device, *content)
        elif name == READ:
            read = part("transports", "reader", "rollout.weight_transport").read
            pieces = read(partial(_take, model, parameters), parameters.device, *content)
        elif name == RECEIVE:
            from megarl.weights.group_ranks import Arrivals, receive

            arrivals = Arrivals(parameters, _received, _boxes, partial(_read, parameters), partial(_load_whole, model))
            later = receive(arrivals, parameters.device, *content)
            pieces = list(chain.from_iterable(message for _, message in content[-1]))
        elif name == OPEN:
            shared, pieces = content
            _take(model, parameters, pieces, opened(shared))
        else:
            _kept[name], (pieces, checked) = buffer, content
            _take(model, parameters, pieces, buffer, checked=checked)
        if name != RECEIVE:  # of which nothing has come so far: `Arrivals` takes note
            _boxes.note(pieces)
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
_boxes = ReceivedBoxes()


def _read(
    parameters: ModelParameters, content: Iterable[tuple[Any, ...]], buffer: torch.Tensor, *, checked: bool = False
) -> Whole:
    """Copy what lies in a buffer to where it belongs; gives what is whole. `checked`: its digests will be asked for."""
    whole, boxes, names = [], [], draft_names()
    for *key_fields, dtype, start, stop in content:
        key = SliceKey(*key_fields)
        values = buffer[start:stop].view(getattr(torch, dtype)).view(key.rows, key.cols)
        if names is not None and key.tensor.startswith(parameters.of_draft):
            names.keep(key, values.clone())
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
    parameters: ModelParameters,
    boxes: Iterable[tuple[tuple[Any, ...], str]],
    where: tuple[str, int],
    key: str,
    *,
    summed: bool = False,
) -> None:
    """Answer for the policy; where boxes of the draft are asked for, too, it answers for both. `summed`: with their sums."""
    boxes = list(boxes)
    names = draft_names()
    asked = boxes if names is None else names.of_the_policy(parameters, boxes)
    found, uncovered = _digests(parameters, asked, _received)
    if len(asked) < len(boxes):
        assert names is not None, "it has left them out"
        names.answer_later(parameters, boxes, found, uncovered, partial(_send, where=where, key=key, summed=summed))
    else:
        _send([SliceKey(*place) for place, _ in boxes], found, uncovered, where, key, summed=summed)


def _send(
    keys: Sequence[SliceKey], found: Sequence[str], uncovered: list[str], where: tuple[str, int], key: str, *, summed: bool
) -> None:
    send_answer(combined(zip(keys, found, strict=True)) if summed else found, uncovered, where, key)


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
    found = [taken.get(key, "") for key in keys]
    left = [number for number, known in enumerate(found) if not known]

    def take(places: Sequence[int]) -> None:
        numbers = [left[place] for place in places]
        values = [_as_sent(read[number], getattr(torch, boxes[number][1])) for number in numbers]
        for number, checksum in zip(numbers, digests(values), strict=True):
            found[number] = checksum

    if parameters.device.type == "cuda":
        take(range(len(left)))
    else:
        in_threads(lambda place: take([place]), [read[number] for number in left])
    return found, [name for name, values in filled.items() if not _covers(name, tensors[name].data, values)]
