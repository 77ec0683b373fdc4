"""Secrets in texts, and the texts without them: the one place that tells a secret by its form.

Keys of services are found by the plugins of detect-secrets; what these do not know (later services, headers, names with a
value behind them, URLs) is found here. `redacted` is for what a person reads: sentences, tracebacks, command lines.
`redacted_data` is for what others may compute with, such as samples: only what is surely a secret.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable
from functools import cache, lru_cache

HIDDEN = "(hidden)"
"""Text in the place of a secret."""

KNOWN: dict[str, str] = {}
"""Secrets of this process's configs, and how a saved config names each; texts lose them whatever they look like."""

_KIND_OF_KEY = "api|access|private|secret|auth|service|account|client|signing|encryption|subscription|shared|master|session|ssh"
_NAME = re.compile(
    rf"(?:.*_)?(?:(?:{_KIND_OF_KEY})_?key|secret|token|pass_?(?:word|wd|phrase)|pwd|credentials?|authorization|cookies?|jwt|auth)"
    r"_?\d*|(?:(?:api|access|auth|secret|bearer|refresh)_)?tokens",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(
    r"(?:.*_)?(?:bos|eos|pad|unk|mask|sep|cls|stop|start|end|image|video|audio|vision|first|last|next|per|think\w*)_token"
    r"|PWD|OLDPWD",  # folders, where they are written in capitals
)
_IN_PROSE = {"token", "tokens", "secret", "auth", "cookie", "cookies", "jwt", "credential", "credentials"}
_HEADERS = {"authorization", "proxy_authorization", "x_api_key", "api_key", "cookie", "set_cookie"}
_WHOLE_LINE = {"authorization", "proxy_authorization", "cookie", "set_cookie"}

# ---- keys of services: the plugins whose forms are taken for nothing else, and forms that came after them
_PLUGINS = (
    "aws", "azure_storage_key", "github_token", "gitlab_token", "jwt", "pypi_token", "sendgrid", "slack",
    "square_oauth", "stripe", "twilio",
)  # fmt: skip
_LATER_FORMS = (
    r"github_pat_\w{16,}", r"gl[a-z]{2,5}-[\w-]{16,}", r"gh[pousr]_\w{12,}", r"nvapi-[\w-]{16,}", r"AIza[\w-]{30,}",
    r"hf_\w{13,}", r"sk-(?:[a-z0-9]+-){0,3}\w{13,}", r"xox[a-z]-[\w-]{11,}", r"npm_\w{30,}", r"wandb_v1_\w{16,}",
)  # fmt: skip
_STARTS = re.compile(r"(?:(?<![\w-])|(?<=\\[nrtbf])|(?<=\\u[0-9a-f]{4}))")
"""A word begins here, also behind an escape of JSON."""
_LONG = re.compile(r"[\w-]{16}")
_REST = re.compile(r"(?:[\w~+=-]|\.(?=\w))*")

# ---- the rest
_PRIVATE_KEY = re.compile(r"-----BEGIN[ A-Z0-9]*PRIVATE KEY(?: BLOCK)?-----(.*?)(?:-----END|\Z)", re.DOTALL)
_USER = re.compile(r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://([^\s/?#'\"<>]+)@", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)([^\s/?#'\"<>:@\\]*:[^\s/?#'\"<>\\]+)@")
_QUERY = re.compile(
    r"(?<=[^\s?&'\"])[?&][\w.%\[\]-]+=([^\s&#'\"<>`,;)]+)|://[^\s'\"<>?]{0,500}\?([^\s=&'\"<>`,;)]{8,})(?![=\w])"
)
_BEARER = re.compile(r"\bbearer\s+([\w.~+/=-]{6,})", re.IGNORECASE)
_SURE_BEARER = re.compile(r"bearer\s+((?=[\w.~+/=-]{0,200}\d)[\w.~+/=-]{16,})", re.IGNORECASE)
_SURE_HEADER = re.compile(
    r"(?:(?:proxy-)?authorization|(?:x-)?api-key|x-auth-token|(?:set-)?cookie)(?:\\*['\"])?:\s*(?:\\*['\"])?"
    r"((?=[^\n'\"\\]{0,200}\d)[^\n'\"\\]{8,})",
    re.IGNORECASE,
)
_SURE_FORMS = (
    (_PRIVATE_KEY, ("private key",)),
    (_PASSWORD, ("://",)),
    (_SURE_BEARER, ("bearer",)),
    (_SURE_HEADER, ("authorization", "api-key", "auth-token", "cookie")),
)
_NAMED = re.compile(r"(?<![\w-])([\w-]++)(\\*['\"]\]?)?(\s*(?:=>|={1,3}|:=?|\bis(?=\s['\"])|,)\s*|\s+)")
_QUOTED = re.compile(r"[bru]{0,2}(\\*['\"])(.+?)(?:\1|$)", re.IGNORECASE | re.MULTILINE)
_GROUP = re.compile(r"[(\[{]([^()\[\]{}\n]+)[)\]}]")
_BARE = re.compile(r"([^\s'\",;&|})\]]+)(?![(\[\w])")
_LINE = re.compile(r"([^\n'\"]+(?:(?<==)\"[^\"\n]*\"[^\n'\"]*)*)")
_NO_VALUE = re.compile(
    r"none|null|true|false|\.{3}|\$\w+|<[^<>]*>|[\d\s.,+-]*", re.IGNORECASE
)  # numbers count where only `token` and its like are the name


@lru_cache(maxsize=4096)  # each text asks of every variable of the environment
def is_secret(key: object) -> bool:
    """Return whether an entry of this name is one: `api_key`, `Authorization`, `judgeToken`; not `eos_token`, `max_tokens`."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(key).lstrip("-").replace("-", "_"))
    return _NAME.fullmatch(name) is not None and _NO_SECRET.fullmatch(name) is None


def redacted(text: str, hide: Callable[[str], str] = lambda secret: HIDDEN) -> str:
    """`text` without the secrets in it; `hide` gives what stands in the place of each.

    URLs keep their host and path and lose user, password and values of the query; headers lose their values.
    """
    for form in (_PRIVATE_KEY, _USER, _QUERY, _BEARER):
        text = _replaced(text, (_place(found) for found in form.finditer(text)), hide)
    return _without_known(_without_keys(_replaced(text, _assigned(text), hide), hide), hide)


def redacted_data(text: str, hide: Callable[[str], str] = lambda secret: HIDDEN) -> str:
    """`text`, which may be JSON, without what is surely a secret; other text stays as it is, whatever it speaks of."""
    folded = text.lower()
    for form, words in _SURE_FORMS:
        if any(word in folded for word in words):  # nearly no text has one, and looking for it costs less
            begun = (found for found in form.finditer(text) if form is _PRIVATE_KEY or _STARTS.match(text, found.start()))
            text = _replaced(text, map(_place, begun), hide)
    return _without_known(_without_keys(text, hide), hide)


def _place(found: re.Match[str]) -> tuple[int, int]:
    return found.span(found.lastindex or 0)


def _replaced(text: str, places: Iterable[tuple[int, int]], hide: Callable[[str], str]) -> str:
    """`text` with what is at `places` (from, to) hidden, but for references to the environment and what is hidden already."""
    parts, at = [], 0
    for start, end in places:
        if start >= at and not text.startswith((HIDDEN, "${"), start):
            parts += [text[at:start], hide(text[start:end])]
            at = end
    return "".join([*parts, text[at:]])


def _without_known(text: str, hide: Callable[[str], str]) -> str:
    """`text` without secrets that this process has been given: in configs, and in variables with names of secrets."""
    given = [*KNOWN, *(value for name, value in os.environ.items() if is_secret(name))]
    for value in sorted({value for value in given if _is_telling(value)}, key=len, reverse=True):
        if value in text:
            text = text.replace(value, hide(value))
    return text


def _is_telling(value: str) -> bool:
    """Return whether a text that has `value` has it for no other reason: no word, number or path is taken for a secret."""
    return len(value) >= 8 and not value.isalpha() and not value.isdigit() and not value.startswith(("/", "~", HIDDEN))


def _assigned(text: str) -> Iterable[tuple[int, int]]:
    """The places of values behind names of secrets: `token='…'`, `"api_key": "…"`, `Cookie: …`, `--password …`."""
    reach = 0
    for found in _NAMED.finditer(text):
        name, closed, between = found[1], found[2], found[3].strip()
        plain = name.strip("-").replace("-", "_").lower()
        is_option = name.startswith("--")
        if not is_secret(name) or (not between and not is_option) or text.startswith((HIDDEN, "${"), found.end()):
            continue
        if found.start() < reach:
            continue
        if between == "," and not (closed and (plain in _HEADERS or is_option)):
            continue
        value = _value(text, found.end(), is_line=plain in _WHOLE_LINE and between in (":", "=") and not closed)
        if value is None or value[1] == name:
            continue
        if between == "is" and value.re is not _QUOTED:
            continue
        secret = value[value.lastindex or 0]
        number_counts = plain.rstrip("0123456789").endswith(("word", "wd", "phrase", "key", "secret"))
        if _NO_VALUE.fullmatch(secret) and not (number_counts and any(map(str.isdigit, secret))):
            continue
        is_prose = plain in _IN_PROSE and not closed and re.match(r"\w[ \t]", text[max(found.start() - 2, 0) : found.start()])
        if is_prose and between in (":", "is") and (len(secret) < 8 or secret.isalpha()):
            continue  # `unexpected token: 'weights'`
        reach = value.end()
        yield value.span(value.lastindex or 0)


def _value(text: str, at: int, *, is_line: bool) -> re.Match[str] | None:
    forms = (_QUOTED, _LINE) if is_line else (_QUOTED, _GROUP, _BARE)
    return next((found for form in forms if (found := form.match(text, at))), None)


def _without_keys(text: str, hide: Callable[[str], str]) -> str:
    return _replaced(text, _keys(text), hide) if _LONG.search(text) else text


def _keys(text: str) -> list[tuple[int, int]]:
    """The places of keys of services; each goes on to where its word ends."""
    places = []
    for form, is_valid in _forms():
        if _STARTS.pattern in form.pattern and "eyJ" not in text:
            continue
        reach = 0
        for found in form.finditer(text):
            if found.start() < reach or not _STARTS.match(text, found.start()):
                continue
            rest = _REST.match(text, found.end())
            reach = rest.end() if rest else found.end()
            if is_valid(text[found.start() : reach]):
                places.append((found.start(), reach))
    return sorted(places)


@cache
def _forms() -> list[tuple[re.Pattern[str], Callable[[str], bool]]]:
    """The forms of keys, and a check of each; the plugins are imported with the first long word, as that takes a moment.

    Forms that look for names (they ignore case) are left out: `_assigned` does that.
    """
    base = importlib.import_module("detect_secrets.plugins.base").RegexBasedDetector
    forms: list[tuple[re.Pattern[str], Callable[[str], bool]]] = [(re.compile(form), bool) for form in _LATER_FORMS]
    for name in _PLUGINS:
        module = importlib.import_module(f"detect_secrets.plugins.{name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module.__name__:
                check, denied = getattr(kind, "is_formally_valid", bool), vars(kind)["denylist"]
                forms += [(_bounded(form), check) for form in denied if not form.flags & re.IGNORECASE]
    return forms


def _bounded(form: re.Pattern[str]) -> re.Pattern[str]:
    """A form that reads on without an end (`eyJ…`) is tried where words begin: repetitions would cost their length squared."""
    return re.compile(_STARTS.pattern + form.pattern) if form.pattern.startswith("eyJ") else form
