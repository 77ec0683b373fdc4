"""Pictures, videos and sounds as values: what travels in their place, and the forms in which rows and messages show them.

Everything says which one it is, how many patches it has and where it is among the tokens; its file is opened by the option
pictures alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

Pixels = tuple[tuple[str, ...], tuple[int, int, int]]
"""Identity of a picture's pixels: digests of its files and its grid."""
MediaKind = Literal["image", "video", "audio"]
MARKS: dict[MediaKind, str] = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
"""Texts that stand for a picture, a video or a sound."""
NOUNS: dict[str, str] = {"image": "picture", "video": "video", "audio": "sound"}
"""What sentences call them."""
_SOURCES = {kind: (kind, f"{kind}_url", "bytes", "path", "url") for kind in MARKS}
"""Fields in which a part of a message may have its picture, video or sound; without one it takes the row's next."""


@dataclass(frozen=True)
class Media:
    """One picture, the frames of one video, or one sound, of a prompt or of what was told in a response.

    `grid` is its patches in time, height and width (of a sound, which has a patch for each token, 1, 1 and their number),
    `place` the number of its first placeholder among the ids, of which it has `tokens`, one after another: where a model has
    text between a video's frames, a pair of frames is a video.
    Every frame of a video has a digest, in their order; a picture has one. `seconds_per_grid` is the time from one grid of a
    video to the next.
    """

    kind: MediaKind
    digests: tuple[str, ...]
    grid: tuple[int, int, int]
    place: int
    tokens: int
    seconds_per_grid: float | None = None

    @property
    def pixels(self) -> Pixels:
        """Equal for pictures that look the same to a model."""
        return self.digests, self.grid

    def moved(self, tokens: int) -> Media:
        """The same where `tokens` more ids come before it."""
        return replace(self, place=self.place + tokens)

    @classmethod
    def of_json(cls, record: Mapping[str, Any]) -> Media:
        """Read what `dataclasses.asdict` and JSON made of one."""
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
        return cls(**values)

    def files(self, folder: Path) -> list[Path]:
        """The paths of its pictures, or of the sound, in a run's media folder."""
        return [folder / f"{digest}.{'wav' if self.kind == 'audio' else 'png'}" for digest in self.digests]


@dataclass(frozen=True)
class Expanded:
    """Ids in which each picture has a placeholder for each of its tokens, and the pictures with their places.

    `counts` says how many of them each id became: 1 but for placeholders.
    """

    ids: list[int]
    media: list[Media]
    counts: list[int]


def kind_of(part: Mapping[str, Any]) -> MediaKind | None:
    """`image`, `video` or `audio` if a part of a message is one. Tables give every part all fields, most of them null."""
    named = {name: kind for kind in MARKS for name in (kind, f"{kind}_url")}
    if part.get("type") is not None:
        return named.get(str(part["type"]))
    return next((kind for field, kind in named.items() if part.get(field) is not None), None)


def source_of(part: Mapping[str, Any]) -> Any:
    """The picture, video or sound in a part of a message that is one; None: it has none of its own."""
    kind = kind_of(part)
    return next((part[name] for name in _SOURCES[kind] if part.get(name) is not None), None) if kind else None
