"""Pictures for people: which file, how large, how many fit a page, and what is no picture of a run."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megarl.data.media import Media
from megarl.observe.report import page_data
from megarl.observe.run_record import read_run
from megarl.observe.sample_media import PagePictures, describe_media, frames_shown
from tests.observe.recorded import show_pictures, write_run


def test_a_page_has_each_picture_once_and_scaled_as_pillow_does(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    digests = show_pictures(run)
    data = page_data([read_run(run), read_run(run)])
    assert sorted(data["pictures"]) == sorted(digests)
    assert data["pictures_left_out"] == 0
    for digest in digests:
        shown = data["pictures"][digest]
        assert (shown["width"], shown["height"]) == (896, 448)
        kept, expected = Image.open(run / "media" / f"{digest}.png"), io.BytesIO()
        kept.resize((320, 160), Image.Resampling.BICUBIC, reducing_gap=2.0).save(expected, "JPEG", quality=85)
        assert base64.b64decode(shown["url"].partition(",")[2]) == expected.getvalue()
    assert data["runs"][0]["samples"][1]["boxes"] == [(90, 45, 180, 100), (1, 2, 9999, 3)]
    assert data["runs"][0]["samples"][1]["gold_boxes"] == [(100, 50, 200, 150)]
    assert "media" not in page_data([read_run(write_run(tmp_path / "text"))])["runs"][0]["samples"][0]


def test_drawings_stay_as_they_are(tmp_path: Path) -> None:
    drawing = Image.new("RGB", (56, 28), "white")
    drawing.paste((255, 0, 0), (3, 4, 20, 20))
    drawing.save(tmp_path / "abcdef0123.png")
    pictures = PagePictures()
    pictures.add("abcdef0123", tmp_path)
    url = pictures.found["abcdef0123"]["url"]
    assert url.startswith("data:image/png;base64,")
    seen = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert np.array_equal(np.asarray(seen), np.asarray(drawing))


def test_what_has_no_room_is_left_out_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    first, second = show_pictures(run)
    all_of_them = PagePictures()
    for digest in (first, second):
        all_of_them.add(digest, run / "media")
    pictures = PagePictures(max(len(picture["url"]) for picture in all_of_them.found.values()))
    for digest in (first, second, first, second):
        pictures.add(digest, run / "media")
    assert pictures.left_out == 1
    assert "url" in pictures.found[first]
    assert pictures.found[second]["note"].startswith(f"{second[:12]}: left out")


@pytest.mark.parametrize("digest", ["../secret", "a/b", "", "abc\x00def012", "ABCDEF0123"])
def test_no_file_outside_the_media_folder_is_opened(digest: str, tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    Image.new("RGB", (28, 28)).save(tmp_path / "secret.png")
    pictures = PagePictures()
    pictures.add(digest, tmp_path / "media")
    assert "url" not in pictures.found[digest]
    assert pictures.found[digest]["note"].endswith("is no name of a kept picture")


def test_a_picture_of_one_run_is_found_in_another_where_it_is_missing(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    digests = show_pictures(first)
    show_pictures(second)
    (first / "media" / f"{digests[0]}.png").unlink()
    assert all("url" in picture for picture in page_data([read_run(first), read_run(second)])["pictures"].values())


def test_a_media_folder_of_the_config_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(f"{config}data: {{media_folder: {tmp_path}/kept, answer_key: answer}}\n")
    digests = show_pictures(run, tmp_path / "kept")
    assert all("url" in page_data([read_run(run)])["pictures"][digest] for digest in digests)


def test_a_line_says_file_size_and_tokens(tmp_path: Path) -> None:
    Image.new("RGB", (56, 28)).save(tmp_path / "abcdef01.png")
    picture = Media("image", ("abcdef01",), (1, 2, 4), 3, 2)
    assert describe_media(1, picture, tmp_path) == f"picture 1: {tmp_path}/abcdef01.png, 56x28 px, 2 tokens"
    video = Media("video", ("abcdef01", "abcdef02") * 10, (10, 2, 4), 3, 20, 1.0)
    assert describe_media(2, video, tmp_path) == (
        f"video 2: 20 frames, the first is {tmp_path}/abcdef01.png, 56x28 px, 20 tokens"
    )
    gone = Media("image", ("abcdef02",), (1, 2, 4), 3, 2)
    assert describe_media(1, gone, tmp_path) == f"picture 1: {tmp_path}/abcdef02.png, the file is missing, 2 tokens"
    assert frames_shown(video) == tuple(video.digests[place] for place in (0, 2, 5, 7, 10, 12, 15, 17))
