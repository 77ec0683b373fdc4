"""The weights that an engine has, and what may be done with them next, as one state machine that every engine keeps.

Pure: no clock, no I/O. An engine asks it before it acts, so that an order of calls which would let it answer with weights of
no known version, or with a mixture of two, raises instead.

                 begin              check             confirm
    EMPTY ───────────────▶ UPDATING ──────▶ CHECKING ────────▶ SERVING
      ▲ ▲                     │ fail           │ fail            │  │ begin: UPDATING again
      │ │                     │ ◀──── doubt ───┤                 │  │
      │ └─────────────────────┴────────────────┘                 │  │
      │ wake                                sleep                 │
    ASLEEP ◀──────────────────────────────────────────────────────┘   (from EMPTY, too)

`lose` (the process died, was stopped or was started anew) leads from everywhere to EMPTY.
"""

from __future__ import annotations

from enum import Enum

from megarl.errors import EngineError


class Weights(Enum):
    """The state of an engine's weights."""

    EMPTY = "of no known version"
    UPDATING = "being received"
    CHECKING = "being checked"
    SERVING = "complete"
    ASLEEP = "given up with the device's memory"


class WeightState:
    """One engine's state. Every method raises EngineError, and changes nothing, where the table has no way from here.

    `version` is what the engine may answer with: None unless its weights are complete and checked. `base` is the version
    whose weights an open update builds on; None: all of them are sent.
    """

    def __init__(self, version: int | None = None) -> None:
        self.now = Weights.EMPTY if version is None else Weights.SERVING
        self.version = version
        self.updating: int | None = None
        self.base: int | None = None

    def begin(self, version: int, base: int | None = None) -> None:
        """An update to `version` begins. With `base` only what changed since that version will be sent."""
        if self.updating is not None:
            raise EngineError(f"the update to version {self.updating} is still open; end it before beginning {version}")
        if self.now is Weights.ASLEEP:
            raise EngineError("the engine sleeps; wake it before sending weights")
        if base is not None and base != self.version:
            has = "weights of no known version" if self.version is None else f"version {self.version}"
            raise EngineError(f"the update to version {version} builds on {base}, but the engine has {has}; send all weights")
        self.now, self.version, self.updating, self.base = Weights.UPDATING, None, version, base

    def receive(self) -> None:
        """Some weights have come."""
        if self.now is not Weights.UPDATING:
            raise EngineError("no weight update is open; call begin_update first")

    def check(self, version: int) -> None:
        """All weights of `version` have come; `confirm` or `fail` must follow."""
        if self.now is not Weights.UPDATING or self.updating != version:
            raise EngineError(f"end_update({version}) does not end the update that was begun ({self.updating})")
        self.now = Weights.CHECKING

    def confirm(self) -> None:
        """The weights are what was sent: the engine serves them."""
        if self.now is not Weights.CHECKING:
            raise EngineError("no weight update is being checked")
        self.now, self.version, self.updating = Weights.SERVING, self.updating, None

    def doubt(self) -> None:
        """Take note that the weights need a closer look, for which `check` is called again."""
        if self.now is not Weights.CHECKING:
            raise EngineError("no weight update is being checked")
        self.now = Weights.UPDATING

    def fail(self) -> None:
        """The open update is given up: whatever the engine holds now, it is of no known version."""
        if self.updating is None:
            raise EngineError("no weight update is open that could be given up")
        self.lose()

    def sleep(self) -> None:
        """The device's memory is given up, and the weights with it."""
        if self.updating is not None:
            raise EngineError(f"the update to version {self.updating} is still open; end it before the engine sleeps")
        if self.now is Weights.ASLEEP:
            raise EngineError("the engine sleeps already")
        self.now, self.version = Weights.ASLEEP, None

    def wake(self) -> None:
        """Memory is there again; the weights are not."""
        if self.now is not Weights.ASLEEP:
            raise EngineError("the engine does not sleep")
        self.now = Weights.EMPTY

    def lose(self) -> None:
        """The weights are gone, whatever was going on."""
        self.now, self.version, self.updating, self.base = Weights.EMPTY, None, None, None
