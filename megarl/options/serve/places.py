"""Names that clients choose, and the folders that they become: no name leads out of its folder.

A checkpoint is named `tinker://RUN/KIND/NAME`. Runs, sessions, samplers and models have ids that the server makes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from megarl.options.serve.values import RequestError

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Kinds of checkpoints, as paths have them, and as the protocol's types have them."""
SCHEME = "tinker://"
LONGEST_ID, LONGEST_NAME = 160, 128
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*", re.ASCII)


@dataclass(frozen=True, order=True)
class CheckpointPath:
    """The path of a checkpoint: its training run, its kind (one of `KINDS`) and its name."""

    run: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        """Check each part.

        Raises:
            RequestError: one is not what it may be.
        """
        folder_of(self.run)
        if self.kind not in KINDS:
            raise RequestError(f"the kind of a checkpoint must be one of {', '.join(KINDS)}, not {_shown(self.kind)}")
        if len(self.name) > LONGEST_NAME or not _NAME.fullmatch(self.name):
            raise RequestError(
                f"the name of a checkpoint must be up to {LONGEST_NAME} of letters, digits and _ . + = -, the first none of"
                f" . + = -; it is {_shown(self.name)}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `tinker://RUN/KIND/NAME`.

        Raises:
            RequestError: it is no such path.
        """
        parts = text[len(SCHEME) :].split("/") if text.startswith(SCHEME) else []
        if len(parts) != 3:
            raise RequestError(
                f"a checkpoint's path must be tinker://RUN/KIND/NAME with a KIND of {', '.join(KINDS)}; it is {_shown(text)}"
            )
        return cls(*parts)

    @property
    def text(self) -> str:
        """The path in the protocol's spelling."""
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"

    def __str__(self) -> str:
        return self.text


def folder_of(identity: str) -> str:
    """The name of the folder or file of an id, which has no colon.

    Raises:
        RequestError: it is none that this server makes.
    """
    if len(identity) > LONGEST_ID or not _ID.fullmatch(identity):
        raise RequestError(f"{_shown(identity)} does not exist", status=404)
    return identity.replace(":", "=")


def name_of(folder: str) -> str:
    """The id that `folder_of` made a folder's name of."""
    return folder.replace("=", ":")


def _shown(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 100 else f"{shown[:100]}…"
