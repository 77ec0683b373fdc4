"""A row's picture made ready once: opened, turned upright, in RGB, at its final size, and kept as a PNG.

The file is named by a hash of its pixels, so that equal pictures are one file. Knows nothing of tokens or prompts; what is
wrong with a picture is a PictureError that says so of the picture alone.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import xxhash
from PIL import Image, ImageOps

from megarl.data.told import KeptPicture
from megarl.errors import PictureError, describe_value
from megarl.options.pictures.picture_rules import PictureRules
from megarl.system.atomic_files import write_bytes_atomically

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are read. Pillow knows more, some of which start other programs (EPS)."""
LARGEST_PIXELS = 89_478_485
"""Pixels of a picture before it is resized: what Pillow warns of as a decompression bomb."""
LARGEST_RATIO = 200
"""Long side to short side, in transformers' processor."""
PNG_EFFORT = 1
"""zlib's level. Two photographs of a megapixel take 0.07 s each; at level 6 0.2 s, and are 7 and 17 % smaller (Pillow 13)."""

Original = Path | bytes | Image.Image
"""A picture as a row has it: a file, a file's bytes, or decoded by the user's function."""


def original_of(value: Any, folder: str | None) -> Original:
    """The file, bytes or picture that `value` of a row means; relative paths are taken in `folder`, or where the run started.

    `value` is a path, a `file://` or `data:` URL, bytes, a PIL image, or a struct with one of them under `bytes`, `path` or
    `url`, as Hugging Face `datasets` and OpenAI's messages have it.

    Raises:
        PictureError: it is nothing of this kind, or a URL that would have to be fetched.
    """
    if isinstance(value, dict):
        sources = [value[key] for key in ("bytes", "path", "url") if value.get(key) is not None]
        if not sources:
            raise PictureError(f"is {describe_value(value)}, but a struct must have bytes, a path or a url")
        value = sources[0]
    if isinstance(value, Image.Image | Path):
        return Path(folder or "", value) if isinstance(value, Path) else value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str) or not value:
        raise PictureError(f"is {describe_value(value)}, but it must be a path, bytes or a struct of them")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", value)
    if scheme is None:
        return Path(folder or "", value)
    if scheme[1] == "file":
        return Path(folder or "", unquote(urlparse(value).path))
    if scheme[1] == "data":
        return _inline(value)
    if not value[scheme.end() :].startswith("//"):
        return Path(folder or "", value)
    raise PictureError("is a URL, which megarl does not fetch; it must be a path, bytes or a struct of them")


def describe_original(value: Any) -> str:
    """`value` of a row for a sentence: its path, or how many bytes it has."""
    if isinstance(value, dict):
        value = next((value[key] for key in ("path", "url", "bytes") if value.get(key) is not None), None)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes in the row"
    if isinstance(value, Path | str) and not str(value).startswith("data:"):
        return f"'{str(value)[:200]}'"
    return "in the row"


def read_bytes(original: Path | bytes) -> bytes:
    """The bytes of a file.

    Raises:
        PictureError: there is no such file, it cannot be read, or it is empty.
    """
    try:
        content = original.read_bytes() if isinstance(original, Path) else original
    except FileNotFoundError as error:
        raise PictureError(f"is no file ({Path(error.filename).absolute()})") from None
    except (OSError, ValueError) as error:
        raise PictureError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not content:
        raise PictureError("is empty")
    return content


def upright_rgb(original: Original) -> Image.Image:
    """The picture as RGB and as a viewer shows it: turned as its EXIF says, transparent parts white, 16 bits as 8.

    Raises:
        PictureError: it is damaged or cut off, of an unknown format, too large, empty, or has several frames.
    """
    if isinstance(original, Image.Image):
        return _checked_rgb(original)
    content = read_bytes(original)
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            return _checked_rgb(image)
    except PictureError:
        raise
    except Image.DecompressionBombError:
        raise PictureError(f"has more pixels than the {LARGEST_PIXELS} that megarl decodes; it must be made smaller") from None
    except Image.UnidentifiedImageError:
        raise PictureError(f"is not of a format that megarl reads; it must be one of {', '.join(FORMATS)}") from None
    except Exception as error:
        raise PictureError(f"cannot be decoded, it is damaged or cut off: {error}") from error


def final_size(width: int, height: int, rules: PictureRules) -> tuple[int, int]:
    """(width, height) that a picture is resized to, by the rule of the model's processor (transformers, `smart_resize`).

    Both are multiples of `rules.patch * rules.merge`, their product is within the limits, and the ratio of the sides stays
    as near as that allows. A picture of such a size keeps it.

    With `rules.longest_side` it is the size of the filled picture.

    Raises:
        PictureError: the long side is more than 200 times the short one, or the rule finds no size within the limits.
    """
    if rules.longest_side:
        multiple = rules.patch * rules.merge
        shrunk_width, shrunk_height = shrunk_size(width, height, rules)
        return -(-shrunk_width // multiple) * multiple, -(-shrunk_height // multiple) * multiple
    return _within_limits(width, height, rules, 1, grows_first=rules.grows_first)


def shrunk_size(width: int, height: int, rules: PictureRules) -> tuple[int, int]:
    """(width, height) that a picture has before it is filled up, by Kimi's rule (transformers, `navit_resize`).

    A picture that has at most `rules.max_pixels` of whole patches, and no longer side, keeps its size.
    """
    patch, longest = rules.patch, rules.longest_side * rules.patch
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(rules.max_pixels // patch**2 / patches), longest / width, longest / height)
    new_width, new_height = (min(max(1, int(side * scale)), longest) for side in (width, height))
    return new_width, new_height


def final_frame_size(width: int, height: int, frames: int, rules: PictureRules) -> tuple[int, int]:
    """(width, height) that each of the `frames` of a video is resized to, by the rule of Qwen3-VL's processor.

    As `final_size`, but the limits are of all frames together, and a side below one token is enlarged first.

    Raises:
        PictureError: as `final_size`.
    """
    return _within_limits(width, height, rules, frames, grows_first=True)


def _within_limits(width: int, height: int, rules: PictureRules, frames: int, *, grows_first: bool) -> tuple[int, int]:
    original, multiple = f"{width}x{height}", rules.patch * rules.merge
    if grows_first and min(width, height) < multiple:
        grow = max(multiple / height, multiple / width)
        width, height = int(width * grow), int(height * grow)
    if max(width, height) > LARGEST_RATIO * min(width, height):
        raise PictureError(f"is {original} pixels, but a side must be at most {LARGEST_RATIO} times the other")
    # Python rounds halves to the even number, and so does the rule
    new_width, new_height = round(width / multiple) * multiple, round(height / multiple) * multiple
    if frames * new_width * new_height > rules.max_pixels:
        shrink = math.sqrt(frames * height * width / rules.max_pixels)
        new_width, new_height = (max(multiple, math.floor(side / shrink / multiple) * multiple) for side in (width, height))
    elif frames * new_width * new_height < rules.min_pixels:
        grow = math.sqrt(rules.min_pixels / (frames * height * width))
        new_width, new_height = (math.ceil(side * grow / multiple) * multiple for side in (width, height))
    if not rules.min_pixels <= frames * new_width * new_height <= rules.max_pixels:
        of_frames = f" in each of {frames} frames" if frames > 1 else ""
        raise PictureError(
            f"is {original} pixels and would be resized to {new_width}x{new_height}{of_frames}, which are not "
            f"{rules.min_pixels} to {rules.max_pixels} pixels; data.min_pixels and data.max_pixels must be further apart"
        )
    return new_width, new_height


def keep_picture(image: Image.Image, rules: PictureRules, folder: Path, size: tuple[int, int] | None = None) -> KeptPicture:
    """Resize an RGB picture, and write it into the media folder unless it is there; any number of processes may.

    The filter is that of the processor (bicubic, Pillow's). `size`: (width, height) that it gets; None: `final_size`, where the
    rules say so by shrinking it and filling it up with black.

    Raises:
        PictureError: there is no size for it.
    """
    size = size or final_size(*image.size, rules)
    content = shrunk_size(*image.size, rules) if rules.longest_side else size
    if image.size != content:
        image = image.resize(content, Image.Resampling.BICUBIC)
    if content != size:
        filled = Image.new("RGB", size)
        filled.paste(image)
        image = filled
    pixels = image.tobytes()
    digest = xxhash.xxh128_hexdigest(f"{size[0]}x{size[1]}:".encode() + pixels)
    file = folder / f"{digest}.png"
    if not file.is_file():
        written = BytesIO()
        Image.frombytes("RGB", size, pixels).save(written, "PNG", compress_level=PNG_EFFORT)  # without its metadata
        write_bytes_atomically(file, written.getvalue())
    return KeptPicture(digest, *size)


def _inline(url: str) -> bytes:
    """The bytes of `data:image/png;base64,…`."""
    head, _, content = url.partition(",")
    if not head.endswith(";base64"):
        raise PictureError("is a data: URL without base64")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise PictureError(f"is a data: URL whose base64 is damaged: {error}") from None


def _checked_rgb(image: Image.Image) -> Image.Image:
    width, height = image.size
    if not width or not height:
        raise PictureError(f"is {width}x{height} pixels; it must have at least one")
    if width * height > LARGEST_PIXELS:
        raise PictureError(f"is {width}x{height} pixels, more than the {LARGEST_PIXELS} that megarl decodes; make it smaller")
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # the other pictures of an MPO, a camera's JPEG, are previews
        raise PictureError(f"has {frames} frames, but it must have one; keep the one that is meant, or make it a video")
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16") or (upright.mode == "I" and image.format == "PNG"):
        # Pillow's own conversion cuts everything above 255
        grey = np.asarray(upright).astype(np.int64)
        return Image.fromarray(((grey + 128) // 257).clip(0, 255).astype(np.uint8)).convert("RGB")
    if upright.mode in ("I", "F"):
        raise PictureError(f"has 32 bits for each pixel (mode {upright.mode}); it must have 8 or 16 for each colour")
    if upright.has_transparency_data:
        seen = upright.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return upright.convert("RGB")
