"""One rank of a model that sees, with an error planted in it or under another layer spec."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megarl.config.layout import Layout
from megarl.data.stream import Unit
from tests.themes.parallel.worlds import run_family


def run_with_error(
    rank: int, world_size: int, error: str | None, folder: Path, units: list[Unit], media_folder: Path
) -> dict[str, Any]:
    """`run_family` packed, without recomputation, and with one of: windows of another size in the tower, the axes of rotary
    angles in another order, deepstack's features behind each other's layers, patches of a token or rows of the table of
    positions exchanged (GLM), queries and keys in the hub's order, or height and width of pictures exchanged (Kimi).
    """
    from megarl.models.vision import Mrope
    from megarl.options.pictures import hub_layout, model_part
    from megarl.options.pictures import tower as tower_module
    from megarl.options.pictures.tower import SeeingModel

    with_pictures, axes, tower = SeeingModel._with_pictures, Mrope.axes, model_part.build_tower

    def upside_down(model: SeeingModel, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        merged, added = with_pictures(model, hidden)
        return merged, added if added is None else added.flip(0)

    def wide_windows(*given: Any, **named: Any) -> Any:
        found = tower(*given, **named)
        found.window_size *= 2
        return found

    def exchanged_patches(*given: Any, **named: Any) -> Any:
        found = tower(*given, **named)
        found.downsample.register_forward_pre_hook(lambda module, inputs: (inputs[0].mT,))
        return found

    def exchanged_places(*given: Any, **named: Any) -> Any:
        found = tower(*given, **named)
        embeddings = found.embeddings
        forward = embeddings.forward
        embeddings.forward = lambda x, lengths, shapes, rows, columns: forward(x, lengths, shapes, columns, rows)
        return found

    look = tower_module.look

    def exchanged_sides(visual: Any, vision: Any, patches: Tensor, grids: Tensor) -> list[Tensor]:
        return look(visual, vision, patches, grids[:, [0, 2, 1]])

    class Unordered(hub_layout._Part):
        def __init__(self, whole: Any, number: int, heads: int | None) -> None:
            super().__init__(whole, number, None)

    errors: dict[str | None, Any] = {
        None: nullcontext(),
        "windows": patch.object(model_part, "build_tower", wide_windows),
        "sections": patch.object(Mrope, "axes", lambda mrope: axes(mrope)[::-1]),
        "convolution": patch.object(model_part, "build_tower", exchanged_patches),
        "position table": patch.object(model_part, "build_tower", exchanged_places),
        "pairs": patch.object(hub_layout, "_Part", Unordered),
        "sides": patch.object(tower_module, "look", exchanged_sides),
        "deepstack": patch.object(SeeingModel, "_with_pictures", upside_down),
    }
    with errors[error]:
        return run_family(rank, world_size, folder, Layout(), units, media_folder, ["packed"])


def run_spec(rank: int, world_size: int, spec: str, folder: Path, units: list[Unit], media_folder: Path) -> dict[str, Any]:
    """`run_family` packed under a layer spec, and `pictures`: the first files of those that the tower saw, by micro-batch."""
    from megarl.options.pictures.tower import SeeingModel

    seen: list[list[str]] = []
    look = SeeingModel._look

    def noted(model: SeeingModel, shown: Any) -> Any:
        seen.append([picture.digests[0] for picture in shown.pictures])
        return look(model, shown)

    with patch.object(SeeingModel, "_look", noted):
        answer = run_family(rank, world_size, folder, Layout(), units, media_folder, ["packed"], spec)
    return answer | {"pictures": seen[: len(seen) // 2]}
