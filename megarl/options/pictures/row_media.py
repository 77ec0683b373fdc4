"""The reader of rows' pictures for a model that sees, or of their sounds for one that hears, for `data/row_media.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from megarl.config.sections import PictureFields
from megarl.errors import DataError
from megarl.models.registry import sees
from megarl.options.pictures.picture_reader import PictureReader
from megarl.options.pictures.picture_rules import load_picture_rules, load_picture_tokens, load_video_rules
from megarl.options.pictures.picture_settings import PictureSettings
from megarl.options.pictures.sound_reader import hearing_of, open_sounds


def open_media(
    settings: PictureFields, model_folder: str, tokenizer: Any, run_folder: str | Path | None
) -> PictureReader | None:
    """The reader of rows for the model in `model_folder`; None: it takes no pictures.

    `run_folder` None: of no run; without `settings.media_folder`, a new temporary folder keeps the pictures.

    Raises:
        ModelError: the model takes pictures, and its folder does not say how.
        DataError: the limits leave no size.
    """
    if not sees(model_folder):
        return None
    if run_folder is None and settings.media_folder is None:
        settings = settings.model_copy(update={"media_folder": tempfile.mkdtemp(prefix="megarl-media-")})
    if (hearing := hearing_of(model_folder)) is not None:
        return open_sounds(settings, model_folder, hearing, tokenizer, settings.kept_in(str(run_folder)))
    rules = load_picture_rules(model_folder, settings.min_pixels, settings.max_pixels)
    smallest = (rules.patch * rules.merge) ** 2
    if not rules.min_pixels <= rules.max_pixels or rules.max_pixels < smallest:
        raise DataError(
            f"pictures of {rules.min_pixels} to {rules.max_pixels} pixels are impossible for '{model_folder}'; data.max_pixels "
            f"must be at least data.min_pixels and {smallest}, the pixels of one token"
        )
    tokens = load_picture_tokens(model_folder, tokenizer)
    videos = load_video_rules(model_folder, rules) if settings.video == "native" else None
    return PictureReader(settings, PictureSettings(rules, tokens, settings.kept_in(str(run_folder)), videos))
