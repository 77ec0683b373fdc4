"""Frames of videos: chosen once, evenly, as pictures at the video's mark; and rows of Open-R1-Video."""

from __future__ import annotations

import builtins
import struct
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megarl.config.sections import DataConfig
from megarl.config.sources import SourceConfig
from megarl.data.row_media import open_media
from megarl.data.sample import Prompt
from megarl.data.tokenize import PromptBuilder, load_tokenizer
from megarl.errors import DataError, PictureError
from megarl.options.pictures.video import chosen_frames, frames_of
from tests.data.seeing_folders import encoded, picture, processed, seeing_folder


def _video(frames: int = 30, *, rotation: int = 0, **options: Any) -> bytes:
    """A lossless video of 84x56 pixels at 10 frames a second; frame n has the red value 5 * n."""
    av = pytest.importorskip("av")
    stream = BytesIO()
    with av.open(stream, "w", format=options.get("container", "matroska")) as container:
        pictures = container.add_stream(options.get("codec", "ffv1"), rate=10)
        pictures.width, pictures.height, pictures.pix_fmt = 84, 56, options.get("pixels", "bgr0")
        if rotation:
            pictures.set_display_rotation(rotation)
        container.start_encoding()
        for number in range(frames):
            frame = av.VideoFrame.from_image(_frame(number))
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode())
    return stream.getvalue()


def _frame(number: int) -> Image.Image:
    image = Image.new("RGB", (84, 56), (5 * number, 0, 0))
    image.paste((0, 255, 0), (0, 0, 10, 10))
    return image


def _prompts(folder: Path, rows: list[dict[str, Any]], **fields: Any) -> list[Prompt]:
    data = DataConfig(train=SourceConfig(source="jsonl", path="rows.jsonl"), prompt_key="problem", **fields)
    model = seeing_folder(folder / "model")
    tokenizer = load_tokenizer(str(model))
    return PromptBuilder(tokenizer, data, (), open_media(data, str(model), tokenizer, folder / "run")).build(
        rows, prefix="train"
    )


@pytest.mark.parametrize(
    ("total", "rate", "fps", "most", "expected"),
    [
        (30, 10.0, 2.0, 16, [0, 6, 12, 17, 23, 29]),  # 3 s
        (300, 10.0, 2.0, 4, [0, 100, 199, 299]),
        (300, 10.0, 2.0, 5, [0, 100, 199, 299]),  # an even number
        (10, 10.0, 0.1, 16, [0, 3, 6, 9]),  # at least 4
        (3, 10.0, 2.0, 16, [0, 2]),
        (1, 10.0, 2.0, 16, [0]),
        (0, 10.0, 2.0, 16, []),
    ],
)
def test_frames_are_chosen_evenly(total: int, rate: float, fps: float, most: int, expected: list[int]) -> None:
    assert chosen_frames(total, rate, fps, most) == expected


def test_frames_are_the_videos_own() -> None:
    frames = frames_of(_video(), 2.0, 16, lambda frame: frame)
    expected = [_frame(number) for number in (0, 6, 12, 17, 23, 29)]
    np.testing.assert_array_equal(np.stack(frames), np.stack(expected))


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_a_telephones_video_is_turned_as_it_says(rotation: int) -> None:
    content = _video(4, rotation=rotation, container="mp4", codec="mpeg4", pixels="yuv420p")
    # the matrix of the track's header (ISO 14496-12): a point (x, y) is shown at (a x + c y, b x + d y), y downwards
    start = content.index(b"tkhd") + 44
    a, b, _, c, d = struct.unpack(">5i", content[start : start + 20])
    assert (a >> 16, b >> 16, c >> 16, d >> 16) == {90: (0, -1, 1, 0), 180: (-1, 0, 0, -1), 270: (0, 1, -1, 0)}[rotation]
    first = frames_of(content, 2.0, 16, lambda frame: frame)[0]
    assert first.size == ((56, 84) if rotation != 180 else (84, 56))
    low, right = first.height - 3, first.width - 3
    corner = {90: (2, low), 180: (right, low), 270: (right, 2)}[rotation]  # where the upper left one comes to lie
    red, green, _ = first.getpixel(corner)  # type: ignore[misc]
    assert green > 200 > red + 100


def test_a_recording_that_begins_between_key_frames_gives_the_frames_that_can_be_decoded() -> None:
    av = pytest.importorskip("av")
    stream = BytesIO()
    with av.open(stream, "w", format="mpegts") as container:
        pictures = container.add_stream("libx264", rate=25)
        pictures.width, pictures.height, pictures.pix_fmt = 84, 56, "yuv420p"
        pictures.codec_context.gop_size = 12
        for number in range(60):
            container.mux(pictures.encode(av.VideoFrame.from_image(picture(84, 56, number))))
        container.mux(pictures.encode())
    cut = stream.getvalue()[len(stream.getvalue()) // 3 // 188 * 188 :]  # packets of a transport stream have 188 bytes
    with av.open(BytesIO(cut)) as container:
        packets = sum(1 for packet in container.demux(video=0) if packet.size)
    with av.open(BytesIO(cut)) as container:
        shown = [frame.to_image() for frame in container.decode(video=0)]
    assert 20 < len(shown) < packets
    frames = frames_of(cut, 25.0, 200, lambda frame: frame)
    assert len(frames) == len(shown) - len(shown) % 2
    np.testing.assert_array_equal(np.asarray(frames[-1]), np.asarray(shown[-1]))


def test_frames_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.options.pictures.video.LARGEST_PIXELS", 84 * 56 - 1)
    with pytest.raises(PictureError, match=r"^has frames of 84x56 pixels, more than 4703$"):
        frames_of(_video(), 2.0, 16, lambda frame: frame)


def test_rows_of_open_r1_video(tmp_path: Path) -> None:
    (tmp_path / "v.mkv").write_bytes(_video())
    rows = [
        {"video": "v.mkv", "problem": "What happens?", "solution": "<answer> A </answer>"},
        {"video": ["v.mkv"], "problem": "See <video>: what happens?"},
        {"problem": [{"role": "user", "content": [{"type": "video", "video": f"file://{tmp_path}/v.mkv"}]}]},
    ]
    fields = {"video_key": "video", "image_folder": str(tmp_path), "max_frames": 4}
    first, marked, part = _prompts(tmp_path, rows, **fields)
    frames = [_frame(number) for number in (0, 10, 19, 29)]
    images = [{"type": "image"}] * 4
    for prompt, content in (
        (first, [*images, {"type": "text", "text": "What happens?"}]),
        (marked, [{"type": "text", "text": "See "}, *images, {"type": "text", "text": ": what happens?"}]),
        (part, images),
    ):
        expected = processed("qwen2_vl", [{"role": "user", "content": content}], frames)
        assert prompt.prompt_ids == expected["input_ids"][0].tolist()
        assert [one.kind for one in prompt.media] == ["image"] * 4
    assert first.media[0].digests == marked.media[0].digests
    assert len(first.row["video"]) == 4
    assert len([*(tmp_path / "run/media").iterdir()]) == 4


def test_pictures_and_videos_stand_at_their_marks_and_a_list_of_frames_is_a_video(tmp_path: Path) -> None:
    frames = [picture(84, 56, seed) for seed in range(3)]
    row = {"images": [picture(56, 56, 9)], "videos": [[encoded(one) for one in frames]], "problem": "<video>a<image>b"}
    [prompt] = _prompts(tmp_path, [row])
    content = [*[{"type": "image"}] * 2, {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    expected = processed("qwen2_vl", [{"role": "user", "content": content}], [frames[0], frames[2], picture(56, 56, 9)])
    assert prompt.prompt_ids == expected["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing", r"video 1 of 1 \('no\.mkv'\) is no file"),
        ("junk", "video 1 of 1 .* cannot be decoded as a video, it is damaged or cut off"),
        ("half", r"video 1 of 1 .* is cut off: it has 1\.\d of 3\.0 s"),
        ("head alone", "video 1 of 1 .* cannot be decoded as a video, it is damaged or cut off"),
        ("no frames", "video 1 of 1 .* has no frames"),
        ("sound", "video 1 of 1 .* has no frames: it has no stream of pictures"),
        ("empty list", "video 1 of 1 .* has no frames"),
        ("picture", "video 1 of 1 .* is a picture; it must be a path, bytes or a list of frames"),
        ("playlist", "video 1 of 1 .* cannot be decoded as a video"),
    ],
)
def test_videos_that_cannot_be_used_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = _video()
    (tmp_path / "whole.mkv").write_bytes(whole)
    video: Any = {
        "missing": "no.mkv",
        "junk": b"junk" * 100,
        "half": whole[: len(whole) // 2],
        "head alone": whole[: whole.index(b"\x1f\x43\xb6\x75")],
        "no frames": _video(0, container="mp4", codec="mpeg4", pixels="yuv420p"),
        "sound": _sound(),
        "empty list": [[]],
        "picture": picture(10, 10),
        "playlist": b"ffconcat version 1.0\nfile whole.mkv\n",  # FFmpeg would open the other file
    }[name]
    row = {"videos": video, "problem": "?"}
    with pytest.raises(PictureError, match=rf"row 0 .*: {sentence}") as caught:
        _prompts(tmp_path, [row])
    assert "\n" not in str(caught.value)


def _sound() -> bytes:
    av = pytest.importorskip("av")
    stream = BytesIO()
    with av.open(stream, "w", format="wav") as container:
        track = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(track.encode(frame))
        container.mux(track.encode())
    return stream.getvalue()


def test_without_pyav_rows_with_videos_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_av(name: str, *rest: Any) -> Any:
        if name == "av":
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(DataError, match=r"rows have videos, but PyAV is not installed: run `pip install 'megarl\[video\]'`"):
        _prompts(tmp_path, [{"videos": [b"x"], "problem": "?"}], bad_pictures="drop")
