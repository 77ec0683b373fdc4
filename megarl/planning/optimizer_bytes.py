"""Bytes of gradients and of Adam's state by what a role's section `megatron` chooses, as megatron-core allocates them.

megatron-core 0.16 and 0.19 (distrib_optimizer.py, optimizer/__init__.py), Transformer Engine 2.20 (optimizers/fused_adam.py).
`main_grads_dtype` allocates nothing in either: gradients are read from DDP's buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
"""Bytes of an element, by torch's names; `uint8` is FP8."""
FLOAT32 = 4


@dataclass(frozen=True)
class StateBytes:
    """Bytes of each element: `gradient` of a weight, `moments` and `master` of an element whose state this rank has.

    `step` is what an optimizer step holds for each of these elements besides, until it ends.
    """

    gradient: int
    moments: int
    master: int
    step: int

    def touched(self, itemsize: int) -> int:
        """Read and written for each of these elements in an optimizer step: gradient, state, and the new weight."""
        return self.gradient + 2 * (self.moments + self.master) + itemsize * (1 if self.master else 2)


def state_bytes(megatron: Mapping[str, Any], itemsize: int, fp8_recipe: str | None = None) -> StateBytes:
    """Bytes of Adam's state for weights of `itemsize` bytes (2: bfloat16), under what a section `megatron` says;
    `fp8_recipe` None: no FP8."""
    gradient = FLOAT32 if megatron.get("grad_reduce_in_fp32", True) else itemsize
    if not megatron.get("use_precision_aware_optimizer", False):
        return StateBytes(gradient, 2 * FLOAT32, FLOAT32 if itemsize < FLOAT32 else 0, _copied(gradient))
    names = [megatron.get(name, "float32") for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")]
    *of_moments, of_master = (SIZES[name] for name in names)
    # Only bfloat16 moments go into the kernel as they are; all others that are not float32 are copied to it for the step.
    step = 0 if names[:2] == ["bfloat16"] * 2 else sum(FLOAT32 for size in of_moments if size < FLOAT32)
    if of_master == FLOAT32 and fp8_recipe not in (None, "delayed"):  # megatron-core keeps these master weights itself
        return StateBytes(gradient, sum(of_moments), FLOAT32 if itemsize < FLOAT32 else 0, step + _copied(gradient))
    has_remainders = megatron.get("store_param_remainders", True) and of_master == FLOAT32 and itemsize < FLOAT32
    master = FLOAT32 - itemsize if has_remainders else of_master
    return StateBytes(gradient, sum(of_moments), master, step + (FLOAT32 if of_master < FLOAT32 else 0))


def _copied(gradient: int) -> int:
    """megatron-core hands Adam gradients in float32."""
    return FLOAT32 if gradient < FLOAT32 else 0
