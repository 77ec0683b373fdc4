"""The boundary between what a prompt supplies and what the assistant writes behind it.

With some options a template ends the prompt with a thought, empty (`<think></think>`) or open (`<think>`), and may render the
turn itself otherwise. What the prompt ends with is never the assistant's; what the assistant would write behind it is.
"""

from __future__ import annotations

import re
from typing import Any

from megarl.data.message_forms import REASONING
from megarl.errors import DataError

THOUGHTS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
"""Marks around an assistant's reasoning."""


def turn_behind(prompt: str, rendered: str, message: dict[str, Any], where: str) -> str | None:
    """The text that the assistant writes behind `prompt`, for its turn as the template renders it.

    Args:
        prompt: what the template asks with, up to where the turn begins.
        rendered: the conversation through that turn.
        message: the turn.
        where: names the message in errors.

    Returns:
        None: the template renders the messages before the turn otherwise, so that no part of `rendered` is the turn.

    Raises:
        DataError: the prompt ends a thought, and the turn has one; or it begins one, and the turn has none.
    """
    if rendered.startswith(prompt):
        turn = rendered[len(prompt) :]
        for opening, closing in THOUGHTS:
            if prompt.rstrip().endswith(closing):
                _refuse_reasoning(_reasoning(message, opening, closing), closing, where)
        return turn
    for opening, closing in THOUGHTS:
        tail = re.search(rf"({re.escape(opening)}\s*)?({re.escape(closing)}\s*)?\Z", prompt)
        assert tail is not None, "it matches an empty end, too"
        if not tail[0]:
            continue
        header = next((h for h in (prompt[: tail.start()], prompt[: tail.start()].rstrip()) if rendered.startswith(h)), None)
        if header is None:
            return None
        turn, reasoning = rendered[len(header) :], _reasoning(message, opening, closing)
        if tail[2]:
            return _behind_a_thought(turn, reasoning, opening, closing, where)
        return _within_a_thought(turn, reasoning, tail[0], (opening, closing), where)
    return None


def _behind_a_thought(turn: str, reasoning: str, opening: str, closing: str, where: str) -> str:
    """`turn` without the thought that it begins with, which must be empty."""
    bare = turn.lstrip()
    if bare.startswith(opening) and closing in bare:
        thought, _, answer = bare[len(opening) :].partition(closing)
        reasoning = reasoning or thought
        turn = answer.lstrip("\n")
    elif bare.startswith(closing):
        turn = bare[len(closing) :].lstrip("\n")
    _refuse_reasoning(reasoning, closing, where)
    return turn


def _refuse_reasoning(reasoning: str, closing: str, where: str) -> None:
    if reasoning.strip():
        raise DataError(
            f"{where} has reasoning, but the prompt before it ends with '{closing}': it is asked for without thinking; set "
            "template_args so that the model thinks, in this row or for all, or leave the reasoning out"
        )


def _within_a_thought(turn: str, reasoning: str, supplied: str, marks: tuple[str, str], where: str) -> str:
    """`turn` from behind the beginning of a thought that the prompt has supplied."""
    opening, closing = marks
    bare = turn.lstrip()
    if bare.startswith(opening):
        return bare[len(opening) :].lstrip("\n" if supplied.endswith("\n") else "")
    if bare.startswith(closing):
        return reasoning + bare
    if not reasoning.strip():
        raise DataError(
            f"{where} has no reasoning, but the prompt before it ends with '{opening}': the model is asked to think; write "
            f"'{opening}…{closing}' into its content, or set template_args so that the model does not think"
        )
    return f"{reasoning}{closing}{turn}"


def _reasoning(message: dict[str, Any], opening: str, closing: str) -> str:
    """The reasoning of a turn, as it stands before the mark that closes it."""
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key]:
            return str(message[key])
    content = message.get("content")
    if not isinstance(content, str) or closing not in content:
        return ""
    before = content.partition(closing)[0]
    return before.partition(opening)[2].removeprefix("\n") if opening in before else before
