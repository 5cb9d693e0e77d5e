"""Where a row may go: the engines, with what is in flight on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchrun.config import WindowConfig
from batchrun.daemon.active_job import ActiveJob
from batchrun.engine import Engine
from batchrun.types import EngineState


@dataclass(slots=True)
class Slot:
    """One engine as the dispatcher sees it, with what is in flight on it.

    `hint_nonce` is set where batchrun's scheduler runs inside it: rows then carry hints.
    """

    engine: Engine
    uses_priority: bool
    hint_nonce: str | None = None
    num_in_flight: int = 0
    in_flight_tokens: int = 0
    default_model: str | None = None
    is_suspect: bool = False
    is_solo: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether rows may be sent."""
        return self.engine.state is EngineState.READY and not self.is_suspect


@dataclass(frozen=True, slots=True)
class Assignment:
    """A row that was taken from its job's queue for an engine."""

    job: ActiveJob
    row: int
    slot: Slot
    tokens: int


def choose_slot(
    slots: Sequence[Slot], window: WindowConfig, group: int, tokens: int, *, solo: bool
) -> Slot | None:
    """The engine that this prefix group goes to, or the least loaded when that one is full.

    A `solo` row waits for an engine with nothing in flight. None when no engine has room.
    """
    usable = [slot for slot in slots if slot.is_usable]
    if not usable:
        return None
    preferred = usable[group % len(usable)]
    others = sorted(usable, key=lambda slot: slot.in_flight_tokens)
    fitting = (s for s in (preferred, *others) if _has_room(s, window, tokens, solo=solo))
    return next(fitting, None)


def _has_room(slot: Slot, window: WindowConfig, tokens: int, *, solo: bool) -> bool:
    if slot.num_in_flight == 0:
        return True
    if solo or slot.is_solo:
        return False
    fits = slot.in_flight_tokens + tokens <= window.tokens
    return fits and slot.num_in_flight < window.requests
