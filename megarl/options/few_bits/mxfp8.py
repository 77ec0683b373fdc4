"""MXFP8 weights: float8 with a power of two for each 32 columns of a row, as SGLang's `mxfp8` checkpoints store them.

A weight is `float8_e4m3fn` `[R, C]`, its `weight_scale_inv` uint8 `[R, C / 32]`: exponents plus 127 (E8M0 of OCP Microscaling
Formats 1.0). An exponent is rounded up, so that no number is beyond float8, as SGLang, Transformer Engine and NVIDIA's recipe
have it; the specification's own rounds down and lets numbers saturate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.options.few_bits.formats import MX_GROUP
from megarl.options.few_bits.fp8_blocks import LARGEST

_BIAS = 127


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `[R, C]`, C a multiple of 32, to float8_e4m3fn `[R, C]` and their exponents plus 127, uint8 `[R, C / 32]`.

    The exponent is the smallest with which the group's largest magnitude is at most 448; it is at least -127, as of zeros.
    """
    groups = rows.float().unflatten(1, (-1, MX_GROUP))
    mantissa, exponent = torch.frexp(groups.abs().amax(2) / LARGEST)  # mantissa in [0.5, 1): exactly 0.5 is a power of two
    exponent = torch.where(mantissa == 0, -_BIAS, exponent - (mantissa == 0.5).int()).clamp(min=-_BIAS)
    values = torch.ldexp(groups, -exponent[..., None]).flatten(1)
    return values.to(torch.float8_e4m3fn), (exponent + _BIAS).to(torch.uint8)


def dequantise_rows(rows: Tensor, scales: Tensor) -> Tensor:
    """The float32 values of quantised rows `[R, C]` with their own `scales` `[R, C / 32]`."""
    return torch.ldexp(rows.float().unflatten(1, (-1, MX_GROUP)), scales.int()[..., None] - _BIAS).flatten(1)
