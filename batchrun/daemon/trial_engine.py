"""Where there are several engines, suspects run on one that is set apart for them: neither online
calls nor other rows suffer when it dies again (design section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchrun.daemon.slots import Place, Slot
from batchrun.types import EngineState

ASK_AGAIN_S = 0.25
"""A suspect that cannot go now is put aside for so long; other rows go before it."""
COMPANY_WAIT_S = 300.0
"""Suspects wait so long for a second engine; then they run on the only one."""


@dataclass(slots=True)
class TrialEngine:
    """Chooses the engine that is set apart, and gives it back to all when no suspect is left."""

    slots: Sequence[Slot]
    slot: Slot | None = None
    _alone_since_s: float | None = None

    def set_apart(self, now_s: float, *, has_suspects: bool) -> bool:
        """Choose, keep or give back the engine. Returns whether suspects wait for `find_room`; else
        they go where all rows go. `now_s` is monotonic."""
        living = [slot for slot in self.slots if not _is_lost(slot)]
        if not has_suspects:
            self._alone_since_s = None
        if not has_suspects or len(living) < 2 or self._is_alone(now_s):
            self._give_back()
            return False
        if self.slot is not None and _is_lost(self.slot):
            self._give_back()
        usable = [slot for slot in living if slot.is_usable]
        if self.slot is None and len(usable) >= 2:
            self.slot = min(usable, key=lambda slot: slot.window.num_tokens)
            self.slot.is_set_apart = True
        return True

    def find_room(self, place: Place, now_s: float) -> Slot | None:
        """The engine that is set apart, if a suspect may go there now (monotonic)."""
        slot = self.slot
        if slot is None or not slot.is_usable or not slot.is_left_alone(now_s):
            return None
        return slot if slot.has_room_for(place, now_s) else None

    def _is_alone(self, now_s: float) -> bool:
        """Whether no second engine has answered for long."""
        others = [slot for slot in self.slots if slot is not self.slot and slot.is_usable]
        if len(others) >= (2 if self.slot is None else 1):
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = now_s
        return self._alone_since_s is not None and now_s - self._alone_since_s > COMPANY_WAIT_S

    def _give_back(self) -> None:
        if self.slot is not None:
            self.slot.is_set_apart, self.slot.apart_since_s = False, None
            self.slot = None


def _is_lost(slot: Slot) -> bool:
    return slot.engine.state in {EngineState.FAILED, EngineState.STOPPED}
