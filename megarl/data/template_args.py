"""The options of a chat template (`data.template_args`) and a template of the user's own (`data.chat_template: my.jinja`).

Only runs that have some import this file. A template reads whatever its Jinja tree names and does not set itself.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.data.chat_rendering import TemplateError, names_of
from megarl.errors import DataError, nearest

ROW_KEY = "template_args"
"""Key of a row with options of its own, which go before the run's."""
JSON_KINDS = (str, bool, int, float, type(None))
SAID_AS_TEXT = ("true", "false", "null", "none")
"""Texts that mean something else: a template takes any text but an empty one for true."""


def read_template(choice: str) -> str:
    """The text of the Jinja file that `data.chat_template` names.

    Raises:
        DataError: the file cannot be read, is empty, or is no template.
    """
    path = Path(choice).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"data.chat_template is '{choice}', which cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(f"data.chat_template is '{choice}', which is not valid UTF-8; it must be a Jinja template") from None
    if not text.strip():
        raise DataError(f"data.chat_template is '{choice}', which is empty; it must be a Jinja template")
    try:
        names = names_of(text)
    except TemplateError as error:
        raise DataError(f"data.chat_template is '{choice}', which is no Jinja template: {error}") from None
    if "messages" not in names.read:
        raise DataError(f"data.chat_template is '{choice}', which never reads `messages`; it must be a chat template")
    return text


def args_of_row(value: Any, place: Any) -> dict[str, Any]:
    """The options under a row's `template_args`: a mapping, or its JSON text. Those that are null are left out.

    Raises:
        DataError: it is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} has text under '{ROW_KEY}' that is no JSON: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{place} has {value!r:.80} under '{ROW_KEY}'; it must be a mapping from options to values")
    return {str(key): item for key, item in value.items() if item is not None}


def with_defaults(template: str, args: Mapping[str, Any]) -> str:
    """`template` with `args` as the values of options that its caller does not set; rendered otherwise to the letter."""
    if not args:
        return template
    defaults = "".join(
        f"{{%- if {name} is undefined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}" for name, value in args.items()
    )
    return f"{defaults}\n{template}"  # templates are read with trim_blocks: the line break behind a block is not written


def _literal(value: Any) -> str:
    """A JSON value as Jinja writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def check_args(tokenizer: Any, args: Mapping[str, Any], where: str) -> None:
    """Refuse options that the tokenizer's template never reads, that megarl sets itself, or whose values are no JSON.

    `where` names them in the message, such as `data.template_args`.

    Raises:
        DataError: names the option.
    """
    if not args:
        return
    reserved = _reserved(tokenizer)
    template = tokenizer.chat_template
    texts = list(template.values()) if isinstance(template, Mapping) else [template]
    reads = sorted({name for text in texts for name in names_of(text).options} - reserved)
    for name, value in args.items():
        if name in reserved:
            raise DataError(f"{where} has '{name}', which is not an option: megarl or the tokenizer sets it; remove it")
        if name not in reads:
            others = f"it reads {', '.join(reads)}" if reads else "it has no options"
            raise DataError(f"{where} has '{name}'{nearest(name, reads)}, which the chat template never reads; {others}")
        check_value(value, f"{where}.{name}")


def check_value(value: Any, where: str) -> None:
    """Refuse a value that JSON has not, or a text that says true, false or null.

    Raises:
        DataError: names it.
    """
    if isinstance(value, str) and value.strip().lower() in SAID_AS_TEXT:
        raise DataError(f"{where} is the text '{value}'; it must be {_meant(value)} without quotes")
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_value(item, f"{where}.{key}")
    elif isinstance(value, list):
        for at, item in enumerate(value):
            check_value(item, f"{where}[{at}]")
    elif not isinstance(value, JSON_KINDS) or (isinstance(value, float) and not math.isfinite(value)):
        raise DataError(
            f"{where} is {value!s:.80}, a {type(value).__name__}; it must be text (in quotes), a number, true, false, null, or "
            "a list or mapping of these"
        )


def _meant(text: str) -> str:
    word = text.strip().lower()
    return "null" if word == "none" else word


def _reserved(tokenizer: Any) -> set[str]:
    """Names that a template reads and that are no options: arguments of `apply_chat_template`, and special tokens."""
    arguments = {
        name
        for name, parameter in inspect.signature(tokenizer.apply_chat_template).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    return (arguments | {"messages"} | set(tokenizer.SPECIAL_TOKENS_ATTRIBUTES)) - {"documents"}
