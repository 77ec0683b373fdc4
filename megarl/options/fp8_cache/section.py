"""The field `rollout.kv_cache_dtype`."""

from __future__ import annotations

from typing import Literal

from megarl.config.option_sections import AddedField

FP8 = "fp8_e4m3"
MARK = "megarl_kv_scales"
"""An argument of servers by which their processes know that scales are megarl's."""
DESCRIPTION = (
    "How engines keep keys and values: `auto` as `model.dtype`, `fp8_e4m3` in FP8 with scales of the weights' own "
    "(docs/fp8.md). The trainer's stay as they are; `mismatch/*` show the difference."
)
KV_CACHE_DTYPE = AddedField("RolloutConfig", "kv_cache_dtype", Literal["auto", "fp8_e4m3"], "auto", DESCRIPTION)
FIELDS = (KV_CACHE_DTYPE,)
kv_cache_dtype_of = KV_CACHE_DTYPE.of
"""How keys and values are kept by the engines of a section `rollout`."""
