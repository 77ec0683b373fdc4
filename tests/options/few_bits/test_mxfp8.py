"""MXFP8 against exact arithmetic: exponents of fractions, values rounded by a table of all float8 numbers."""

from __future__ import annotations

import ast
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.options.few_bits.mxfp8 import dequantise_rows, quantise_rows

FLOAT8 = [float(value) for value in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)]
"""The magnitudes from 0 to 448; the byte of each is its place."""


def exponent_of(group: torch.Tensor) -> int:
    """The smallest e, from -127 on, with which the largest magnitude over 2^e is at most 448."""
    largest = Fraction(float(group.double().abs().max()))
    exponent = -127
    while largest > 448 * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def nearest(value: Fraction) -> float:
    """The float8 nearest to a number, of two the one whose byte is even."""
    magnitude = abs(value)
    place = min(range(127), key=lambda n: (abs(Fraction(FLOAT8[n]) - magnitude), n % 2))
    return FLOAT8[place] if value >= 0 else -FLOAT8[place]


def rows_of_every_size() -> torch.Tensor:
    """float32 `[12, 64]`: magnitudes from 1e-30 to 1e30, borders of powers of two, ties, zeros and a group of them."""
    rows = torch.randn(12, 64, generator=torch.Generator().manual_seed(0))
    rows *= torch.logspace(-30, 30, 12, dtype=torch.float32)[:, None]
    rows[0, :32] = 0
    rows[1, 0], rows[1, 1:32] = 448.0, torch.linspace(-18, 18, 31)  # exponent 0: ties of float8 among them
    rows[2, 0], rows[2, 1:32] = 448.00003, 1.0625  # just above: exponent 1
    rows[3, :32], rows[3, 5] = 0.0, -1e-40
    return rows


def test_exponents_and_values_are_those_of_exact_arithmetic() -> None:
    rows = rows_of_every_size()
    values, scales = quantise_rows(rows)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.uint8, (12, 2))
    for row in range(12):
        for group in range(2):
            part = rows[row, 32 * group : 32 * group + 32]
            exponent = exponent_of(part)
            assert int(scales[row, group]) == exponent + 127, (row, group)
            expected = [nearest(Fraction(float(value)) / Fraction(2) ** exponent) for value in part.double()]
            assert values[row, 32 * group : 32 * group + 32].float().tolist() == expected, (row, group)
    assert scales[0, 0] == 0
    assert scales[1, 0] == 127
    assert scales[2, 0] == 128


def test_values_come_back_as_their_product_and_keep_their_bytes() -> None:
    rows = rows_of_every_size()[4:9].bfloat16()
    values, scales = quantise_rows(rows)
    back = dequantise_rows(values, scales)
    expected = values.double() * torch.ldexp(torch.ones(5, 2, dtype=torch.float64), scales.int() - 127).repeat_interleave(32, 1)
    assert torch.equal(back.double(), expected)
    again, scales_again = quantise_rows(back)
    assert torch.equal(dequantise_rows(again, scales_again), back)


def of_sglang(file: str, *functions: str, **names: Any) -> dict[str, Any]:
    """Functions of a file of SGLang's that need torch alone; the packages around it want a GPU's libraries."""
    if (found := find_spec("sglang")) is None or found.origin is None:
        pytest.skip("SGLang is not installed")
    tree = ast.parse((Path(found.origin).parent / file).read_text())
    wanted: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in functions]
    assert len(wanted) == len(functions)
    known: dict[str, Any] = {"torch": torch, "Tuple": tuple, **names}
    exec(compile(ast.Module(wanted, []), file, "exec"), known)
    return known


def test_sglangs_own_reference_makes_and_reads_the_same_bytes() -> None:
    constants = {"MXFP8_BLOCK_SIZE": 32, "MXFP8_E4M3_MAX": 448.0, "MXFP8_VALUE_DTYPE": torch.float8_e4m3fn}
    quantise, dequantise = "_mxfp8_e4m3_quantize_torch", "dequant_mxfp8_to_bf16"
    sglang = of_sglang("kernels/ops/quantization/mxfp8_amd_gfx95.py", quantise, dequantise, **constants)
    rows = rows_of_every_size()[[0, 4, 5, 6, 7, 8, 9, 10]].bfloat16()
    values, scales = quantise_rows(rows)
    theirs, their_scales = sglang[quantise](rows)
    assert torch.equal(scales, their_scales)
    assert torch.equal(values.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(sglang[dequantise](values, scales), dequantise_rows(values, scales).bfloat16())
