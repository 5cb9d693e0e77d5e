"""The switch for all offline work: durable, and obeyed by engines from their next step on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.dispatcher import Dispatcher
from batchrun.daemon.slots import Slot
from batchrun.daemon.steering import Steering
from batchrun.store import Store, jobs

SETTING = "offline"
SIT_OUT_S = 30.0
"""So long rows may sit in an engine while offline work is off; then they are taken back."""


@dataclass(slots=True)
class OfflineSwitch:
    """Turns offline work on and off. `restore` it before anything runs."""

    store: Store
    slots: Sequence[Slot]
    dispatcher: Dispatcher
    steering: Steering
    active: Mapping[int, ActiveJob]
    _sit_out_until_s: float | None = None

    def restore(self) -> None:
        """As it was when the last daemon ended."""
        is_on = bool(jobs.read_setting(self.store, SETTING, True))
        self.dispatcher.is_offline_on = self.steering.is_offline_on = is_on

    async def set(self, *, on: bool) -> None:
        """Turn all offline work on or off, durably.

        Off: rows in engines with batchrun's scheduler sit out from the next step on and go on with
        `on`; after `SIT_OUT_S`, and in other engines at once, they are aborted and pending again.
        """
        await asyncio.to_thread(jobs.write_setting, self.store, SETTING, on)
        self.dispatcher.is_offline_on = on
        obeying = await self.steering.switch(on=on)
        busy = {slot.engine.name for slot in self.slots if slot.window.num_rows}
        patience_s = SIT_OUT_S if busy <= obeying else 0.0
        self._sit_out_until_s = None if on else time.monotonic() + patience_s
        await self.take_back_rows()
        self.dispatcher.wake()

    async def take_back_rows(self) -> None:
        """Abort what has sat out for long enough."""
        if self._sit_out_until_s is None or time.monotonic() < self._sit_out_until_s:
            return
        self._sit_out_until_s = None
        for job in list(self.active.values()):
            await self.dispatcher.abort(job)
