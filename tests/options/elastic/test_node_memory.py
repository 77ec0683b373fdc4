"""Files of a checkpoint between the memory of nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megarl.checkpoint.dist_writer import Written
from megarl.errors import CheckpointError
from megarl.options.elastic import node_memory
from megarl.options.elastic.node_memory import NodeMemory
from megarl.runs.manifest import FileRecord


class Remote:
    """Calls of an actor, as Ray's handles have them, in this process."""

    def __init__(self, actor: NodeMemory, change: Callable[[bytes], bytes] = lambda content: content) -> None:
        self._actor, self._change = actor, change

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            answer = await getattr(self._actor, name)(*arguments)
            return self._change(answer) if isinstance(answer, bytes) else answer

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


def test_a_buddy_copies_what_ranks_wrote_piece_by_piece(
    nodes: tuple[NodeMemory, NodeMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    context = type("Context", (), {"current_actor": Remote(first)})
    monkeypatch.setattr(node_memory.ray, "get_runtime_context", lambda: context)

    async def scenario() -> dict[Any, Written]:
        await first.begin("0")
        asked = asyncio.create_task(first.complete("0", [("policy", 3)], Remote(second)))
        await asyncio.sleep(0.01)
        assert not asked.done()
        path = first.folder / "0" / "policy" / "__3_0.distcp"
        path.parent.mkdir(parents=True)
        path.write_bytes(CONTENT)
        record = FileRecord(len(CONTENT), xxhash.xxh3_128(CONTENT).hexdigest())
        await first.written("0", ("policy", 3), Written({path.name: record}))
        return await asked

    assert asyncio.run(scenario()).keys() == {("policy", 3)}
    assert (second.folder / "0" / "policy" / "__3_0.distcp").read_bytes() == CONTENT


def test_what_is_damaged_on_its_way_is_refused(nodes: tuple[NodeMemory, NodeMemory]) -> None:
    first, second = nodes
    (first.folder / "0").mkdir()
    (first.folder / "0" / "part").write_bytes(CONTENT)
    owner = Remote(first, lambda content: content[:-1] + b"!")
    files = {"part": (len(CONTENT), xxhash.xxh3_128(CONTENT).hexdigest())}
    with pytest.raises(CheckpointError, match="'part' of the checkpoint in memory is damaged on its way to another node"):
        asyncio.run(second.copy("0", owner, files))


def test_a_slot_that_is_begun_again_is_empty(nodes: tuple[NodeMemory, NodeMemory]) -> None:
    first, _ = nodes
    (first.folder / "0").mkdir()
    (first.folder / "0" / "part").write_bytes(CONTENT)
    asyncio.run(first.begin("0"))
    assert not (first.folder / "0").exists()
