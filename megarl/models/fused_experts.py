"""Experts that a hub checkpoint stores together and transposed: here each has tensors of its own, as in other families.

For each layer the hub has `gate_up_proj` `[E, H, 2F]`, gate beside up, and `down_proj` `[E, F, H]`; transformers 5 writes the
same as `[E, 2F, H]` and `[E, H, F]`. Both are read, and the hub's is written. Weight maps, runs and conversions know a gate, an
up and a down projection for each expert, `[F, H]`, `[F, H]` and `[H, F]`. Names and shapes are here, without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megarl.errors import ModelError

_OF_EXPERT = re.compile(r"(?P<block>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
_STORED = re.compile(r"(?P<block>.*\.mlp\.experts\.)(?P<part>gate_up|down)_proj")


@dataclass(frozen=True)
class ExpertPlace:
    """An expert's tensor is the transposed columns `start:stop` of the matrix `expert` in the tensor `stored`."""

    stored: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class FusedExperts:
    """`experts` of hidden size `hidden` and width `ffn`, in every block that has any."""

    experts: int
    hidden: int
    ffn: int

    def names_of(self, stored: str) -> list[str]:
        """The experts' tensors in a stored one, expert after expert; any other tensor is itself."""
        match = _STORED.fullmatch(stored)
        if match is None:
            return [stored]
        parts = ("gate", "up") if match["part"] == "gate_up" else ("down",)
        return [f"{match['block']}{expert}.{part}_proj.weight" for expert in range(self.experts) for part in parts]

    def place(self, name: str) -> ExpertPlace | None:
        """Where an expert's tensor is; None: the name is no expert's."""
        match = _OF_EXPERT.fullmatch(name)
        if match is None:
            return None
        expert, ffn = int(match["expert"]), self.ffn
        if match["part"] == "down":
            return ExpertPlace(f"{match['block']}down_proj", expert, 0, self.hidden)
        start, stop = (0, ffn) if match["part"] == "gate" else (ffn, 2 * ffn)
        return ExpertPlace(f"{match['block']}gate_up_proj", expert, start, stop)

    def shape(self, stored: str) -> tuple[int, int, int]:
        """Of a stored tensor, as the hub has it."""
        down = stored.endswith("down_proj")
        return (self.experts, self.ffn, self.hidden) if down else (self.experts, self.hidden, 2 * self.ffn)

    def check(self, stored: str, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of this shape is as the hub has it; False: as transformers 5 writes it.

        Raises:
            ModelError: it is neither.
        """
        experts, rows, columns = self.shape(stored)
        if shape == (experts, rows, columns):
            return True
        if shape != (experts, columns, rows):
            raise ModelError(
                f"tensor '{stored}' has shape {list(shape)}, but config.json implies {[experts, rows, columns]} or, as "
                f"transformers 5 writes it, {[experts, columns, rows]}"
            )
        return False
