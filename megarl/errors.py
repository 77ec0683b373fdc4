"""Mistakes of the user, as one sentence. Every room raises these; only the CLI catches them (exit code 2).

An error about a field is made from facts (`MegarlError.of`, `MegarlError.needs`), and this file alone turns facts into
English. Code that wants to know what an error is about asks the facts; no code reads or rewrites a sentence.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

LONGEST_VALUE = 300
"""Characters of a value that a sentence shows at most."""

SHORTEST_BEGINNING = 2
"""Characters of a name's last word that may be the beginning of another name."""


@dataclass(frozen=True)
class WrongValue:
    """`field` has a value that it cannot have. `reason` follows "which", `allowed` follows "it must be".

    `choices` are the names that are allowed, if they are names; they give the nearest one. `rule` is the reason without
    numbers, by which errors of one kind are counted; where it is empty, `reason` has none.
    """

    field: str
    value: Any
    reason: str = ""
    allowed: str = ""
    choices: tuple[str, ...] = ()
    rule: str = ""

    @property
    def sentence(self) -> str:
        """The facts in words."""
        allowed = self.allowed or either(f"'{choice}'" for choice in self.choices)
        which = f", which {self.reason}" if self.reason else ""
        guess = nearest(self.value, self.choices) if isinstance(self.value, str) else ""
        return f"{self.field} is {describe_value(self.value)}{which}" + (f"; it must be {allowed}" if allowed else "") + guess

    @property
    def kind(self) -> str:
        """The common part of errors of this kind: the field and the rule that its value breaks."""
        return f"{self.field} {self.rule or self.reason or f'must be {self.allowed}'}"


@dataclass(frozen=True)
class Missing:
    """`field` works only with something that is not there. `what` follows "needs", `remedy` says what to set or remove."""

    field: str
    what: str
    remedy: str

    @property
    def sentence(self) -> str:
        """The facts in words."""
        return f"{self.field} needs {self.what}: {self.remedy}"

    @property
    def kind(self) -> str:
        """The common part of errors of this kind."""
        return f"{self.field} needs {self.what}"


class MegarlError(Exception):
    """Base of every error that the user can fix; `str(error)` is the sentence shown to the user."""

    facts: WrongValue | Missing | None = None
    """Facts that the sentence was made from; None where it was written by hand."""

    @classmethod
    def of(
        cls, field: str, value: Any, reason: str = "", *, allowed: str = "", choices: Sequence[str] = (), rule: str = ""
    ) -> Self:
        """`<field> is <value>, which <reason>; it must be <allowed>`; see `WrongValue`."""
        return cls._from(WrongValue(field, value, reason, allowed, tuple(choices), rule))

    @classmethod
    def needs(cls, field: str, what: str, remedy: str) -> Self:
        """`<field> needs <what>: <remedy>`; see `Missing`."""
        return cls._from(Missing(field, what, remedy))

    @classmethod
    def needs_set(cls, field: str, what: str, setting: str) -> Self:
        """`<field> needs <what>: set <setting>, or remove <field>`; see `Missing`."""
        return cls.needs(field, what, f"set {setting}, or remove {field}")

    @classmethod
    def _from(cls, facts: WrongValue | Missing) -> Self:
        error = cls(facts.sentence)
        error.facts = facts
        return error

    def under(self, section: str, kind: type[Kind]) -> Kind:
        """The same error, as a `kind`, about the field inside `section`: `tp` under `policy.layout` is `policy.layout.tp`."""
        if self.facts is None:
            return kind(f"{section}: {self}")
        return kind._from(replace(self.facts, field=f"{section}.{self.facts.field}"))

    @property
    def kind(self) -> str:
        """The common part of errors of this kind, for counting them: no values and no numbers."""
        return type(self).__name__ if self.facts is None else self.facts.kind


Kind = TypeVar("Kind", bound=MegarlError)


class ConfigError(MegarlError):
    """A config field is unknown, has the wrong type, or contradicts another field."""


class OwnerError(ConfigError):
    """A folder belongs to another process that is alive, or was taken over by one."""


class DataError(MegarlError):
    """A data file or one of its rows cannot be used."""


class PictureError(DataError):
    """A picture or video of a row cannot be used; `data.bad_pictures` says whether that ends the run."""


class ModelError(MegarlError):
    """A model folder is missing, incomplete, of an unknown architecture or contradicts its weights."""


class LayoutError(MegarlError):
    """A parallel layout does not divide the model or the world."""


class RewardError(MegarlError):
    """A reward source raised, answered the wrong shape, or answered a value that is no reward."""


class RewardServerError(RewardError):
    """A server of rewards could not be asked, or had none to give, however often it was tried."""


class EngineError(MegarlError):
    """A rollout engine did not start, died, or refused a request or a weight update."""


class EpisodeError(MegarlError):
    """A kind of episode, a tool or an environment cannot be used, or an environment failed."""


class CheckpointError(MegarlError):
    """A checkpoint is missing, damaged or belongs to another run."""


class MirrorError(MegarlError):
    """The second place of a run's checkpoints (`run.mirror`) cannot be read or written, or what is sent there is damaged."""


class GuardError(MegarlError):
    """A numerical guard stopped the run: figures that are not finite, or a rule of `run.guards`."""


class RunStopped(MegarlError):
    """A run saved and left, because a signal asked it to; not a failure, and it can be continued (exit code 75)."""


class RunInterrupted(RunStopped):
    """A run was ended by Ctrl-C; the sentence says from where it can be continued (exit code 130)."""


class ClusterError(ConfigError):
    """There is no Ray cluster at the address in the config, or it has too few places for the layouts."""


class WorkerError(MegarlError):
    """A worker process raised or died; the message carries the worker's own traceback."""

    who: str = ""
    """The process that is to blame, as far as that is known."""


class RankLostError(WorkerError):
    """The processes of some training ranks are gone."""


class DeadlineError(MegarlError):
    """A wait on another process ran out; the message names the phase and who had not arrived."""

    who: str = ""
    """The processes that did not arrive."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the choice closest to `name`, or an empty string if none is close.

    Choices that begin with `name` come first: what is cut short is nearer than what is spelt like it.
    """
    names = list(choices)
    cut_short = len(re.split(r"[./_-]", name)[-1]) >= SHORTEST_BEGINNING
    longer = [choice for choice in names if cut_short and choice.lower().startswith(name.lower())]
    close = difflib.get_close_matches(name, longer or names, n=1, cutoff=0.0 if longer else 0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 node`, `2 nodes`, `1,200 entries` (`plural`: where it is not `noun` with an s)."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def either(values: Iterable[object]) -> str:
    """`1`, `1 or 2`, `1, 2 or 4`."""
    *first, last = [*map(str, values)] or [""]
    return f"{', '.join(first)} or {last}" if first else last


def describe_value(value: Any) -> str:
    """`value` as it stands in YAML, for a sentence: one line, texts in quotes, cut where it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        shown = f"'{value}'" if value.isprintable() else repr(value)
    elif isinstance(value, dict):
        return f"a section ({', '.join(map(str, value))})" if value else "an empty section"
    elif isinstance(value, list | tuple):
        shown = f"[{', '.join(map(describe_value, value))}]"
    else:
        shown = str(value)
    return shown if len(shown) <= LONGEST_VALUE else f"{shown[:LONGEST_VALUE]}…"


_KEPT = "\n\t\u200c\u200d\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
"""Characters of ordinary texts that Python calls not printable: breaks, spaces, and joiners of letters and emoji."""


def written_out(text: str) -> str:
    """`text` with what would steer a terminal, or cannot be encoded, written as an escape sequence such as `\\x1b`.

    That is what every text of a run, a model, a row or a file goes through before it is printed (`system/terminal.py`): control
    characters (C0, C1), marks that turn the direction of writing, invisible characters, half characters.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in _KEPT else character.encode("unicode_escape").decode()
        for character in text.replace("\r\n", "\n")
    )
