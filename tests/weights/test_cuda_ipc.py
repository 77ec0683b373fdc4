"""What travels of a buffer on a GPU, with stand-ins for torch's two calls, and the formula of the checksum."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.weights import cuda_ipc, sglang_loader
from megarl.weights.cuda_ipc import checksums, opened, shared
from megarl.weights.rank_plan import SliceKey, WeightSlice
from megarl.weights.staging import Staging

UUIDS = ["GPU-a", "GPU-b", "GPU-c"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A sender whose buffers are on its second GPU. `seen`: the GPUs of the process that looks; `handles`: what was opened."""
    state: dict[str, Any] = {"seen": UUIDS, "handles": []}
    storages: list[torch.UntypedStorage] = []

    def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
        storages.append(storage)
        return (1, b"handle", storage.nbytes(), 0, b"counter", len(storages) - 1, b"event", True)

    def open_shared(gpu: int, *handle: Any) -> torch.UntypedStorage:
        state["handles"].append((gpu, *handle))
        return storages[handle[4]]

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(open_shared))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(state["seen"]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=state["seen"][gpu]))
    return state


def test_torch_shares_and_opens_storages_by_the_calls_that_are_used_here() -> None:
    # Their C++ takes and gives these; torch's own reductions name them (torch.multiprocessing.reductions).
    for name in ("_share_cuda_", "_new_shared_cuda"):
        assert callable(getattr(torch.UntypedStorage, name))
    given = torch.multiprocessing.reductions.rebuild_cuda_tensor.__code__.co_varnames[6:15]
    assert given == (
        "storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad",
        "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required",
    )  # fmt: skip


def test_a_buffer_is_opened_on_the_gpu_that_has_its_name_in_the_other_process(gpus: dict[str, Any]) -> None:
    buffer = torch.arange(64, dtype=torch.uint8)
    values = shared(buffer[8:40])
    json.dumps([value.decode() if isinstance(value, bytes) else value for value in values])  # plain values
    assert values[0] == "GPU-b"
    gpus["seen"] = ["GPU-c", "GPU-x", "GPU-b"]
    assert torch.equal(opened(values), buffer[8:40])
    assert gpus["handles"] == [(2, b"handle", 64, 0, b"counter", 0, b"event", True)]
    gpus["seen"] = ["GPU-x"]
    with pytest.raises(ValueError, match="the weights are on GPU GPU-b, which this process does not see; it sees GPU-x"):
        opened(values)


class OnGpu(torch.Tensor):
    """A buffer of main memory that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def test_every_rank_of_an_engine_takes_its_pieces_from_one_shared_buffer(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import base64
    import pickle

    synchronised: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: synchronised.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    weights = [torch.randn(4, 6), torch.randn(4, 6)]
    pieces = [WeightSlice(SliceKey("model.norm.weight", rank, 4, 0, 0, 4, 6), weight) for rank, weight in enumerate(weights)]
    staged = Staging(1).stage(pieces)
    assert staged.buffer is not None
    staged.buffer = staged.buffer.as_subclass(OnGpu)
    payloads = [pickle.loads(base64.b64decode(payload)) for payload in staged.payloads(2)]
    assert len(gpus["handles"]) == 0
    for payload, weight in zip(payloads, weights, strict=True):
        model = torch.nn.Module()
        model.model = torch.nn.Module()  # type: ignore[assignment]
        model.model.norm = torch.nn.Module()  # type: ignore[union-attr,assignment]
        model.model.norm.weight = torch.nn.Parameter(torch.zeros(4, 6))  # type: ignore[union-attr]
        with torch.no_grad():
            sglang_loader.load(model, payload)
        assert torch.equal(model.model.norm.weight, weight)  # type: ignore[union-attr,arg-type]
    assert [handle[5] for handle in gpus["handles"]] == [0, 1], "each has a count of its own of who uses the buffer"
    assert synchronised == ["stream", "stream"]


def checksum(tensor: torch.Tensor) -> str:
    return checksums([tensor])[0]


def reference(content: bytes) -> str:
    """A checksum by the formula in the docstring of `checksums`, in unsigned NumPy; `>>` carries the sign."""
    words = np.frombuffer(content + bytes(8 - len(content) % 8), dtype=np.uint64)
    places = np.arange(len(words), dtype=np.uint64)
    first, second, place = (np.uint64(value) for value in (cuda_ipc._FIRST, cuda_ipc._SECOND, cuda_ipc._PLACE))

    def shifted(values: Any, by: int) -> Any:
        return (values.view(np.int64) >> by).view(np.uint64)

    with np.errstate(over="ignore"):
        odd = places * np.uint64(2) + np.uint64(1)
        one = words * first
        one = one ^ shifted(one, 29)
        two = (one + places * place) * second
        two = (two ^ shifted(two, 32)) * first
        sums = [(values * odd).sum(dtype=np.uint64) + np.uint64(len(content)) for values in (one, two)]
    return "".join(f"{int(value):016x}" for value in sums)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000, 4099])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_the_checksum_is_its_formula_wherever_the_bytes_lie(length: int, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "WORDS_AT_ONCE", 100)
    memory = torch.randint(0, 256, (length + 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    tensor = memory[start : start + length]
    assert checksum(tensor) == reference(tensor.numpy().tobytes())


class Counting(TorchDispatchMode):
    """Counts operators that compute or copy, and those for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = func.is_view or func.overloadpacket in (torch.ops.aten._unsafe_view, torch.ops.aten.detach)
        self.launches += not is_view
        self.waits += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **kwargs or {})


def test_checksums_of_many_tensors_are_those_of_each_and_take_a_copy_each_and_one_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_ipc, "WORDS_AT_ONCE", 4000)
    made = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 200, generator=made)
    tensors = [matrix[:, 3:57], matrix.T, torch.empty(0), torch.tensor(3.0, dtype=torch.float64)]
    tensors += [torch.randn(number % 37, generator=made).to(torch.bfloat16) for number in range(300)]
    expected = [reference(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for tensor in tensors]
    with Counting() as counting:
        found = checksums(tensors)
    assert found == expected
    assert counting.launches <= len(tensors) + 100
    assert counting.waits == 0, "one copy of all sums to the host, not one wait for each"


def test_no_flipped_bit_swap_or_missing_end_leaves_the_checksum_as_it_was() -> None:
    tensor = torch.randn(40, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    seen = {checksum(tensor), checksum(tensor[:-1].contiguous())}
    bits = tensor.view(torch.int16)
    for element in range(0, tensor.numel(), 7):
        for bit in range(16):
            changed = bits.flatten().clone()
            changed[element] ^= -(2**15) if bit == 15 else 2**bit
            seen.add(checksum(changed))
    swapped = 0
    for row in range(1, 40):
        other = tensor.clone()
        other[[0, row]] = other[[row, 0]]
        seen.add(checksum(other))
        swapped += 1
    assert len(seen) == 2 + 16 * len(range(0, tensor.numel(), 7)) + swapped


def test_who_sends_weights_does_not_import_sglang() -> None:
    # Two threads of a rank that imported it at once stopped each other: a deadlock of Python's import locks.
    code = "import sys; from megarl.weights import pusher, sglang_senders; sys.exit('sglang' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    folder = Path(cuda_ipc.__file__).parent
    assert not [file for file in folder.glob("*.py") if re.search(r"^\s*(from|import) sglang", file.read_text(), re.M)]
