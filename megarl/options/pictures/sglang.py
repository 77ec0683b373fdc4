"""Changes that SGLang's servers would make to pictures that megarl has brought to their final size (0.5.23)."""

from __future__ import annotations

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.models.registry import sees
from megarl.options.pictures.picture_rules import load_picture_rules
from megarl.options.pictures.sound_reader import hearing_of


def check_servers(config: Config, platform: str) -> None:
    """Refuse limits beyond the model folder's own: SGLang would resize pictures again that have their final size.

    It takes other limits (`mm_process_config`), but then makes its own ids of the prompt's text (0.5.23: it counts a picture's
    tokens by the folder's limits, and gives up keeping the ids that it was sent when the count differs).

    Raises:
        ConfigError: names the limit.
    """
    if not sees(config.model.path) or hearing_of(config.model.path) is not None:
        return
    rules, data = load_picture_rules(config.model.path), config.data
    for field, value, beyond in (
        ("min_pixels", data.min_pixels, rules.min_pixels), ("max_pixels", data.max_pixels, rules.max_pixels)
    ):  # fmt: skip
        if value is not None and not rules.min_pixels <= value <= rules.max_pixels:
            reason = f"SGLang does not do: the model folder's preprocessor_config.json says {beyond}"
            allowed = f"from {rules.min_pixels} to {rules.max_pixels}"
            raise ConfigError.of(f"data.{field}", value, reason, allowed=allowed)
