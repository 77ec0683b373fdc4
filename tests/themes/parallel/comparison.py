"""What the ranks of a parity world gave, compared with what one process of transformers gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.themes.parallel.worlds import MODES

TOLERANCE = 1e-5
"""Relative: of log-probs and entropies in nats of their size or 1, of a gradient's elements to the largest of its tensor."""


def compare(
    expected: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]],
    report: Callable[[str, float, float], None],
    stored: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda exported: exported,
) -> None:
    """Assert that ranks exported the same bytes, and in every mode gave the same values, gradients and norm of them all.

    `expected` has `tensors`, `values` and `gradients`, `answers` are those of `run_family`; `report` is told (mode, deviation
    of the values, of the gradients). `stored` makes of what is exported what a folder has.
    """
    exported = stored(joined(answer["exported"] for answer in answers))
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected["gradients"].values()))
    assert exported.keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name], tensor), name
    for name in answers[0]["modes"]:
        mode = MODES[name]
        gradients = stored(joined(answer["modes"][name]["gradients"] for answer in answers))
        found = deviations(gradients, expected["gradients"], lambda wanted: wanted.abs().max().clamp_min(1e-30))
        of_values = 0.0
        if mode.recompute == "none":
            values = joined(answer["modes"][name]["values"] for answer in answers)
            found |= deviations(values, expected["values"], lambda wanted: wanted.abs().clamp_min(1.0))
            of_values = max(found[index] for index in values)
        report(name, of_values, max(found[tensor] for tensor in expected["gradients"]))
        beyond = {what: deviation for what, deviation in found.items() if deviation > TOLERANCE}
        assert not beyond, f"{name}: {beyond}"
        norms = [answer["modes"][name]["norm"] for answer in answers]
        assert norms == [pytest.approx(norm, rel=TOLERANCE)] * len(norms), name


def joined(parts: Any) -> dict[Any, Tensor]:
    """What the ranks gave, together; nothing may come twice."""
    whole: dict[Any, Tensor] = {}
    for part in parts:
        assert not whole.keys() & part.keys()
        whole |= part
    return whole


def deviations(found: dict[Any, Tensor], expected: dict[Any, Tensor], scale: Callable[[Tensor], Tensor]) -> dict[Any, float]:
    """The largest deviation of each tensor's elements, in units of `scale`; a buffer has no gradient."""
    assert not expected.keys() - found.keys()
    return {name: float(((found[name].double() - wanted) / scale(wanted)).abs().max()) for name, wanted in expected.items()}
