"""Pictures that a run's prompts are assumed to show: given, read of the first rows, or as large as the config allows.

What reads pictures is imported by those who see alone: a plan is made in less time than their libraries take to load.
"""

from __future__ import annotations

import json
from itertools import islice
from math import ceil, prod
from pathlib import Path
from typing import Any

from megarl.config import AnyConfig
from megarl.config.questions import MEAN_SHARE
from megarl.config.sources import FILE_SOURCES
from megarl.data.micro_batches import Grid
from megarl.errors import ConfigError, MegarlError
from megarl.models.vision import Vision
from megarl.options.pictures.hearing import Hearing
from megarl.options.pictures.picture_rules import PictureRules, counts_frames, padding_rules
from megarl.planning.prompt_pictures import NO_PICTURES, PromptPictures

ROWS = 32
"""Rows whose pictures are looked at."""
ASSUMED_FRAMES = 3000
"""Frames of 10 ms in the longest sound of a prompt."""
UNLIMITED = 10**9
LONGEST = "the longest prompt"
LIMITS = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
"""In the settings of an image processor: as older versions of transformers write them, and as newer ones do in `size`."""


def pictures_shown(
    config: AnyConfig, vision: Vision, per_prompt: int | None, pixels: float | None, prompt: float | None
) -> PromptPictures:
    """The pictures of prompts of a model that sees; see `pictures_of` in `planning/prompt_pictures.py`."""
    if isinstance(vision, Hearing):
        return _sounds(config, vision, per_prompt, pixels, prompt)
    rules, limit = _rules(config, vision)
    if per_prompt is not None or pixels is not None:
        from megarl.options.pictures.picture_sizes import square_grid

        grids = (square_grid(pixels or rules.max_pixels, rules),) * (1 if per_prompt is None else per_prompt)
        tokens = sum(map(prod, grids)) // vision.merge**2
        if tokens > config.longest_parts[0]:
            raise ConfigError(
                f"the pictures of a prompt would have {tokens:,} tokens, but the longest prompt has "
                f"{config.longest_parts[0]:,}; --pictures-per-prompt or --picture-pixels must be smaller"
            )
        return PromptPictures((grids,), grids, _stated(grids, rules, "as given"))
    return _of_rows(config, rules) or _largest(config, rules, limit, prompt)


def _sounds(
    config: AnyConfig, hearing: Hearing, per_prompt: int | None, pixels: float | None, prompt: float | None
) -> PromptPictures:
    """A sound of 30 s for each prompt, or as long as the longest prompt allows."""
    if per_prompt is not None or pixels is not None:
        raise ConfigError("--pictures-per-prompt and --picture-pixels are for models that see; one that hears has one sound")
    most = min(hearing.tokens_of(ASSUMED_FRAMES), config.longest_parts[0])
    mean = max(1, min(most, int(most * MEAN_SHARE if prompt is None else prompt)))
    stated = f"1 sound for each prompt, of {mean:,} tokens, assumed, at most {most:,}"
    return PromptPictures((((1, 1, mean),),), ((1, 1, most),), stated)


def _rules(config: AnyConfig, vision: Vision) -> tuple[PictureRules, str]:
    """Sizes of pictures, and which of the limits counts: the config's, the model's, or the longest prompt's."""
    data, settings = config.data, _settings(config.model.path)
    padding = padding_rules(settings)
    by_frames = counts_frames(str(settings.get("image_processor_type"))) or False
    of_model = _limits(settings, vision.temporal if by_frames else 1) if padding is None else (1, padding.max_pixels)
    of_token = (vision.patch * vision.merge) ** 2
    limits = {
        "data.max_pixels": data.max_pixels or UNLIMITED,
        "preprocessor_config.json": UNLIMITED if data.max_pixels else of_model[1] or UNLIMITED,
        LONGEST: config.longest_parts[0] * of_token,
    }
    least = min(data.min_pixels or of_model[0] or of_token, min(limits.values()))
    name = min(limits, key=lambda limit: limits[limit])
    colours = (0.0, 0.0, 0.0)
    sizes = (vision.patch, vision.temporal, vision.merge, least, limits[name])
    return PictureRules(
        *sizes, colours, colours, grows_first=by_frames, longest_side=padding.longest_side if padding is not None else 0
    ), name


def _settings(folder: str) -> dict[str, Any]:
    """Settings of the model's image processor; none where the folder does not have them."""
    try:
        settings = json.loads((Path(folder) / "preprocessor_config.json").read_text())
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _limits(settings: dict[str, Any], frames: int) -> tuple[int | None, int | None]:
    """(fewest, most) pixels of a picture, whose limits count it `frames` times; None where the settings do not say."""
    section = settings.get("size")
    size: dict[str, Any] = section if isinstance(section, dict) else {}
    limits = [settings.get(name) or size.get(edge) for name, edge in LIMITS]
    least, most = (value // frames if isinstance(value, int) else None for value in limits)
    return least, most


def _of_rows(config: AnyConfig, rules: PictureRules) -> PromptPictures | None:
    """Pictures of the first rows, where they are in a file that can be read; a user's functions are not called for a plan."""
    source, data = config.data.train, config.data
    if source.source not in FILE_SOURCES or source.path is None or not Path(source.path).exists():
        return None
    from megarl.data.prompts import rows_of
    from megarl.options.pictures.picture_sizes import grids_of_row

    keys = [key for name in ("prompt_key", "messages_key") if (key := getattr(data, name, None)) is not None]
    try:
        rows = (row for row in rows_of(source) if row is not None)
        row_grids = tuple(grids_of_row(row, data, keys, rules) for row in islice(rows, ROWS))
    except MegarlError:
        return None  # the run says what is wrong with them
    if not row_grids:
        return None
    shown = [grid for grids in row_grids for grid in grids]
    many = f"{len(shown) / len(row_grids):,.3g} for each prompt"
    pixels = sum(map(prod, shown)) * rules.patch**2 / max(1, len(shown))
    stated = f"{many} of {pixels:,.0f} pixels, by the first {len(row_grids)} rows of '{source.path}'" if shown else "none"
    return PromptPictures(row_grids, max(row_grids, key=lambda grids: sum(map(prod, grids))), stated)


def _largest(config: AnyConfig, rules: PictureRules, limit: str, prompt: float | None) -> PromptPictures:
    """One picture for each prompt, or the frames of a video where the config names a key of videos and none of pictures."""
    data, of_token = config.data, (rules.patch * rules.merge) ** 2
    named = data.model_fields_set
    frames = data.max_frames if "video_key" in named and "image_key" not in named and data.video_key else 1
    if frames == 1 and data.image_key is None:
        return NO_PICTURES
    of_longest = config.longest_parts[0] * of_token / frames
    from megarl.options.pictures.picture_sizes import square_grid

    pixels, limit = min((rules.max_pixels, limit), (of_longest, LONGEST))
    most = (square_grid(pixels, rules),) * frames
    of_prompt = UNLIMITED if prompt is None else prompt * of_token / frames
    mean = (square_grid(min(pixels * MEAN_SHARE, of_prompt), rules),) * frames
    return PromptPictures((mean,), most, f"{_stated(mean, rules, 'assumed')}, at most {pixels:,.0f} ({limit})")


def _stated(grids: tuple[Grid, ...], rules: PictureRules, how: str) -> str:
    pixels = prod(grids[0]) * rules.patch**2 if grids else 0
    return f"{len(grids)} for each prompt, of {pixels:,} pixels, {how}"


def prompts_at_once(config: AnyConfig, max_tokens: int, response: float, *, of_reference: bool) -> int:
    """Number of different prompts of the longest kind that a micro-batch shows, whose responses are of mean length."""
    members = _group(config) if _shares(config, of_reference=of_reference) else 1
    return max(1, int(max_tokens // (config.longest_parts[0] + members * response)))


def prompts_computed(
    config: AnyConfig, sequences: float, max_tokens: int, prompt: float, response: float, *, of_reference: bool
) -> float:
    """Number of times that the pictures of a prompt are computed in a pass over `sequences`, all prompts together.

    A micro-batch computes each picture once, and has as many responses of a group as fit into it.
    """
    group, shares = _group(config), _shares(config, of_reference=of_reference)
    fit = (max_tokens - prompt) // response if shares else max_tokens // (prompt + response)
    return sequences / group * ceil(group / min(group, max(1, int(fit))))


def _group(config: AnyConfig) -> int:
    return config.sampling.samples_per_prompt if config.sampling is not None else 1


def _shares(config: AnyConfig, *, of_reference: bool) -> bool:
    """Return whether responses of a prompt lie in one micro-batch behind it; under other layers that is not in the plan."""
    return of_reference and config.policy.share_prefix is not False
