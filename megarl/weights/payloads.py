"""Messages to a rank of an engine about an update, and what it answers: payloads of SGLang's requests, known to both sides.

A payload is a list of pairs, `((what, content), tensor)`, in which `what` is one of the words here or the name of a buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed

from megarl.weights.engine_group import EngineGroup
from megarl.weights.intake import Intake
from megarl.weights.rank_plan import SliceKey

SELECTORS = {False: "target", True: "all"}
"""Which of a server's models an update is for (SGLang's `selector`), by whether it drafts with a layer that is trained: any
other draft keeps its weights."""
INTAKE, OPEN, JOIN, RECEIVE, READ, CHECK, SUM = "intake", "open", "join", "receive", "read", "check", "sum"


def taking(intake: Intake, rank: int) -> list[tuple[Any, Any]]:
    """The payload by which `rank` takes part in an intake until its end."""
    return [((INTAKE, (tuple(intake), rank)), NoTensor())]


def opening(shared: Sequence[Any], pieces: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The payload by which a rank opens a buffer on a GPU (`cuda_ipc.shared`) and takes pieces as `receiving` has them."""
    return [((OPEN, (tuple(shared), list(pieces))), NoTensor())]


def joining(group: EngineGroup, rank: int) -> list[tuple[Any, Any]]:
    """The payload by which `rank` joins its engine's group with the senders."""
    return [((JOIN, (tuple(group), rank)), NoTensor())]


def receiving(
    group: EngineGroup, sender: int, call: int, rank: int, content: Iterable[Any], *, checked: bool = False
) -> list[tuple[Any, Any]]:
    """The payload by which `rank` receives messages of a sender over the group; `checked`: their digests will be asked for.

    Each message is its step (`engine_group.steps_of`) and a list of pieces, `(*held, dtype, start, stop)`, of which the last
    ends where the message does.
    """
    options = {"checked": checked, "timeout_s": group.timeout_s}
    return [((RECEIVE, (group.name, sender, call, rank, options, list(content))), NoTensor())]


class NoTensor:
    """A stand-in where a payload must have a tensor; unlike one, it arrives on another machine too."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.ByteTensor, ()


NAMED = 32
"""How many parameters that are not covered are named."""


def checking(boxes: Iterable[tuple[SliceKey, str]], where: tuple[str, int], key: str) -> list[tuple[Any, Any]]:
    """The payload that asks a rank for the digests of boxes, each with the dtype in which it was sent.

    The rank answers as `key` in the store at `where`.
    """
    return [((CHECK, ([(tuple(box), dtype) for box, dtype in boxes], where, key)), NoTensor())]


def summing(where: tuple[str, int], key: str, *, since_base: bool) -> list[tuple[Any, Any]]:
    """The payload that asks a rank for the sums (`digests.combined`) of all boxes that came in this update; with `since_base`
    in those before it, too. It answers as to `checking`."""
    return [((SUM, (since_base, where, key)), NoTensor())]


def read_answer(answer: bytes) -> tuple[list[Any], list[str]]:
    """Read a rank's answer: the digests of boxes or their sums, and the parameters that the boxes do not cover."""
    digests, uncovered = json.loads(answer)
    return digests, uncovered


def send_answer(digests: Sequence[Any], uncovered: list[str], where: tuple[str, int], key: str) -> None:
    """Answer as `key` in the store at `where`; see `read_answer`."""
    torch.distributed.TCPStore(*where, is_master=False).set(key, json.dumps([digests, uncovered[:NAMED]]))
