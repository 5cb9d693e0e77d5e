"""One picture of a running deployment, for `status`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from batchrun.daemon import Daemon, Slot, view_job
from batchrun.store import Counts, JobRecord, jobs, results
from batchrun.types import EngineState


class Status:
    """Builds snapshots; counts of ended jobs are remembered, since they never change."""

    def __init__(self, daemon: Daemon, gateway_url: str) -> None:
        self._daemon = daemon
        self._gateway_url = gateway_url
        self._ended: dict[int, Counts] = {}

    async def snapshot(self) -> dict[str, object]:
        """The deployment: engines, switch, stalls, and every job, oldest first."""
        records = await asyncio.to_thread(jobs.list_jobs, self._daemon.store)
        return {
            "gateway": self._gateway_url,
            "offline": self._daemon.dispatcher.is_offline_on,
            "stalled": self._daemon.writer.stalled,
            "engines": _engines(self._daemon.slots),
            "jobs": [await self._view(record) for record in records],
        }

    async def job(self, job_id: str) -> dict[str, object]:
        """One job by id, prefix or name, with what holds it up: a stall, or no engine left."""
        record = await asyncio.to_thread(jobs.get, self._daemon.store, job_id)
        view = await self._view(record)
        slots = self._daemon.slots
        are_gone = all(slot.engine.state is EngineState.FAILED for slot in slots)
        return view | {
            "stalled": self._daemon.writer.stalled,
            "engine_failure": slots[0].engine.stage if are_gone else None,
        }

    async def _view(self, record: JobRecord) -> dict[str, object]:
        active = self._daemon.active.get(record.seq)
        if active is not None:
            counts = active.counts
        elif record.seq in self._ended:
            counts = self._ended[record.seq]
        else:
            counts = await asyncio.to_thread(results.count, self._daemon.store, record.seq)
            if record.state.is_terminal:
                self._ended[record.seq] = counts
        stage = self._daemon.stages.get(record.id)
        view = view_job(
            record,
            counts,
            active=active,
            stage=None if stage is None else stage.describe(),
            now_s=time.monotonic(),
        )
        return view.to_json()


def _engines(slots: Sequence[Slot]) -> list[dict[str, object]]:
    return [
        {
            "name": slot.engine.name,
            "url": slot.engine.client.base_url,
            "state": str(slot.engine.state),
            "stage": slot.engine.stage,
            "in_flight": slot.num_in_flight,
        }
        for slot in slots
    ]
