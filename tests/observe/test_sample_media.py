"""Samples with pictures can be looked at where nothing opens pictures: words say what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.observe import sample_media
from megarl.observe.report import page_data
from megarl.observe.run_record import read_run
from megarl.observe.sample_media import describe_media, shown_media
from tests.observe.recorded import show_pictures, write_run

WHY = "needs the option pictures, which this installation does not have"


def test_without_the_option_words_stand_for_each_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_media, "functions", lambda place, name: ())
    run = write_run(tmp_path / "r")
    digests = show_pictures(run)
    record = read_run(run)
    data = page_data([record])
    assert data["pictures"] == {digest: {"note": f"{digest[:12]}: {WHY}", "is_missing": True} for digest in digests}
    assert data["runs"][0]["samples"][0]["media"][0]["shown"] == (digests[0],)
    [media] = shown_media(record.samples[0])
    assert describe_media(1, media, tmp_path) == f"picture 1: {tmp_path}/{digests[0]}.png, {WHY}, 512 tokens"
