"""A rank's side of its engine's process group: it takes what all senders of a call send at once; runs inside the server."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch

from megarl.weights.engine_group import EngineGroup, Groups, OnTheWay, Turns, in_a_thread, leave, start_receiving, together
from megarl.weights.rank_plan import SliceKey
from megarl.weights.received import ReceivedBoxes, ReceivedDigests, Whole
from megarl.weights.sglang_places import ModelParameters, box
from megarl.weights.sglang_targets import EVERY_RANK

COPIED_BYTES = 64 * 2**20
"""How many bytes may be under way into memory of their own; what is received where it belongs takes none."""


class Announced(NamedTuple):
    """Messages that one sender will send in a call, each with its step; `come` is done when they are there."""

    messages: Sequence[tuple[int, Any]]
    checked: bool
    come: Future[None]


class Arrivals:
    """Places where messages of a call belong, and what is done with them when they have come."""

    def __init__(
        self,
        parameters: ModelParameters,
        received: ReceivedDigests,
        boxes: ReceivedBoxes,
        read: Callable[..., Whole],
        load_whole: Callable[[Whole], None],
    ) -> None:
        """`received` and `boxes` are told what has come. `read` copies a message to where it belongs, and gives what is whole
        for `load_whole`."""
        self._parameters, self._received, self._boxes = parameters, received, boxes
        self._read, self._load_whole = read, load_whole
        self._whole: Whole = []

    def place(self, message: Sequence[Any]) -> torch.Tensor | None:
        """The place where a message can be received as it comes, if it is of one piece; None: it is copied from elsewhere."""
        *_, dtype, _, _ = message[0]
        key = _held(message[0])
        if len(message) > 1 or key.engine_rank == EVERY_RANK or key.tensor.startswith(self._parameters.of_draft):
            return None
        to = box(self._parameters, key)
        return to if to.is_contiguous() and to.dtype == getattr(torch, dtype) else None

    def take(self, message: Sequence[Any], values: torch.Tensor, *, in_place: bool, checked: bool) -> None:
        """Take what has come."""
        if not in_place:
            self._whole += self._read(message, values, checked=checked)
        elif checked and not values.is_cuda:
            self._received.hash(_held(message[0]), values)  # while the next ones come
        else:
            self._received.forget(_held(message[0]))
        self._boxes.note(message)

    def end(self) -> None:
        """Everything has come."""
        self._load_whole(self._whole)
        if self._parameters.device.type == "cuda":
            torch.cuda.synchronize(self._parameters.device)


def _held(piece: tuple[Any, ...]) -> SliceKey:
    *key_fields, _, _, _ = piece
    return SliceKey(*key_fields)


_groups: dict[str, tuple[EngineGroup, Any, Groups]] = {}
"""By name what was joined last, with its store."""
_announced: dict[tuple[str, int], dict[int, Announced]] = {}
"""By group and call what each sender has said that it will send, until all senders of the group have."""
_changed = threading.Condition()
"""Held by who changes these two."""


def join(device: torch.device, group: tuple[Any, ...], rank: int) -> None:
    """Join a group in place of the last one."""
    new_group = EngineGroup(*group)
    while _groups:
        leave(_groups.popitem()[1][2])
    store = new_group.store()
    store.set(new_group.joining(rank), "")
    joined = new_group.join(store, new_group.senders + rank, device)
    with _changed:
        _groups[new_group.name] = new_group, store, joined
        _changed.notify_all()


def give_up() -> None:
    """No sender will announce anything more: who waits for another one waits in vain."""
    with _changed:
        waiting = [one for of_call in _announced.values() for one in of_call.values()]
        _announced.clear()
    for one in waiting:
        one.come.set_exception(RuntimeError("the update was given up before all its senders had begun"))


def receive(
    arrivals: Arrivals,
    device: torch.device,
    name: str,
    sender: int,
    call: int,
    rank: int,
    options: dict[str, Any],
    content: Sequence[tuple[int, Any]],
) -> Future[None]:
    """Take note of what a sender will send (`payloads.receiving`); when all senders of the group have said so, receive it.

    The future is done when it has come.
    """
    one = Announced(content, options["checked"], Future())
    with _changed:
        if not _changed.wait_for(lambda: name in _groups, options["timeout_s"]):
            raise RuntimeError(f"this rank has not joined the group {name}")
        known, store, groups = _groups[name]
        of_call = _announced.setdefault((name, call), {})
        of_call[sender] = one
        if len(of_call) < known.senders:
            return one.come
        del _announced[name, call]
    for other in of_call:
        store.set(known.ready(other, call, rank), "")
    in_a_thread(partial(_receive_all, arrivals, device, groups, of_call))
    return one.come


def _receive_all(arrivals: Arrivals, device: torch.device, groups: Groups, of_senders: Mapping[int, Announced]) -> None:
    error: Exception | None = None
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _receive_steps(arrivals, device, groups, of_senders)
        arrivals.end()
    except Exception as failure:  # noqa: BLE001 - every sender must hear of it
        error = failure
    for one in of_senders.values():
        if error is None:
            one.come.set_result(None)
        else:
            one.come.set_exception(error)


def _receive_steps(arrivals: Arrivals, device: torch.device, groups: Groups, of_senders: Mapping[int, Announced]) -> None:
    """Receive all messages, step by step."""
    turns = {sender: Turns(groups) for sender in of_senders}
    under_way: deque[tuple[OnTheWay, Any, bool, bool]] = deque()
    copied = 0

    def finish_one() -> int:
        coming, message, in_place, checked = under_way.popleft()
        coming.wait()
        arrivals.take(message, coming.values, in_place=in_place, checked=checked)
        return 0 if in_place else coming.nbytes

    messages = [(step, sender, message) for sender, one in of_senders.items() for step, message in one.messages]
    messages.sort(key=lambda entry: entry[:2])  # which leaves those of a sender in its order
    for _, of_step in groupby(messages, key=lambda entry: entry[0]):
        with together(groups, device) as begun:
            for _, sender, message in of_step:
                place = arrivals.place(message)
                values = place
                if values is None:
                    values = torch.empty(message[-1][-1], dtype=torch.uint8, device=device)
                    copied += values.nbytes
                begun.append(start_receiving(values, turns[sender].group_for(values.nbytes), sender))
                under_way.append((begun[-1], message, place is not None, of_senders[sender].checked))
        while copied > COPIED_BYTES:
            copied -= finish_one()
    while under_way:
        finish_one()
