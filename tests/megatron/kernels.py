"""Stands for the kernels of Transformer Engine where megatron-core only asks whether they are there, while configs are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PERMUTATION = (
    "fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)  # fmt: skip


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Have megatron-core find its fused kernels of Transformer Engine."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())
        for name in PERMUTATION:
            patch.setattr(moe_utils, name, object(), raising=False)
        yield
