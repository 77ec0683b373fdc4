"""Counts bytes of tensors that are alive at once while code runs, on a device or on tensors without values."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Inside, `peak` is the most bytes alive at once of storages that operators of this thread made.

    What was there before does not count, nor what a kernel allocates and frees by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, is_new=False)
        result = function(*args, **kwargs)
        for tensor in _tensors(result):
            self._meet(tensor, is_new=True)
        return result

    def _meet(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if is_new else 0

        def freed(reference: Any) -> None:
            self._known.pop(key, None)
            self.alive -= size

        self._known[key] = weakref.ref(storage, freed)
        self.alive += size
        self.peak = max(self.peak, self.alive)


def _tensors(of: Any) -> list[Tensor]:
    return [tensor for tensor in tree_iter(of) if isinstance(tensor, Tensor)]
