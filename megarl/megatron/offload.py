"""A role's memory given up and taken back in place: what its tensors are views of moves, the tensors stay the same objects.

Weights and what the optimizer remembers are copied to main memory, one after another into few blocks; gradients are not, since
every pass begins with none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.utils import unwrap_model
from torch import Tensor

from megarl.megatron.host_memory import HostMemory


class Offload:
    """Moves a role's storages between a device and main memory. `device_type`: what is elsewhere is left where it is."""

    def __init__(self, role: Any, device_type: str = "cuda") -> None:
        self._role, self._device_type = role, device_type
        self._away: dict[str, tuple[list[tuple[torch.UntypedStorage, int, bool]], HostMemory]] = {}

    def keep(self, *, weights: bool, rest: bool) -> None:
        """Have the weights, and gradients with what the optimizer remembers, on the device or not."""
        on_device = {"weights": weights, "rest": rest}
        if not rest:
            _forget_fp8_copies(self._role.chunks)
        for kind in (kind for kind, is_wanted in on_device.items() if not is_wanted and kind not in self._away):
            self._away[kind] = self._leave(kind)
        for kind in (kind for kind, is_wanted in on_device.items() if is_wanted and kind in self._away):
            self._come_back(*self._away.pop(kind))

    def _leave(self, kind: str) -> tuple[list[tuple[torch.UntypedStorage, int, bool]], HostMemory]:
        """(storage, its bytes, whether its content is in the memory) of all that has left, and that memory."""
        leaving = [(tensor.untyped_storage(), is_kept) for tensor, is_kept in self._tensors(kind)]
        memory = HostMemory(sum(storage.nbytes() for storage, is_kept in leaving if is_kept), self._device_type)
        left = []
        for storage, is_kept in leaving:
            left.append((storage, storage.nbytes(), is_kept))
            if is_kept:
                memory.write(_bytes(storage))
            storage.resize_(0)
        return left, memory

    def _come_back(self, left: list[tuple[torch.UntypedStorage, int, bool]], memory: HostMemory) -> None:
        memory.rewind()
        for storage, nbytes, is_kept in left:
            storage.resize_(nbytes)
            if is_kept:
                memory.read(_bytes(storage))
            else:
                _bytes(storage).zero_()

    def _tensors(self, kind: str) -> Iterator[tuple[Tensor, bool]]:
        """One tensor per storage on the device, and whether its content is needed again."""
        weights = {_key(tensor) for tensor in _weights(self._role.chunks)}
        seen = set[tuple[str, int]]()
        if kind == "weights":
            candidates = [(tensor, True) for tensor in _weights(self._role.chunks)]
        else:
            candidates = [*((tensor, False) for tensor in _gradients(self._role.chunks))]
            candidates += [(tensor, True) for tensor in _remembered(self._role.optimizer)]
            candidates += [(tensor, True) for tensor in self._role.average.remainders.values()]
        for tensor, is_kept in candidates:
            key, is_weight = _key(tensor), _key(tensor) in weights
            if tensor.device.type == self._device_type and is_weight == (kind == "weights") and key not in seen:
                seen.add(key)
                yield tensor, is_kept


def _key(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _weights(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    for chunk in chunks:
        core: Any = unwrap_model(chunk)
        for parameter in core.parameters():
            yield from _values_of(parameter)
        yield from core.buffers()


def _values_of(parameter: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a weight; one in FP8, whose own storage is empty, has a tensor of its rows, one of its
    columns, or both."""
    if is_float8tensor(parameter):
        quantised: Any = parameter
        yield from (values for values in quantised.get_data_tensors() if values is not None)
    else:
        yield parameter.data


def _forget_fp8_copies(chunks: Sequence[torch.nn.Module]) -> None:
    """Transformer Engine keeps an FP8 copy of each BF16 weight, which the next pass makes anew where there is none."""
    for chunk in chunks:
        for module in chunk.modules():
            copies: Any = getattr(module, "_fp8_workspaces", None)
            if copies:
                copies.clear()


def _gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from (buffer.grad_data for buffer in _grad_buffers(chunk))


def _grad_buffers(chunk: Any) -> Iterator[Any]:
    for name in ("buffers", "expert_parallel_buffers"):
        buffers = getattr(chunk, name, ())
        if isinstance(buffers, list):  # of DDP; a plain module's `buffers` is a method
            yield from buffers


def _remembered(optimizer: Any) -> Iterator[Tensor]:
    """Master weights and moments of every part of the optimizer."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer] if optimizer is not None else []):
        adam = part.optimizer
        for group in adam.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in adam.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]
