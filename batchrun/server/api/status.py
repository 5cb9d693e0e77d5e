"""One picture of a running deployment, for `status`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.slots import Slot
from batchrun.daemon.view import Foretold, view_engine, view_job
from batchrun.errors import StoreUnreachableError
from batchrun.pool.pace import Completion
from batchrun.store import jobs, results
from batchrun.store.jobs import Counts, JobRecord
from batchrun.types import EngineState


class Status:
    """Builds snapshots; counts of ended jobs are remembered, since they never change."""

    def __init__(self, daemon: Daemon, gateway_url: str) -> None:
        self._daemon = daemon
        self._gateway_url = gateway_url
        self._ended: dict[int, Counts] = {}
        self._jobs: dict[str, dict[str, object]] = {}
        self._completions: dict[str, Completion] = {}

    async def snapshot(self) -> dict[str, object]:
        """The deployment: engines, switch, stalls, and every job, oldest first.

        While the store's database does not answer: jobs that run as they are, others as they were
        last seen.
        """
        stalled = self._daemon.writer.stalled
        self._foretell()
        try:
            records = await asyncio.to_thread(jobs.list_jobs, self._daemon.store)
            self._jobs = {record.id: await self._view(record) for record in records}
        except StoreUnreachableError as error:
            stalled = str(error)
            await self._see_active()
        return {
            "gateway": self._gateway_url,
            "offline": self._daemon.dispatcher.is_offline_on,
            "stalled": stalled,
            "engines": _engines(self._daemon.slots),
            "jobs": list(self._jobs.values()),
        }

    async def job(self, job_id: str) -> dict[str, object]:
        """One job by id, prefix or name, with what holds it up: a stall, or no engine left."""
        stalled = self._daemon.writer.stalled
        self._foretell()
        try:
            record = await asyncio.to_thread(jobs.get, self._daemon.store, job_id)
            view = self._jobs[record.id] = await self._view(record)
        except StoreUnreachableError as error:
            await self._see_active()
            if job_id not in self._jobs:
                raise
            view, stalled = self._jobs[job_id], str(error)
        slots = self._daemon.slots
        are_gone = all(slot.engine.state is EngineState.FAILED for slot in slots)
        return view | {
            "stalled": stalled,
            "engine_failure": slots[0].engine.stage if are_gone else None,
        }

    def _foretell(self) -> None:
        """When the running jobs will be done; nobody knows while offline work is switched off."""
        dispatcher = self._daemon.dispatcher
        is_on = dispatcher.is_offline_on
        self._completions = dispatcher.assigner.turns.completions() if is_on else {}

    async def _see_active(self) -> None:
        """Take down how far the jobs in memory are; that does not need the store."""
        for job in list(self._daemon.active.values()):
            self._jobs[job.record.id] = await self._view(job.record)

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
            foretold=Foretold(
                self._daemon.dispatcher.assigner.turns.outlook(record.id),
                self._completions.get(record.id),
            ),
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
            "in_flight": slot.window.num_rows,
            "kv": slot.kv and {"tokens": slot.kv.num_tokens, "block_tokens": slot.kv.block_tokens},
            "telemetry": view_engine(slot.link),
        }
        for slot in slots
    ]
