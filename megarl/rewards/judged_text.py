"""Puts a text that a policy wrote before a judge so that it is read as what is judged, and as nothing else.

A text of a policy may spell special tokens of the judge's chat template, hide characters that no reader sees, and write the
verdict that the judge is to write. All of it stays readable; none of it stays what it was made for.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from functools import cache

_SPECIAL = re.compile(
    r"<(?=[|\uff5c][^<>|\uff5c\s]{1,64}[|\uff5c]>)"  # <|im_end|>, <|eot_id|>, and DeepSeek's with wide bars
    r"|<(?=/?(?:s|bos|eos|pad|unk|think|sop|eop|start_of_turn|end_of_turn)>|</?SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|gMASK)\])"
)
_JOINERS = "\u200c\u200d"
"""Between letters of Persian and Indian scripts, and parts of emoji."""
_ALIKE = str.maketrans("\u0455\u0441\u043e\u0433\u0435\u03bf\u2236\ua789\ufe55", "scoreo:::")
"""Letters of other alphabets that look like those of `score:`."""
_LIKE_SCORE = re.compile(
    r"score\s{0,9}(?:<[^<>\n]{1,20}>|[^\w\s(])(?:<[^<>\n]{1,20}>|\W){0,9}?(-?\d+(?:\.\d+)?)", re.IGNORECASE
)


@cache
def _hidden() -> dict[int, str | None]:
    """Characters that nothing shows, and halves of characters, with what stands in their place."""
    kinds = {code: unicodedata.category(chr(code)) for code in (*range(0x20000), *range(0xE0000, 0xE0080))}
    hidden: dict[int, str | None] = {code: None for code, kind in kinds.items() if kind in ("Cc", "Cf")}
    selectors = range(0xE0100, 0xE01F0)  # of variants: text can be written in them
    hidden |= dict.fromkeys(selectors) | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
    return {code: put for code, put in hidden.items() if chr(code) not in f"\n\t{_JOINERS}"}


def readable(text: str) -> str:
    """The text as a reader sees it: without characters that nothing shows, and with special tokens broken up by a space."""
    seen = text.replace("\r\n", "\n").replace("\r", "\n").translate(_hidden())
    return _SPECIAL.sub(lambda opening: f"{opening[0]} ", seen)


def without_scores(text: str) -> str:
    """The text with `Score (10)` in place of whatever reads like `Score: 10`, in whatever letters, so that a judge that says
    it again gives no score."""
    plain, places = [], []
    for place, letter in enumerate(text):
        for part in unicodedata.normalize("NFKC", letter).translate(_ALIKE):
            if part not in _JOINERS and not unicodedata.combining(part):
                plain.append(part)
                places.append(place)
    places.append(len(text))
    pieces, end = [], 0
    for found in _LIKE_SCORE.finditer("".join(plain)):
        pieces += [text[end : places[found.start()]], f"{found[0][:5]} ({found[1]})"]
        end = places[found.end()]
    return "".join([*pieces, text[end:]])


def without_verdicts(text: str, pattern: re.Pattern[str]) -> str:
    """The text with a space behind the first character of what a verdict's `pattern` matches, where that breaks the match.

    A pattern that matches any number leaves the text as it is: the judge must see its numbers.
    """
    if any(found[0].strip().isdecimal() for found in (pattern.search("7"), pattern.search("x 7 y")) if found):
        return text
    return pattern.sub(lambda found: f"{found[0][:1]} {found[0][1:]}", text)


def mark_of(*texts: str) -> str:
    """Eight letters that follow from all `texts`: whoever writes one of these cannot know them."""
    return hashlib.sha256("\0".join(texts).encode(errors="replace")).hexdigest()[:8]
