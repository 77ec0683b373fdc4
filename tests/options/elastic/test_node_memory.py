"""Files of a checkpoint between the memory of nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from megarl.errors import CheckpointError
from megarl.options.elastic import node_memory
from megarl.options.elastic.node_memory import FilePieces, NodeMemory, Sent


class Remote:
    """Calls of an actor, as Ray's handles have them, in this process."""

    def __init__(self, actor: NodeMemory, change: Callable[[bytes], bytes] = lambda content: content) -> None:
        self._actor, self._change = actor, change
        self.asked: list[tuple[Any, ...]] = []
        """Pieces that were read, by their paths, offsets and lengths."""

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            answer = await getattr(self._actor, name)(*arguments)
            if not isinstance(answer, np.ndarray):
                return answer
            self.asked.append(arguments)
            return self._change(bytes(answer))

        return type("Method", (), {"remote": staticmethod(call)})


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[NodeMemory, NodeMemory]:
    """The memory of two nodes, in folders of this test."""
    monkeypatch.setattr(node_memory, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(node_memory, "end_with_parent", lambda: None)
    monkeypatch.setattr(node_memory, "remove_with_this_process", lambda folders: None)
    monkeypatch.setattr(node_memory, "PIECE_BYTES", 1000)
    return NodeMemory("first"), NodeMemory("second")


CONTENT = bytes(range(256)) * 10


NAME = "policy/__3_0.distcp"


def keep(node: NodeMemory, content: bytes) -> None:
    """Have a rank of a node write its part into slot 0."""
    path = node.folder / "0" / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def send(first: NodeMemory, second: Any, content: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[Sent, list[tuple[Any, ...]]]:
    """A checkpoint of one file; what its node answers, and the pieces that the buddy asked for."""
    owner = Remote(first)
    monkeypatch.setattr(node_memory.ray, "get_runtime_context", lambda: type("Context", (), {"current_actor": owner}))

    async def scenario() -> Sent:
        await first.begin("0", [NAME], [])
        if isinstance(second, NodeMemory):
            await second.begin("0", [], [NAME])
        keep(first, content)
        return await first.complete("0", {NAME: len(content)}, Remote(second))

    return asyncio.run(scenario()), owner.asked


def test_a_buddy_copies_what_ranks_wrote_piece_by_piece(
    nodes: tuple[NodeMemory, NodeMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    sent, asked = send(first, second, CONTENT, monkeypatch)
    assert (sent.bytes, sent.is_there) == (2560, True)
    assert [(start, length) for _, start, length in asked] == [(0, 1000), (1000, 1000), (2000, 560)]
    assert (second.folder / "0" / NAME).read_bytes() == CONTENT
    assert asyncio.run(second.has("0", [NAME]))


def test_pieces_that_the_buddy_has_already_are_not_sent_again(
    nodes: tuple[NodeMemory, NodeMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    send(first, second, CONTENT, monkeypatch)
    changed = CONTENT[:1500] + b"?" + CONTENT[1501:] + b"and more"
    sent, asked = send(first, second, changed, monkeypatch)
    assert (sent.bytes, [start for _, start, _ in asked]) == (1000 + 568, [1000, 2000])
    assert (second.folder / "0" / NAME).read_bytes() == changed
    assert send(first, second, changed, monkeypatch)[0].bytes == 0
    assert send(first, second, CONTENT[:1000], monkeypatch)[0].bytes == 0
    assert send(first, second, CONTENT, monkeypatch)[0].bytes == 1560, "pieces were forgotten when the file was shorter"


def test_pieces_that_a_rank_here_has_written_over_are_sent_again(
    nodes: tuple[NodeMemory, NodeMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank moved to its buddy's node, was lost while it wrote, and is back where it was."""
    first, second = nodes
    send(first, second, CONTENT, monkeypatch)
    asyncio.run(second.begin("0", [NAME], []))
    keep(second, bytes(len(CONTENT)))
    assert send(first, second, CONTENT, monkeypatch)[0].bytes == len(CONTENT)
    assert (second.folder / "0" / NAME).read_bytes() == CONTENT


def test_a_node_whose_files_did_not_all_come_is_not_taken_to_be_copied(
    nodes: tuple[NodeMemory, NodeMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the slot has such files of two checkpoints before counts for nothing."""
    first, second = nodes
    send(first, second, CONTENT, monkeypatch)
    asyncio.run(second.begin("0", [], [NAME]))
    assert not asyncio.run(second.has("0", [NAME]))


def test_what_a_lost_buddy_does_not_take_is_still_here(
    nodes: tuple[NodeMemory, NodeMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost:
        async def copy(self, *_: Any) -> Any:
            raise node_memory.ray.exceptions.RayActorError

    sent, _ = send(nodes[0], Lost(), CONTENT, monkeypatch)
    assert (sent.bytes, sent.is_there) == (0, False)


def test_what_is_damaged_on_its_way_is_refused(nodes: tuple[NodeMemory, NodeMemory]) -> None:
    first, second = nodes
    (first.folder / "0").mkdir()
    (first.folder / "0" / "part").write_bytes(CONTENT)
    owner = Remote(first, lambda content: content[:-1] + b"!")
    asyncio.run(second.begin("0", [], ["part"]))
    files = {"part": FilePieces(1000, [xxhash.xxh3_128_digest(CONTENT[:1000])])}
    with pytest.raises(CheckpointError, match="'part' of the checkpoint in memory is damaged on its way to another node"):
        asyncio.run(second.copy("0", owner, files))
    assert not asyncio.run(second.has("0", ["part"]))


def test_files_of_others_go_when_a_slot_is_begun_again(nodes: tuple[NodeMemory, NodeMemory]) -> None:
    first, _ = nodes
    (first.folder / "0" / "policy").mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata"):
        (first.folder / "0" / "policy" / name).write_bytes(CONTENT)
    asyncio.run(first.begin("0", ["policy/__0_0.distcp"], ["policy/__1_0.distcp"]))
    assert {path.name for path in (first.folder / "0" / "policy").iterdir()} == {"__0_0.distcp", "__1_0.distcp"}
