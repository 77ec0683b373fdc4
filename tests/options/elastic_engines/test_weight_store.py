"""Weights for other sites in files: what is put together from differences is bit for bit what was sent, or is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megarl.errors import EngineError
from megarl.options.elastic_engines.sites import weight_store
from megarl.options.elastic_engines.sites.weight_store import (
    DIFFERENCE,
    FULL,
    INDEX,
    HeldWeights,
    VersionIndex,
    WeightStore,
    packed,
)

pytest.importorskip("zstandard")
Weights = dict[str, torch.Tensor]


def weights(seed: int) -> Weights:
    """Tensors of several dtypes and shapes."""
    torch.manual_seed(seed)
    return {
        "matrix": torch.randn(256, 128).bfloat16(), "vector": torch.randn(300), "scalar": torch.tensor(seed + 0.5),
        "experts": torch.randn(4, 16, 8).bfloat16(), "steady": torch.randn(64).bfloat16(),
    }  # fmt: skip


def stepped(before: Weights, share: float = 0.1) -> Weights:
    """The weights after a step that changes some of them by a little, and `steady` not at all."""
    after = {}
    for name, tensor in before.items():
        moved = (torch.rand(tensor.shape) < share).to(tensor.dtype) * (tensor.abs() * 2**-7).to(tensor.dtype)
        after[name] = tensor if name == "steady" else tensor + moved
    return after


def taken(held: HeldWeights, store: WeightStore, index: VersionIndex, part: str | None = None) -> Weights:
    """What an engine would be given."""
    part = part or held.part_for(index)
    path = store.path(index.version, part)
    assert path is not None
    return {name: tensor.clone() for name, tensor in held.take(index, part, path)}


def equal(first: Weights, second: Weights) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def test_versions_come_whole_then_as_differences_and_are_what_was_sent(tmp_path: Path) -> None:
    store, held, now = WeightStore(tmp_path / "w"), HeldWeights(None, {}), weights(1)
    parts = []
    for version in (3, 4, 5):
        index = store.add(version, now.items())
        parts.append(held.part_for(index))
        assert equal(taken(held, store, index), now)
        assert held.version == version
        now = stepped(now)
    assert parts == [FULL, DIFFERENCE, DIFFERENCE]
    assert index.base == 4
    assert [entry.name for entry in index.tensors if entry.difference is None] == ["steady"]
    assert 4 * index.difference_bytes < index.full_bytes < index.nbytes


def test_who_missed_a_version_is_sent_all_and_older_versions_go(tmp_path: Path) -> None:
    store, held, now = WeightStore(tmp_path / "w"), HeldWeights(None, {}), weights(2)
    taken(held, store, store.add(1, now.items()))
    for version in (2, 3):
        now = stepped(now)
        index = store.add(version, now.items())
    assert held.part_for(index) == FULL
    assert equal(taken(held, store, index), now)
    assert store.path(1, FULL) is None
    assert store.path(2, DIFFERENCE) is not None
    assert store.path(3, "../2/index") is None


def test_weights_of_other_shapes_have_no_differences(tmp_path: Path) -> None:
    store, now = WeightStore(tmp_path / "w"), weights(2)
    store.add(1, now.items())
    assert store.add(2, (now | {"vector": torch.zeros(7)}).items()).base is None
    assert store.add(3, {name: now[name] for name in list(now)[1:]}.items()).base is None


def test_a_version_that_breaks_off_changes_nothing(tmp_path: Path) -> None:
    store, now = WeightStore(tmp_path / "w"), weights(3)
    first = store.add(1, now.items())

    def breaks_off() -> object:
        yield "matrix", now["matrix"]
        raise EngineError("it has newer ones")

    with pytest.raises(EngineError, match="newer"):
        store.add(2, breaks_off())  # type: ignore[arg-type]
    assert store.newest is first
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["version-1"]
    held = HeldWeights(None, {})
    assert equal(taken(held, store, first), now)


def test_a_tensor_that_is_not_what_was_sent_is_named_and_no_version_is_held(tmp_path: Path) -> None:
    store, held, now = WeightStore(tmp_path / "w"), HeldWeights(None, {}), weights(4)
    taken(held, store, store.add(1, now.items()))
    held.tensors["experts"][5] ^= 1
    index = store.add(2, stepped(now).items())
    with pytest.raises(EngineError, match=r"experts of version 2 has checksum [0-9a-f]{32}, the run's is [0-9a-f]{32}"):
        taken(held, store, index)
    assert held.version is None
    assert held.part_for(index) == FULL


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    store, now = WeightStore(tmp_path / "w"), weights(5)
    index = store.add(1, now.items())
    content = bytearray((tmp_path / "w" / "version-1" / FULL).read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[len(content) // 2] ^= 0x40
    else:
        content[:] = bytes(len(content))
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(EngineError, match=r"damaged|has checksum"):
        list(HeldWeights(None, {}).take(index, FULL, path))


def test_a_frame_that_unpacks_to_more_than_its_tensor_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = packed(torch.zeros(1 << 24, dtype=torch.uint8).numpy(), 1)
    assert len(frame) < 10_000
    zstandard = weight_store.zstandard()
    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda: pytest.fail("it was unpacked"))
    with pytest.raises(EngineError, match="another size"):
        weight_store.unpacked(frame, 1000, 1)


def test_what_an_earlier_start_left_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    WeightStore(tmp_path / "w").add(7, weights(6).items())
    store = WeightStore(tmp_path / "w")
    assert store.path(7, INDEX) is None
    assert store.add(8, weights(6).items()).base is None
    shutil.rmtree(tmp_path / "w")


@pytest.mark.parametrize(("count", "said"), [(12, "12 bytes"), (1500, "1.5 kB"), (3.2e9, "3.2 GB"), (8e14, "800 TB")])
def test_bytes_are_told_with_a_unit(count: float, said: str) -> None:
    assert weight_store.told_bytes(count) == said
