"""Processors of this machine: whether it has a GPU, and whether its processor multiplies bfloat16. Without torch."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}
"""Of x86: without one of these, products in bfloat16 are slower than in float32."""


def slow_bfloat16(dtype: str) -> list[str]:
    """A sentence for a run of `dtype` that would compute on this machine's processor in bfloat16, where that is slow."""
    if dtype != "bfloat16" or computes_bfloat16():
        return []
    return [
        "warning: model.dtype is 'bfloat16', which this machine computes more slowly than float32: it has neither a GPU nor a "
        "processor with AVX512_BF16 or AMX; set model.dtype to 'float32' if the run computes here"
    ]


def computes_bfloat16() -> bool:
    """Return whether this machine has an NVIDIA GPU, or a processor with instructions for bfloat16 (AVX512_BF16 or AMX)."""
    if (PROC / "driver/nvidia/version").exists():
        return True
    try:
        lines = (PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not BFLOAT16_FLAGS.isdisjoint(flags)
