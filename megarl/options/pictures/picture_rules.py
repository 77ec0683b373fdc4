"""What a model's folder says about pictures: how it wants them, and which tokens stand in their place."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.errors import ModelError

PROCESSORS = {"Qwen2VLImageProcessor": False, "Glm4vImageProcessor": True, "Glm46VImageProcessor": True}
"""The image processors whose sizes and patches `options/pictures/images.py` and `options/pictures/pixels.py` compute: of
all Qwen-VL models, and GLM's.

True: its limits count the pixels of all frames of a patch, and it enlarges small sides first.
"""
PADDING = "Kimi_K25ImageProcessor"
"""The image processor that shrinks pictures alone, fills them up with black, and cuts patches row by row. megarl reads its
settings itself: transformers' own needs torchvision."""
PADDING_DEFAULTS = {"patch_size": 14, "merge_size": 2, "max_patches": 16384, "longest_side": 512}
"""transformers'; `longest_side` is `size.max_height`."""
HUB_SETTINGS = {"patch_size": "patch_size", "merge_kernel_size": "merge_size", "in_patch_limit": "max_patches"}
HUB_SETTINGS |= {"patch_limit_on_one_side": "longest_side", "image_mean": "image_mean", "image_std": "image_std"}
"""What the section `media_proc_cfg` of the hub's settings calls them, and transformers."""
MARKS = (("vision_start_token_id", "vision_end_token_id"), ("image_start_token_id", "image_end_token_id"))
"""config.json's names of the tokens around a picture, in one family or another."""
VIDEO_MARKS = ("video_start_token_id", "video_end_token_id")
"""Those around a video, where they are others."""
TOWER_FIELDS = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size"}
"""Settings of the image processor, and what config.json calls them."""
TIMED_VIDEOS = ("qwen3_vl", "qwen3_vl_moe")
"""Model types whose videos are pairs of frames, each behind its time as text."""
TOKEN_DEFAULTS = {
    "kimi_k25": {
        "image_token_id": 163605, "video_token_id": 163840, "vision_start_token_id": 163602, "vision_end_token_id": 163604
    }
}  # fmt: skip
"""By model type, transformers' ids of tokens that the hub's config.json does not name."""
INSIDE = {"<|media_begin|>": ("image", "<|media_content|>")}
"""What stands between a token that begins a picture and its placeholders: a word, and a further special token."""
VIDEO_PLACEHOLDER = "<|kimi_k25_video_placeholder|>"
"""Stands for a video in prompts of a model whose tokenizer has no token for it."""
BICUBIC = 3
"""PIL's number of the only filter that pictures are resized by."""
COMPUTED = (
    ("resample", BICUBIC),
    ("rescale_factor", 1 / 255),
    ("do_resize", True),
    ("do_rescale", True),
    ("do_normalize", True),
)
"""Settings of image processors, with the only values that megarl computes."""


@dataclass(frozen=True)
class PictureRules:
    """The rules of a model for its pictures: sizes in pixels, and what its colours are normalised by.

    A patch is a square of `patch` pixels in `temporal` frames, and `merge` by `merge` patches are one token. A picture is
    resized to multiples of `patch * merge`, with `min_pixels` to `max_pixels` in all. With `grows_first` one that has a side
    shorter than that is first enlarged until the side has this length (GLM). With a `longest_side`, of so many patches, it is
    only shrunk, to `max_pixels` of whole patches at most, and filled up with black on the right and below (Kimi); its patches
    lie row by row, and each is a square.
    """

    patch: int
    temporal: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    grows_first: bool = False
    longest_side: int = 0


@dataclass(frozen=True)
class PictureTokens:
    """The texts of the special tokens around a picture in a prompt, and the ids of those that are repeated.

    A picture is `start`, `inside`, `image` once for each of its tokens, `end`; two frames of a native video have `video` in
    place of `image`.
    `others` are the marks around videos where they are others, and a token in `inside`.
    """

    image_id: int
    video_id: int
    image: str
    video: str
    start: str
    end: str
    others: tuple[str, ...]
    inside: str = ""

    @property
    def mark(self) -> str:
        """A picture in a text whose placeholder was not repeated yet."""
        return f"{self.start}{self.inside}{self.image}{self.end}"

    @property
    def video_mark(self) -> str:
        """The same for two frames of a video."""
        return f"{self.start}{self.video}{self.end}"

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts that no row may contain."""
        return (self.image, self.video, self.start, self.end, *self.others)


def counts_frames(processor: str) -> bool | None:
    """Return whether the limits of an image processor count the pixels of all frames of a patch; None: megarl does not
    know it."""
    return next((counts for name, counts in PROCESSORS.items() if processor.startswith(name)), None)


def load_picture_rules(folder: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> PictureRules:
    """Read the rules of the model in `folder` for its pictures, by its image processor; other limits than its own are given.

    Raises:
        ModelError: the folder has no image processor, one that megarl does not compute, or one for another tower.
    """
    padding = padding_rules(_settings(folder), max_pixels)
    if padding is not None:
        return _checked_padding(folder, padding, min_pixels)
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ModelError(f"'{folder}' has no image processor that can be loaded: {type(error).__name__}: {reason}") from error
    kind = type(processor).__name__
    by_frames = counts_frames(kind)
    if by_frames is None:
        known = ", ".join([*PROCESSORS, PADDING])
        raise ModelError(f"'{folder}' has the image processor {kind}, which megarl does not know; it must be one of {known}")
    for field, value in COMPUTED:
        if getattr(processor, field) != value:
            raise ModelError(f"'{folder}': its image processor's {field} is {getattr(processor, field)}; it must be {value}")
    tower = _config(folder).get("vision_config") or {}
    for field, name in TOWER_FIELDS.items():
        if tower.get(name, getattr(processor, field)) != getattr(processor, field):
            raise ModelError(
                f"'{folder}': its image processor's {field} is {getattr(processor, field)}, but config.json's tower has "
                f"{name} {tower[name]}"
            )
    limits = [int(processor.size[edge]) for edge in ("shortest_edge", "longest_edge")]
    frames = int(processor.temporal_patch_size) if by_frames else 1
    if any(limit % frames for limit in limits):
        raise ModelError(f"'{folder}': its image processor's size is {limits}, but it must be multiples of {frames} frames")
    rules = PictureRules(
        patch=int(processor.patch_size),
        temporal=int(processor.temporal_patch_size),
        merge=int(processor.merge_size),
        min_pixels=limits[0] // frames,
        max_pixels=limits[1] // frames,
        mean=_colours(processor.image_mean),
        std=_colours(processor.image_std),
        grows_first=by_frames,
    )
    return replace(rules, min_pixels=min_pixels or rules.min_pixels, max_pixels=max_pixels or rules.max_pixels)


def padding_rules(settings: dict[str, Any], max_pixels: int | None = None) -> PictureRules | None:
    """The rules of an image processor that fills pictures up (Kimi), by its settings as transformers or the hub writes them.

    None: it is another one.

    Raises:
        ModelError: it does otherwise than the published ones in a field that is named.
    """
    of_hub = settings.get("media_proc_cfg")
    if not isinstance(of_hub, dict) and settings.get("image_processor_type") != PADDING:
        return None
    given = of_hub if isinstance(of_hub, dict) else settings
    for field, value in COMPUTED if given is settings else (("fixed_output_tokens", None),):
        if given.get(field, value) != value:
            raise ModelError(f"preprocessor_config.json: {field} is {given[field]!r}; it must be {value!r}")
    found = {name: value for name, value in given.items() if value is not None}
    if given is of_hub:
        found = {name: found[hub] for hub, name in HUB_SETTINGS.items() if hub in found}
    elif "size" in found:
        size = {name: value for name, value in dict(found["size"]).items() if value is not None}
        found["longest_side"] = size.get("max_height")
        if size != {"max_height": found["longest_side"], "max_width": found["longest_side"]}:
            raise ModelError(f"preprocessor_config.json: size is {size}; it must be equal max_height and max_width")
    sizes = {name: found.get(name, default) for name, default in PADDING_DEFAULTS.items()}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"preprocessor_config.json: {name} is {value!r}; it must be a positive integer")
    patch, grey = sizes["patch_size"], (0.5, 0.5, 0.5)
    return PictureRules(
        patch=patch,
        temporal=1,
        merge=sizes["merge_size"],
        min_pixels=1,
        max_pixels=max_pixels or sizes["max_patches"] * patch**2,
        mean=_colours(found.get("image_mean", grey)),
        std=_colours(found.get("image_std", grey)),
        longest_side=sizes["longest_side"],
    )


def _checked_padding(folder: str | Path, rules: PictureRules, min_pixels: int | None) -> PictureRules:
    if min_pixels is not None:
        raise ModelError(
            f"data.min_pixels is {min_pixels}; it must be null: the image processor of '{folder}' enlarges no picture"
        )
    tower = _config(folder).get("vision_config") or {}
    kernel = tower.get("merge_kernel_size") or [rules.merge] * 2
    if tower.get("patch_size", rules.patch) != rules.patch or list(kernel) != [rules.merge] * 2:
        raise ModelError(
            f"'{folder}': its image processor has patches of {rules.patch} pixels, {rules.merge} by {rules.merge} of them a "
            f"token, but config.json's tower has patch_size {tower.get('patch_size')} and merge_kernel_size {kernel}"
        )
    return rules


def _settings(folder: str | Path) -> dict[str, Any]:
    """Settings of a folder's image processor, which newer versions of transformers write into those of all processors."""
    own = _read_json(Path(folder) / "processor_config.json").get("image_processor")
    return own if isinstance(own, dict) else _read_json(Path(folder) / "preprocessor_config.json")


def load_video_rules(folder: str | Path, pictures: PictureRules) -> PictureRules:
    """Read the rules of the model in `folder` for its videos, by its video processor; the limits are of all frames together.

    `pictures` are its rules for pictures, which must be the same but for the limits.

    Raises:
        ModelError: the model has no videos with times as text (Qwen3-VL), or its processor does otherwise.
    """
    family = _config(folder).get("model_type")
    if family not in TIMED_VIDEOS:
        raise ModelError(
            f"data.video is 'native', which '{folder}' ({family}) has not in megarl; it must be 'frames', or the model one of "
            f"{', '.join(TIMED_VIDEOS)}"
        )
    processor = _read_json(Path(folder) / "processor_config.json").get("video_processor")
    processor = processor or _read_json(Path(folder) / "video_preprocessor_config.json")
    size = processor.get("size") or {}
    if not isinstance(size.get("shortest_edge"), int) or not isinstance(size.get("longest_edge"), int):
        raise ModelError(
            f"data.video is 'native', but '{folder}' has no video_preprocessor_config.json with size.shortest_edge and "
            "size.longest_edge; copy it from the model's hub folder"
        )
    rules = replace(
        pictures,
        patch=processor.get("patch_size", pictures.patch),
        temporal=processor.get("temporal_patch_size", pictures.temporal),
        merge=processor.get("merge_size", pictures.merge),
        mean=_colours(processor.get("image_mean", pictures.mean)),
        std=_colours(processor.get("image_std", pictures.std)),
    )
    if rules != pictures or processor.get("cap_pixels_per_frame"):
        raise ModelError(
            f"'{folder}': its video processor has other patches or colours than its image processor, or cap_pixels_per_frame; "
            "data.video must be 'frames'"
        )
    return replace(rules, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])


def load_picture_tokens(folder: str | Path, tokenizer: Any) -> PictureTokens:
    """The tokens that stand for pictures in prompts to the model in `folder`.

    Raises:
        ModelError: config.json names none, or other tokens than the tokenizer has.
    """
    config = _config(folder)
    config = {**TOKEN_DEFAULTS.get(str(config.get("model_type")), {}), **config}
    texts: dict[str, str] = {}
    marks = next((pair for pair in MARKS if pair[0] in config), MARKS[0])
    for name in ("image_token_id", *marks, "video_token_id", *(name for name in VIDEO_MARKS if name in config)):
        if not isinstance(config.get(name), int):
            raise ModelError(f"'{folder}/config.json' has no {name}, but a model that sees must have one")
        token = tokenizer.convert_ids_to_tokens(config[name])
        if name == "video_token_id" and token is None and config.get("model_type") in TOKEN_DEFAULTS:
            texts[name] = VIDEO_PLACEHOLDER
            continue
        if token is None or token not in tokenizer.get_added_vocab():
            raise ModelError(f"'{folder}/config.json' has {name} {config[name]}, which is no special token of the tokenizer")
        texts[name] = str(token)
    image, start, end, video, *others = texts.values()
    word, further = INSIDE.get(start, ("", ""))
    others += [further] if further else []
    ids = int(config["image_token_id"]), int(config["video_token_id"])
    return PictureTokens(*ids, image, video, start, end, tuple(others), inside=word + further)


def _config(folder: str | Path) -> dict[str, Any]:
    return _read_json(Path(folder) / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise ModelError(f"'{file}' is not valid JSON: {error}") from None
    return config if isinstance(config, dict) else {}


def _colours(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue
