"""How a model folder wants its pictures, from the settings of its processor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from megarl.data.media import PictureRules
from megarl.errors import ModelError
from megarl.models.vision import Vision

FILES = {"preprocessor_config.json": None, "processor_config.json": "image_processor"}
"""Where the settings are, and under which field: transformers 4 wrote the first file, 5 the second."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""What transformers normalises by where the settings do not say."""


def picture_rules(folder: str | Path, vision: Vision) -> PictureRules:
    """The rules of a model folder with this tower.

    Raises:
        ModelError: the folder has no such settings, they contradict config.json, or they ask for what megarl does not do.
    """
    file, settings = _settings(Path(folder))
    for field, own in (("patch_size", vision.patch), ("temporal_patch_size", vision.temporal), ("merge_size", vision.merge)):
        if settings.get(field, own) != own:
            raise ModelError(f"'{file}': {field} is {settings[field]!r}, but config.json's vision_config says {own}")
    for field in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if settings.get(field, True) is not True:
            raise ModelError(f"'{file}': {field} is {settings[field]!r}; it must be true, or absent")
    if not math.isclose(settings.get("rescale_factor", 1 / 255), 1 / 255):
        raise ModelError(f"'{file}': rescale_factor is {settings['rescale_factor']!r}; it must be 1/255")
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or 56 * 56
    most = settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280
    if not all(isinstance(n, int) and n > 0 for n in (least, most)) or least > most:
        raise ModelError(f"'{file}': pictures have {least!r} to {most!r} pixels; these must be positive integers in this order")
    mean, std = (_colours(file, settings, *of) for of in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD)))
    return PictureRules(vision.patch, vision.temporal, vision.merge, least, most, mean, std)


def _settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    for name, field in FILES.items():
        file = folder / name
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            found = found.get(field) if field else found
        except (ValueError, AttributeError, OSError) as error:
            raise ModelError(f"'{file}' is not valid JSON: {error}") from None
        if isinstance(found, dict):
            return file, found
    raise ModelError(f"model folder '{folder}' has no preprocessor_config.json, which says how the model wants its pictures")


def _colours(file: Path, settings: dict[str, Any], field: str, default: tuple[float, ...]) -> tuple[float, float, float]:
    values = settings.get(field) or default
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(isinstance(n, int | float) for n in values):
        raise ModelError(f"'{file}': {field} is {values!r}; it must be three numbers")
    return float(values[0]), float(values[1]), float(values[2])
