"""The answer of a tool call: text and pictures for the policy, and how the call failed, if it did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

from megarl.data.told import MediaKeeper, PicturedText, pieces_of
from megarl.errors import DataError, EpisodeError, PictureError

Failure = Literal["tool_errors", "tool_timeouts"]


@dataclass(frozen=True)
class ToolAnswer:
    """The words to the policy, and how the call failed, if it did. `told` may be the beginning of so many `characters`."""

    told: PicturedText
    characters: int
    failure: Failure | None = None

    @classmethod
    def whole(cls, told: str | PicturedText, failure: Failure | None = None) -> ToolAnswer:
        """An answer of which nothing is missing."""
        told = PicturedText(told) if isinstance(told, str) else told
        return cls(told, len(told.text), failure)


def told_answer(answer: Any, pictures: MediaKeeper | None) -> ToolAnswer:
    """What the policy is told of what a tool returned, or of why that cannot be told. `pictures` None: the model takes none.

    Raises:
        EpisodeError: the media folder cannot be written.
    """
    try:
        return ToolAnswer.whole(_told(answer, pictures))
    except Exception as error:
        if isinstance(error, DataError) and not isinstance(error, PictureError):
            raise EpisodeError(str(error)) from error
        return ToolAnswer.whole(failure_text(error), "tool_errors")


def _told(answer: Any, pictures: MediaKeeper | None) -> PicturedText:
    """Text as it is, what holds pictures with these kept, anything else as JSON."""
    if isinstance(answer, str):
        return PicturedText(answer)
    pieces = pieces_of(answer) if pictures is not None or isinstance(answer, Image.Image) else None
    if pieces is None:
        return PicturedText(json.dumps(answer, ensure_ascii=False, default=str))
    if pictures is None:
        raise PictureError("a picture was returned, but the model takes none")
    return pictures.kept(pieces)


def failure_text(error: BaseException) -> str:
    """Words to the policy about an exception."""
    return f"error: {type(error).__name__}: {error}"


def late(name: str, timeout_s: float) -> ToolAnswer:
    """The answer of a tool that gave none in time."""
    return ToolAnswer.whole(f"error: {name} did not answer within {timeout_s:g} s", "tool_timeouts")
