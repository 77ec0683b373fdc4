"""Processors of this machine: whether it has a GPU, and whether its processor multiplies bfloat16. Without torch."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}
"""Of x86: without one of these, products in bfloat16 are slower than in float32."""


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
