"""Secrets that a user put into a config or a URL: never in saved configs, trackers, error sentences or logs.

Keys of free mappings (`rewards[].args`, `rollout.engine_args`, …) are told by their names, credentials in texts by their form.
"""

from __future__ import annotations

import re
from typing import Any

from megarl.config.yaml_tree import tree_places

HIDDEN = "(hidden)"
"""Text in the place of a secret."""

_NAMES = r"(?:api_?key|access_?key|private_?key|secret|token|password|passwd|credentials?|authorization)"
_KEY = re.compile(rf"(?:.*_)?{_NAMES}", re.IGNORECASE)
_NO_SECRET = re.compile(r"(?:.*_)?(?:bos|eos|pad|unk|mask|sep|cls|stop|start|end|image|think\w*)_token", re.IGNORECASE)
_IN_TEXT = r"(?:api_?key|access_?key|private_?key|secret|(?:auth|access|api)_?token|password|passwd|credentials?|authorization)"
_FORMS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (re.compile(r"(\bbearer\s+)(?!\(hidden\))[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\b(?:sk-[\w-]{12,}|hf_\w{12,}|gh[pousr]_\w{12,}|xox[abp]-[\w-]{8,}|AKIA[0-9A-Z]{12,})"), HIDDEN),
    (
        # 'api_key': 'value', api_key=value, ...?api_key=value&...
        re.compile(
            rf"""((?<!\w)['"]?(?:\w*[_-])?{_IN_TEXT}['"]?\s*[=:]\s*)(['"]?)(?!\(hidden\)|bearer\b)[^\s'",;&}}\])]{{4,}}""",
            re.IGNORECASE,
        ),
        rf"\1\2{HIDDEN}",
    ),
)


def is_secret(key: object) -> bool:
    """Return whether a mapping's entry of this name is one: `api_key`, `Authorization`, `judge-token`; not `eos_token`."""
    name = str(key).replace("-", "_")
    return _KEY.fullmatch(name) is not None and _NO_SECRET.fullmatch(name) is None


def without_secrets(tree: Any) -> Any:
    """A copy of a plain tree with `HIDDEN` in the place of every secret; credentials in URLs are secrets too."""
    if isinstance(tree, dict):
        return {
            key: HIDDEN if is_secret(key) and value not in (None, "", False) else without_secrets(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [without_secrets(value) for value in tree]
    return redacted(tree) if isinstance(tree, str) else tree


def redacted(text: str) -> str:
    """`text` without the credentials in it: in URLs, after `Bearer`, of well-known forms, or after a name like `api_key`."""
    for form, instead in _FORMS:
        text = form.sub(instead, text)
    return text


def hidden_at(tree: Any) -> str | None:
    """The place at which `tree`, read back from a saved config, lacks a secret; None if nowhere."""
    return next((path for path, value in tree_places(tree) if isinstance(value, str) and HIDDEN in value), None)


def bearer(token: str | None) -> dict[str, str]:
    """The HTTP header that brings `token`, which one of megarl's own servers asks of every request; empty without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}
