"""Frames of a video as pictures, by PyAV (the extra `video`): chosen once, evenly from its first frame to its last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from PIL import Image

from megarl.errors import DataError, PictureError
from megarl.options.pictures.images import LARGEST_PIXELS, read_bytes

FEWEST_FRAMES = 4
"""Frames of a video that is shorter than `fps` would give this many of; Qwen-VL's own number."""

Kept = TypeVar("Kept")
COMPLETE = 0.8
"""Share of the length that a video's header states: less was cut off. Rates of frames are averages, so it is not exact."""


@dataclass(frozen=True)
class TimedFrames(Generic[Kept]):
    """Frames of a video, and when each is shown, in seconds from the first one of the video."""

    kept: list[Kept]
    seconds: list[float]


def frames_of(original: Path | bytes, fps: float, max_frames: int, keep: Callable[[Image.Image], Kept]) -> list[Kept]:
    """The frames of `timed_frames_of`, each handed to `keep` without their number."""
    return timed_frames_of(original, fps, max_frames, lambda frame, _: keep(frame)).kept


def timed_frames_of(
    original: Path | bytes, fps: float, max_frames: int, keep: Callable[[Image.Image, int], Kept]
) -> TimedFrames[Kept]:
    """`chosen_frames` of a video as RGB pictures, turned as the video says, each handed to `keep` as soon as it is decoded.

    `keep` is also told how many frames there will be. A frame's time is its number by the video's average rate.

    Raises:
        PictureError: it is missing, damaged or cut off, too large, or has no frames; or `keep` raised one.
        DataError: PyAV is not installed.
    """
    content = read_bytes(original)
    try:
        import av
    except ModuleNotFoundError:
        raise DataError("rows have videos, but PyAV is not installed: run `pip install 'megarl[video]'`") from None
    try:
        # of bytes, under no protocol: a playlist inside them can name no other file and no address
        with av.open(BytesIO(content), options={"protocol_whitelist": "none"}) as container:
            if not container.streams.video:
                raise PictureError("has no frames: it has no stream of pictures")
            stream = container.streams.video[0]
            rate = float(stream.average_rate or stream.guessed_rate or fps)
            total = sum(1 for packet in container.demux(stream) if packet.size)
            has_s, should_s = total / rate, _length_s(container, stream)
            if has_s < COMPLETE * should_s:
                raise PictureError(f"is cut off: it has {has_s:.1f} of {should_s:.1f} s")
        while True:
            chosen = chosen_frames(total, rate, fps, max_frames)
            frames, seen = _decoded(av, content, chosen, keep)
            if len(frames) == len(chosen) and frames:
                return TimedFrames(frames, [number / rate for number in chosen])
            if not seen:
                raise PictureError("has no frames that can be decoded")
            total = seen  # fewer frames than packets: choose again among those that there are
    except PictureError:
        raise
    except Exception as error:
        raise PictureError(f"cannot be decoded as a video, it is damaged or cut off: {error}") from error


def chosen_frames(total: int, rate: float, fps: float, max_frames: int) -> list[int]:
    """Choose among `total` frames at `rate` a second: `fps` a second, at least 4, at most `max_frames`, evenly apart.

    Their number is even, as a patch shows two frames; a video of one frame keeps that.
    """
    count = int(min(max(total / rate * fps, FEWEST_FRAMES), max_frames, total))
    return [int(number) for number in np.linspace(0, total - 1, max(count - count % 2, 1)).round()] if total else []


def _length_s(container: Any, stream: Any) -> float:
    """What the header says of the pictures alone; 0 where it does not say, or only of the pictures together with sound."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return container.duration / 1e6 if container.duration and len(container.streams) == 1 else 0.0


def _decoded(av: Any, content: bytes, wanted: list[int], keep: Callable[[Image.Image, int], Kept]) -> tuple[list[Kept], int]:
    """The wanted frames that there are, and how many frames were seen until the last one was found."""
    frames: list[Kept] = []
    seen = 0
    with av.open(BytesIO(content), options={"protocol_whitelist": "none"}) as container:
        for frame in container.decode(container.streams.video[0]):
            if seen in wanted:
                if frame.width * frame.height > LARGEST_PIXELS:
                    raise PictureError(f"has frames of {frame.width}x{frame.height} pixels, more than {LARGEST_PIXELS}")
                image = frame.to_image().convert("RGB")
                image = image.rotate(frame.rotation, expand=True) if frame.rotation else image
                frames.append(keep(image, len(wanted)))
            seen += 1
            if len(frames) == len(wanted):
                break
    return frames, seen
