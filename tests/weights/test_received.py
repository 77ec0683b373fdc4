"""Digests that were taken as values came are used only of boxes that nothing else can have written into."""

from __future__ import annotations

import torch

from megarl.weights.checksums import digest
from megarl.weights.rank_plan import SliceKey
from megarl.weights.received import ReceivedDigests

PARAMETER = torch.arange(48.0).reshape(8, 6)
BOXES = {
    "q": PARAMETER[:4], "k": PARAMETER[4:6], "v": PARAMETER[6:],
    "first columns": PARAMETER[:4, :3], "last columns": PARAMETER[:4, 3:], "across": PARAMETER[5:7], "one": torch.ones(1),
}  # fmt: skip


def key(name: str) -> SliceKey:
    return SliceKey.whole(name, BOXES[name])._replace(engine_rank=0)


def known(received: ReceivedDigests, *names: str) -> set[str]:
    """Of which of the named boxes the digest is known, all of which an update has."""
    taken = received.take([(key(name), BOXES[name]) for name in names])
    assert all(value == digest(BOXES[held.tensor]) for held, value in taken.items())
    return {held.tensor for held in taken}


def hashed(*names: str) -> ReceivedDigests:
    received = ReceivedDigests()
    for name in names:
        received.hash(key(name), BOXES[name])
    return received


def test_boxes_that_lie_beside_each_other_are_known_once() -> None:
    received = hashed("v", "q", "k", "one")
    assert known(received, "q", "k", "v", "one") == {"q", "k", "v", "one"}
    assert known(received, "q", "k", "v", "one") == set()


def test_boxes_that_share_memory_are_read_again_whichever_was_hashed() -> None:
    assert known(hashed("q", "k", "v", "across", "one"), "q", "k", "v", "across", "one") == {"q", "one"}
    assert known(hashed("k", "one"), "across", "k", "one") == {"one"}
    # of columns it is not told whether they cross
    assert known(hashed("first columns", "last columns", "k"), "first columns", "last columns", "k") == {"k"}
    # a box inside another, and one behind the inner that the outer reaches over
    outer = SliceKey("outer", 0, 8, 0, 0, 8, 6)
    received = hashed("k", "v")
    received.hash(outer, PARAMETER)
    assert received.take([(key("k"), BOXES["k"]), (key("v"), BOXES["v"]), (outer, PARAMETER)]) == {}


def test_what_is_written_again_is_read_again() -> None:
    received = hashed("q", "k", "v")
    received.forget(key("k"))
    assert known(received, "q", "k", "v") == {"q", "v"}
    received = hashed("q", "k", "v")
    received.forget_all()
    assert known(received, "q", "k", "v") == set()
