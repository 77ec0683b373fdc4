"""DeepSeek-V4 in the embedded engine: transformers counts windows of compressed keys from a row's beginning, padded or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OF_WINDOWS = ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate")
"""What a layer of the cache has of each row beside keys, by compressor; transformers does not choose among it."""


def takes_no_padding(model: torch.nn.Module) -> bool:
    """Return whether only sequences of one length may be computed together; if so, have its cache choose rows wholly."""
    config: Any = model.config
    if config.model_type != "deepseek_v4":
        return False
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache

    layer: Any = DeepseekV4HCACache
    if "reorder_cache" not in vars(layer):
        of_keys = layer.reorder_cache

        def reorder_cache(self: Any, beam_idx: Tensor) -> None:
            of_keys(self, beam_idx)
            self.values = self.keys  # which are the same tensor
            for states in (getattr(self, name, {}) for name in OF_WINDOWS):
                states.update({name: rows[beam_idx] for name, rows in states.items() if rows is not None})

        layer.reorder_cache = reorder_cache
    return True
