"""The state of delayed FP8 scaling in a checkpoint: a pickle per layer, which Transformer Engine reads only if it is told to.

A pickle can run code. Each is looked at first, with an unpickler that knows nothing but what this state is made of.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megarl.errors import CheckpointError

PERMISSION = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""Environment variable without which Transformer Engine, since 2.20, refuses to read such a state."""

_KNOWN = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch", "Size"),
    ("transformer_engine.common.recipe", "DelayedScaling"),
    ("transformer_engine.common.recipe", "Format"),
    ("transformer_engine.common.recipe", "_FormatHelper"),
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
}
_STORAGES = {("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes")}
"""How a tensor's values are stored: as a pickle once more."""


@contextmanager
def permitted(state: Mapping[str, Any], folder: str) -> Iterator[None]:
    """Inside, Transformer Engine reads the pickles among the entries `state` of the checkpoint in `folder`.

    Raises:
        CheckpointError: one of them is no state of FP8 scaling.
    """
    for name, entry in state.items():
        if isinstance(entry, Tensor) and entry.dtype == torch.uint8 and "_extra_state" in name and entry.numel():
            _check(entry.cpu().numpy().tobytes(), name, folder)
    before = os.environ.get(PERMISSION)
    os.environ[PERMISSION] = "1"
    try:
        yield
    finally:
        del os.environ[PERMISSION]
        if before is not None:
            os.environ[PERMISSION] = before


def _check(content: bytes, name: str, folder: str) -> None:
    try:
        _ScalingState(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"'{folder}' is not read, as its '{name}' is no state of FP8 scaling ({error})") from None


class _ScalingState(pickle.Unpickler):
    """Knows tensors, plain values and the recipe of delayed scaling."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STORAGES:
            return _plain_storage
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def _plain_storage(content: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError:  # its text is a page of advice
        raise pickle.UnpicklingError("a tensor in it is made of something else than numbers") from None
