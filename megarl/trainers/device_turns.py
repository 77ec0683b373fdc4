"""Who has the device of a colocated run, trainer or engines: one state machine for offload, sleep, wake and updates.

                    update                       generate
    TRAINING ───────────────────▶ UPDATING ───────────────────▶ GENERATING
     ▲  ▲ ▲    shed, then wake     │    ▲    the weights leave    │    │
     │  │ └────────────────────────┘    └─────────────────────────┘    │
     │  │       sleep, then all back       the weights come back       │
     │  └──────────────────────────────────────────────────────────────┘
     │ sleep                          sleep, then all back
    SHARED: everything is there, as when a run starts

There is no way from TRAINING to GENERATING: engines that were woken are given weights first, which each of them sees to by
itself, too (`rollout/weight_state.py`). Memory is always given up before other memory is taken.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, Protocol

from megarl.errors import EngineError

Kept = Literal["all", "policy", "none"]
"""What the trainer has on the device: everything, the policy's weights alone, or nothing."""


class Turn(Enum):
    """Who has the device."""

    SHARED = "trainer and engines"
    TRAINING = "the trainer"
    UPDATING = "the engines and the policy's weights"
    GENERATING = "the engines"


class Device(Protocol):
    """What is moved from and to the device."""

    def sleep(self) -> None:
        """Have all engines give up their memory, and their weights with it."""

    def wake(self) -> None:
        """Have all engines that sleep take memory again; they have no weights then."""

    def keep(self, what: Kept) -> None:
        """Bring the trainer to have exactly `what` on the device."""


class DeviceTurns:
    """The state machine. A move that fails in the middle leaves it without a state: every further one is refused."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.now: Turn | None = Turn.SHARED

    def train(self) -> None:
        """Before anything that the trainer computes, saves or exports."""
        if self.now is not Turn.TRAINING:
            self._move(Turn.TRAINING, (Turn.SHARED, Turn.UPDATING, Turn.GENERATING))

    def update(self) -> None:
        """Before engines are given weights, all of them or one that came back while the others generate."""
        if self.now is not Turn.UPDATING:
            self._move(Turn.UPDATING, (Turn.SHARED, Turn.TRAINING, Turn.GENERATING))

    def generate(self) -> None:
        """After engines were given weights."""
        self._move(Turn.GENERATING, (Turn.UPDATING,))

    def _move(self, to: Turn, ways: tuple[Turn, ...]) -> None:
        before, self.now = self.now, None
        if before is None:
            raise EngineError("a move of trainer or engines from the device failed; nothing may use it any more")
        if before not in ways:
            self.now = before
            raise EngineError(f"the device belongs to {before.value}, and cannot be given to {to.value} from there")
        if to is Turn.TRAINING:
            self._device.sleep()
            if before is not Turn.SHARED:
                self._device.keep("all")
        elif to is Turn.UPDATING:
            self._device.keep("policy")
            if before is Turn.TRAINING:
                self._device.wake()
        else:
            self._device.keep("none")
        self.now = to
