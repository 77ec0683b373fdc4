"""A picture is opened as a viewer shows it, resized as transformers does, and kept once, whoever keeps it at the same time."""

from __future__ import annotations

import struct
import subprocess
import sys
import warnings
import zlib
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_resize
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from megarl.errors import PictureError
from megarl.options.pictures import images
from megarl.options.pictures.images import final_size, keep_picture, upright_rgb
from megarl.options.pictures.picture_rules import PictureRules
from tests.data.seeing_folders import encoded, picture

RULES = PictureRules(14, 2, 2, 56 * 56, 28 * 28 * 64, (0.48, 0.45, 0.40), (0.26, 0.26, 0.27))


def _seen(content: Any) -> np.ndarray[Any, Any]:
    return np.asarray(upright_rgb(content))


# sizes -----------------------------------------------------------------------------------------------------------------


@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    patch=st.sampled_from([14, 16]),
    least=st.integers(1, 40_000),
    more=st.integers(1, 4_000_000),
    of_glm=st.booleans(),
)
@example(width=5, height=1005, patch=14, least=1, more=4_000_000, of_glm=True)  # 200.9 times, 200 once it is enlarged
def test_sizes_are_those_of_transformers_wherever_its_size_is_within_the_limits(
    width: int, height: int, patch: int, least: int, more: int, of_glm: bool
) -> None:
    rules = replace(RULES, patch=patch, min_pixels=least, max_pixels=least + more, grows_first=of_glm)
    try:
        if of_glm:  # which counts the pixels of both frames of a patch
            expected = glm_resize(2, height, width, 2, 2 * patch, 2 * least, 2 * (least + more))[::-1]
        else:
            expected = smart_resize(height, width, 2 * patch, rules.min_pixels, rules.max_pixels)[::-1]
    except ValueError:
        with pytest.raises(PictureError, match=f"is {width}x{height} pixels, but a side must be at most 200 times the other"):
            final_size(width, height, rules)
        return
    if rules.min_pixels <= expected[0] * expected[1] <= rules.max_pixels:
        assert final_size(width, height, rules) == expected
        assert final_size(*expected, rules) == expected, "who resizes again changes nothing"
    else:
        with pytest.raises(PictureError, match=f"would be resized to {expected[0]}x{expected[1]}, which are not"):
            final_size(width, height, rules)


def test_a_picture_is_resized_as_transformers_does(tmp_path: Path) -> None:
    image = picture(333, 111)
    kept = keep_picture(image, RULES, tmp_path)
    assert (kept.width, kept.height) == (336, 112)
    with Image.open(tmp_path / f"{kept.digest}.png") as written:
        assert (written.format, written.mode, written.size) == ("PNG", "RGB", (336, 112))
        np.testing.assert_array_equal(np.asarray(written), np.asarray(image.resize((336, 112), Image.Resampling.BICUBIC)))


# the media folder --------------------------------------------------------------------------------------------------------


def test_equal_pictures_are_one_file_and_others_are_others(tmp_path: Path) -> None:
    image = picture(84, 56)
    again = Image.open(BytesIO(encoded(image, compress_level=9)))
    again.info["comment"] = "x"
    first, second = keep_picture(image, RULES, tmp_path), keep_picture(again.convert("RGB"), RULES, tmp_path)
    assert first == second
    # as many bytes, in another shape
    turned = Image.frombytes("RGB", (56, 84), image.tobytes())
    assert keep_picture(turned, RULES, tmp_path).digest != first.digest
    assert len([*tmp_path.iterdir()]) == 2


def test_a_kept_file_is_not_written_again(tmp_path: Path) -> None:
    kept = keep_picture(picture(84, 56), RULES, tmp_path)
    file = tmp_path / f"{kept.digest}.png"
    before = file.stat().st_mtime_ns, file.stat().st_ino
    assert keep_picture(picture(84, 56), RULES, tmp_path) == kept
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before


KEEPER = """
import sys, numpy as np
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from PIL import Image
from megarl.options.pictures.images import keep_picture
from megarl.options.pictures.picture_rules import PictureRules

rules = PictureRules(14, 2, 2, 56 * 56, 28 * 28 * 64, (0.48, 0.45, 0.40), (0.26, 0.26, 0.27))
def keep(seed):
    pixels = np.random.default_rng(seed % 5).integers(0, 256, (84, 112, 3), dtype=np.uint8)
    return keep_picture(Image.fromarray(pixels), rules, Path(sys.argv[1])).digest
with ThreadPoolExecutor(4) as threads:
    print(*threads.map(keep, range(60)))
"""


def test_processes_and_threads_may_keep_the_same_pictures_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEEPER, str(tmp_path)]
    keepers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    first, *others = [keeper.communicate(timeout=120)[0].split() for keeper in keepers]
    assert [keeper.returncode for keeper in keepers] == [0, 0, 0]
    assert len(first) == 60
    assert all(one == first for one in others)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted({f"{digest}.png" for digest in first})
    for seed, digest in enumerate(first[:5]):
        with Image.open(tmp_path / f"{digest}.png") as written:
            np.testing.assert_array_equal(np.asarray(written), np.asarray(picture(112, 84, seed)))


# what is seen ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_as_its_exif_says(orientation: int) -> None:
    """The eight orientations of EXIF 2.32, undone by hand."""
    upright = np.asarray(picture(30, 20))
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(_seen(encoded(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)), upright)


def test_what_is_transparent_is_white() -> None:
    pixels = np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 0, 0, 51]]], dtype=np.uint8)
    assert _seen(encoded(Image.fromarray(pixels))).tolist() == [[[10, 20, 30], [255, 255, 255], [204, 204, 204]]]
    grey = np.array([[[100, 255], [100, 0]]], dtype=np.uint8)
    assert _seen(encoded(Image.fromarray(grey, "LA"))).tolist() == [[[100] * 3, [255] * 3]]
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert _seen(encoded(palette, transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    assert _seen(encoded(palette)).tolist() == [[[10, 20, 30], [40, 50, 60]]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_become_eight(kind: str) -> None:
    values = np.array([[0, 127, 128, 129, 257, 32767, 65535]], dtype=np.uint16)
    expected = [0, 0, 0, 1, 1, 127, 255]  # the nearest of 257 steps
    assert _seen(encoded(Image.fromarray(values), kind)).tolist() == [[[value] * 3 for value in expected]]


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = picture(20, 10).convert(mode)
    content = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
    np.testing.assert_array_equal(_seen(content), np.asarray(image.convert("RGB")))


def test_a_jpeg_in_cmyk_shows_its_colours() -> None:
    colours = Image.new("RGB", (16, 16), (200, 100, 50))
    seen = _seen(encoded(colours.convert("CMYK"), "JPEG", quality=100))
    assert np.abs(seen.astype(int) - [200, 100, 50]).max() <= 3


def test_a_cameras_jpeg_with_a_preview_is_one_picture() -> None:
    shot = encoded(picture(20, 10), "MPO", save_all=True, append_images=[picture(10, 5)])
    with Image.open(BytesIO(shot)) as image:
        assert (image.format, image.n_frames) == ("MPO", 2)  # type: ignore[attr-defined]
    assert upright_rgb(shot).size == (20, 10)


# what is refused ---------------------------------------------------------------------------------------------------------


def _png(width: int, height: int) -> bytes:
    """A PNG that says it has this size, with the data of a few pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def _animated(kind: str) -> bytes:
    return encoded(picture(20, 10), kind, save_all=True, append_images=[picture(20, 10, 1), picture(20, 10, 2)])


WHOLE = {
    "PNG": encoded(picture(200, 100)),
    "JPEG": encoded(picture(200, 100), "JPEG"),
    "WEBP": encoded(picture(200, 100), "WEBP"),
}
REFUSED: dict[str, tuple[Any, str]] = {
    **{f"cut {kind}": (content[: len(content) // 2], "cannot be decoded, it is damaged") for kind, content in WHOLE.items()},
    "damaged PNG": (WHOLE["PNG"][:200] + b"\0" * 50 + WHOLE["PNG"][250:], "cannot be decoded, it is damaged or cut off"),
    "only a head": (WHOLE["PNG"][:20], "is not of a format|cannot be decoded"),
    "bomb": (_png(60_000, 60_000), "has more pixels than the 89478485 that megarl decodes; it must be made smaller"),
    "half a bomb": (_png(10_000, 10_000), "is 10000x10000 pixels, more than the 89478485"),
    "no width": (_png(0, 10), "cannot be decoded|is 0x10 pixels; it must have at least one|is not of a format"),
    "animated GIF": (_animated("GIF"), "has 3 frames, but it must have one"),
    "animated WebP": (_animated("WEBP"), "has 3 frames, but it must have one"),
    "animated PNG": (_animated("PNG"), "has 3 frames, but it must have one"),
    "TIFF of pages": (_animated("TIFF"), "has 3 frames, but it must have one"),
    "32 bits": (encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), r"has 32 bits for each pixel \(mode F\)"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is not of a format that megarl reads"),
    "empty PIL": (Image.new("RGB", (0, 3)), "is 0x3 pixels; it must have at least one"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_one_sentence(name: str) -> None:
    content, sentence = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with pytest.raises(PictureError, match=f"^({sentence})") as caught:
            upright_rgb(content)
    assert "\n" not in str(caught.value)


def test_no_bytes_are_anything_but_a_picture_or_a_sentence() -> None:
    """Every byte of a small PNG and a small JPEG changed, one at a time."""
    for whole in (encoded(picture(6, 5)), encoded(picture(6, 5), "JPEG")):
        for place in range(len(whole)):
            damaged = bytearray(whole)
            damaged[place] ^= 0xFF
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with suppress(PictureError):
                    assert upright_rgb(bytes(damaged)).mode == "RGB"


def test_formats_are_those_that_this_pillow_has() -> None:
    Image.init()
    assert set(images.FORMATS) <= set(Image.OPEN)
