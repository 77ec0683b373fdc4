"""Experts that a hub checkpoint stores together and transposed: here each has tensors of its own, as in other families.

For each layer the hub has `gate_up_proj` `[E, H, 2F]`, gate beside up, and `down_proj` `[E, F, H]`; transformers 5 writes the
same as `[E, 2F, H]` and `[E, H, F]`. Both are read, and the hub's is written. Weight maps, runs and conversions know a gate, an
up and a down projection for each expert, `[F, H]`, `[F, H]` and `[H, F]`. In gpt-oss columns of gate and up alternate, and
there are biases `gate_up_proj_bias` `[E, 2F]` and `down_proj_bias` `[E, H]`. Names and shapes are here, without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megarl.errors import ModelError

_OF_EXPERT = re.compile(
    r"(?P<block>.*\.(?:mlp|feed_forward|layers\.\d+)\.experts\.)(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.(?P<kind>weight|bias)"
)
BLOCKS, SCALES = "_blocks", "_scales"
"""The ends of the names of MXFP4 numbers and of their exponents, which are stored in the place of a tensor of experts."""
_STORED = re.compile(
    r"(?P<block>.*\.(?:mlp|feed_forward|layers\.\d+)\.experts\.)(?P<part>gate_up|down)_proj(?P<kind>|_bias|_blocks|_scales)"
)
_KINDS = {"": "weight", BLOCKS: "weight", "_bias": "bias"}
"""Names of an expert's tensors, by the end of the stored one's; scales are a part of blocks."""


@dataclass(frozen=True)
class ExpertPlace:
    """An expert's tensor is the transposed columns `start:stop:step` of the matrix `expert` in the tensor `stored`."""

    stored: str
    expert: int
    start: int
    stop: int
    step: int = 1

    @property
    def is_bias(self) -> bool:
        """Return whether the tensors are vectors, with no columns to transpose."""
        return self.stored.endswith("_bias")

    @property
    def rows(self) -> int:
        """Rows of the expert's tensor."""
        return -(-(self.stop - self.start) // self.step)


@dataclass(frozen=True)
class FusedExperts:
    """`experts` of hidden size `hidden` and width `ffn`, in every block that has any.

    `alternating`: as gpt-oss has them, a column of the gate before each column of up, with biases, and perhaps as MXFP4. If
    not `transposed`, the hub has them as transformers 5 writes them, and a place says rows in place of columns.
    """

    experts: int
    hidden: int
    ffn: int
    alternating: bool = False
    transposed: bool = True

    def names_of(self, stored: str) -> list[str]:
        """The experts' tensors in a stored one, expert after expert; any other tensor is itself."""
        match = _STORED.fullmatch(stored)
        if match is None or (match["kind"] and not self.alternating):
            return [stored]
        if match["kind"] not in _KINDS:
            return []
        parts, kind = ("gate", "up") if match["part"] == "gate_up" else ("down",), _KINDS[match["kind"]]
        return [f"{match['block']}{expert}.{part}_proj.{kind}" for expert in range(self.experts) for part in parts]

    def place(self, name: str) -> ExpertPlace | None:
        """The place of an expert's tensor; None: the name is no expert's."""
        match = _OF_EXPERT.fullmatch(name)
        if match is None:
            return None
        expert, ffn = int(match["expert"]), self.ffn
        kind = "_bias" if match["kind"] == "bias" else ""
        if match["part"] == "down":
            return ExpertPlace(f"{match['block']}down_proj{kind}", expert, 0, self.hidden)
        stored = f"{match['block']}gate_up_proj{kind}"
        if self.alternating:
            return ExpertPlace(stored, expert, int(match["part"] == "up"), 2 * ffn, 2)
        start, stop = (0, ffn) if match["part"] == "gate" else (ffn, 2 * ffn)
        return ExpertPlace(stored, expert, start, stop)

    def shape(self, stored: str) -> tuple[int, ...]:
        """Shape of a stored tensor, as the hub has it."""
        if stored.endswith("_bias"):
            return (self.experts, self.hidden if stored.endswith("down_proj_bias") else 2 * self.ffn)
        down = stored.endswith("down_proj")
        rows, columns = (self.hidden, self.ffn) if down else (2 * self.ffn, self.hidden)
        return (self.experts, columns, rows) if self.transposed else (self.experts, rows, columns)

    def check(self, stored: str, shape: tuple[int, ...]) -> bool:
        """Return whether the experts in a stored tensor of this shape are transposed, as the hub mostly has them.

        Raises:
            ModelError: it is neither.
        """
        experts, *matrix = expected = self.shape(stored)
        if shape == expected:
            return self.transposed
        if self.alternating or not self.transposed:  # which transformers 5 writes as the hub has them
            raise ModelError(f"tensor '{stored}' has shape {list(shape)}, but config.json implies {list(expected)}")
        if shape != (experts, *reversed(matrix)):
            raise ModelError(
                f"tensor '{stored}' has shape {list(shape)}, but config.json implies {list(expected)} or, as "
                f"transformers 5 writes it, {[experts, *reversed(matrix)]}"
            )
        return False
