"""What the user did wrong, as one sentence. Every room raises these; only the CLI catches them (exit code 2).

A message names the field or file, what it was, what it may be and, where there is one, the nearest valid name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MegarlError(Exception):
    """Base of every error that the user can mend; `str(error)` is the sentence shown to the user."""


class ConfigError(MegarlError):
    """A config field is unknown, has the wrong type, or contradicts another field."""


class DataError(MegarlError):
    """A data file or one of its rows cannot be used."""


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


class GuardError(MegarlError):
    """A numerical guard stopped the run: figures that are not finite, or a rule of `run.guards`."""


class RunStopped(MegarlError):
    """A run saved and left, because a signal asked it to; not a failure, and it can be continued (exit code 75)."""


class ClusterError(ConfigError):
    """There is no Ray cluster at the address in the config, or it has too few places for the layouts."""


class WorkerError(MegarlError):
    """A worker process raised or died; the message carries the worker's own traceback."""

    who: str = ""
    """The process that is to blame, as far as that is known."""


class DeadlineError(MegarlError):
    """A wait on another process ran out; the message names the phase and who had not arrived."""

    who: str = ""
    """The processes that did not arrive."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the choice closest to `name`, or an empty string if none is close."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
