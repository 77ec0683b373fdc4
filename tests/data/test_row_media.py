"""Rows with pictures or videos are refused where nothing reads them, by the name of the option that would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from megarl import option_list
from megarl.config.sections import PictureFields
from megarl.data.row_media import MediaReader, open_media
from megarl.data.rows import Origin, Row
from megarl.errors import ConfigError

ORIGIN = Origin("data.train")


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation that does not have the option."""
    monkeypatch.setattr(option_list, "OPTIONS", tuple(name for name in option_list.OPTIONS if name != "pictures"))
    option_list.parts.cache_clear()
    yield
    option_list.parts.cache_clear()


def light(rows: list[Row], **fields: Any) -> list[Any]:
    return [row for _, row in MediaReader(PictureFields(**fields)).light_rows(rows, ORIGIN, ["problem"])]


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"images": [b"x"], "problem": "?"}, "has pictures under 'images' (data.image_key), which"),
        ({"videos": "a.mp4", "problem": "?"}, "has videos under 'videos' (data.video_key), which"),
        (
            {"problem": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}]},
            "has pictures in its messages, which",
        ),
    ],
)
def test_without_the_option_a_row_with_media_is_refused_by_its_name(row: Row, sentence: str) -> None:
    whole = f"data.train row 1 (counted from 0) {sentence} needs the option pictures, which this installation does not have"
    with pytest.raises(ConfigError, match=f"^{re.escape(whole)}$"):
        light([{"problem": "1 + 1?", "images": []}, row])


@pytest.mark.usefixtures("without_pictures")
def test_without_the_option_rows_of_text_are_read(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    reader = open_media(PictureFields(), str(tmp_path), None, None)
    assert type(reader) is MediaReader
    assert reader.model is None
    assert reader.expand([1, 2], [], next(iter(reader.light_rows([{}], ORIGIN, [])))[0]).counts == [1, 1]


def test_what_no_json_holds_is_taken_out_of_rows_of_text() -> None:
    row = {"problem": "?", "scan": Image.new("RGB", (2, 2)), "more": [{"bytes": b"x", "path": "a"}], "n": (1, 2)}
    assert light([row, None], image_key=None) == [
        {"problem": "?", "scan": None, "more": [{"bytes": None, "path": "a"}], "n": (1, 2)},
        None,
    ]
