"""Contradictions among the fields that say how rows show pictures and videos."""

from __future__ import annotations

from megarl.config import Config, SupervisedConfig
from megarl.errors import ConfigError


def check(config: Config | SupervisedConfig) -> None:
    """Refuse limits of pictures that leave no size, and one key for two things; the model's own limits are not known here."""
    data = config.data
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels >= data.max_pixels:
        raise ConfigError.of("data.min_pixels", data.min_pixels, allowed=f"less than data.max_pixels = {data.max_pixels}")
    if data.image_key is not None and data.image_key == data.video_key:
        raise ConfigError.of("data.video_key", data.video_key, allowed="another key than data.image_key, or null")


check_supervised = check
