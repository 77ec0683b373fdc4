"""The pictures of a run's samples, for people: which they are, where they were told, and those that a page shows.

A picture's file is opened by the option pictures, whose `shown.py` has `size_or_fault` and `scaled`; of a picture that is not
shown, words say why.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.data.media import Media
from megarl.option_list import functions, part

PAGE_BYTES = 16_000_000
"""Bytes of all pictures of a page at most."""
FRAMES = 8
"""Frames of a video in a page at most, evenly spread."""


def shown_media(sample: Mapping[str, Any]) -> list[Media]:
    """The pictures and videos of a sample as `samples.jsonl` has it; none of what an earlier version wrote as paths."""
    return [Media.of_json(entry) for entry in sample.get("media") or () if isinstance(entry, Mapping)]


def told_media(sample: Mapping[str, Any]) -> list[tuple[int, Media]]:
    """The pictures of `shown_media` that were told between turns, with their numbers in it, their places counted from
    the response."""
    start = len(sample.get("prompt_ids") or ())
    numbered = enumerate(shown_media(sample) if start else ())
    return [(number, media.moved(-start)) for number, media in numbered if media.place >= start]


def turn_texts(sample: Mapping[str, Any]) -> list[str]:
    """`user: see [picture 2] there` for each turn behind the prompt, pictures by number; none where there was one turn."""
    number = len(shown_media(sample)) - len(told_media(sample))
    texts: list[str] = []
    for turn in sample.get("turns") or ():
        content, text = turn.get("content"), f"{turn.get('role')}: "
        for piece in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
            number += piece.get("type") == "image"
            text += f"[picture {number}]" if piece.get("type") == "image" else piece.get("text", "")
        texts.append(text)
    return texts


def sample_parts(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Role and text of what was said behind the prompt, turn by turn; of a single turn the policy's response, `assistant`."""
    roles = [str(turn.get("role")) for turn in sample.get("turns") or ()]
    return [*zip(roles, turn_texts(sample), strict=True)] or [("assistant", sample.get("response_text", ""))]


def frames_shown(media: Media) -> tuple[str, ...]:
    """The digests of a picture, or of those frames of a video that a page shows; none of a sound."""
    if media.kind == "audio":
        return ()
    number = len(media.digests)
    return media.digests if number <= FRAMES else tuple(media.digests[index * number // FRAMES] for index in range(FRAMES))


def describe_media(number: int, media: Media, folder: Path) -> str:
    """`picture 1: /media/9b….png, 448x336 px, 192 tokens`; of a video the first frame and how many there are."""
    file = media.files(folder)[0]
    if media.kind == "audio":
        return f"sound {number}: {file}, {media.tokens} tokens"
    size = _size_or_fault(media.digests[0], folder)
    what = f"{size[0]}x{size[1]} px" if isinstance(size, tuple) else size
    frames = f"{len(media.digests)} frames, the first is " if media.kind == "video" else ""
    return f"{'video' if media.kind == 'video' else 'picture'} {number}: {frames}{file}, {what}, {media.tokens} tokens"


class PagePictures:
    """The different pictures of one page, each once, as far as the bytes reach.

    `found` has by digest either a picture's `url`, `width` and `height` (its own, in pixels), or a `note` that says why it is
    not there. `left_out` counts pictures for which there was no room.
    """

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        """`page_bytes`: of all data URLs together."""
        self.found: dict[str, dict[str, Any]] = {}
        self.left_out = 0
        self._room = page_bytes

    def add(self, digest: str, folder: Path) -> None:
        """Put in the picture of this name, unless it is there."""
        if digest in self.found and not self.found[digest].get("is_missing"):
            return
        size = _size_or_fault(digest, folder)
        if isinstance(size, str):
            self.found[digest] = {"note": f"{digest[:12]}: {size}", "is_missing": True}
            return
        try:
            url = part("pictures", "shown", "a page with pictures").scaled(folder / f"{digest}.png")
        except Exception as error:  # noqa: BLE001 - Pillow raises many kinds for a damaged file
            self.found[digest] = {"note": f"{digest[:12]}: cannot be read: {error}"}
            return
        if len(url) > self._room:
            self.left_out += 1
            self.found[digest] = {"note": f"{digest[:12]}: left out, the page has its {PAGE_BYTES // 10**6} MB of pictures"}
            return
        self._room -= len(url)
        self.found[digest] = {"url": url, "width": size[0], "height": size[1]}


def _size_or_fault(digest: str, folder: Path) -> tuple[int, int] | str:
    """Width and height of a kept picture, or a few words that say why it has none."""
    for size_or_fault in functions("shown", "size_or_fault"):
        answer: tuple[int, int] | str = size_or_fault(digest, folder)
        return answer
    return "needs the option pictures, which this installation does not have"
