"""What comes of a tool call: text for the policy, and how the call failed, if it did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Failure = Literal["tool_errors", "tool_timeouts"]


@dataclass(frozen=True)
class ToolAnswer:
    """What the policy is told, and how the call failed, if it did. `text` may be the beginning of so many `characters`."""

    text: str
    characters: int
    failure: Failure | None = None

    @classmethod
    def whole(cls, text: str, failure: Failure | None = None) -> ToolAnswer:
        """An answer of which nothing is missing."""
        return cls(text, len(text), failure)


def as_text(answer: Any) -> str:
    """Text as it is, anything else as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)


def failure_text(error: BaseException) -> str:
    """What the policy is told of an exception."""
    return f"error: {type(error).__name__}: {error}"


def late(name: str, timeout_s: float) -> ToolAnswer:
    """The answer of a tool that gave none in time."""
    return ToolAnswer.whole(f"error: {name} did not answer within {timeout_s:g} s", "tool_timeouts")
