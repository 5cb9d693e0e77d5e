"""The picture of the deployment that `status` shows: engines, jobs, and what holds them up."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from batchrun.daemon.daemon import Daemon
from batchrun.daemon.dispatch import may_serve
from batchrun.daemon.engine_link import Slot
from batchrun.daemon.supervisor import Supervisor
from batchrun.daemon.view import MOST_ENDED, view_engine, view_job, with_deadline
from batchrun.engine.engine import AttachedEngine
from batchrun.errors import StoreLockedError, StoreUnreachableError
from batchrun.pool.pace import Completion
from batchrun.server.api.watch import LoopWatch
from batchrun.server.gateway.tally import ENDED, STUCK
from batchrun.server.web.gateway_figures import GatewayFigures
from batchrun.store import jobs, results
from batchrun.store.database import Store
from batchrun.store.jobs import Counts, JobRecord, Leader
from batchrun.types import DEFAULT_MODEL, OFFLINE_OFF, EnginePhase, JobState

HOUR_S = 3600.0
COUNT_REST = 20.0
"""Rows of a job that is not in memory are counted again after so many times as long as it took."""
PREDICTED_S = 1.0
"""For so long the ends of the same jobs are as predicted: with many jobs that takes long."""
JsonObject = dict[str, Any]


class Status:
    """Builds snapshots; counts of jobs that are not in memory are remembered. `tellings`
    is, by job, how it went to tell of its end; `price_per_hour` that of an engine."""

    def __init__(
        self,
        daemon: Daemon,
        gateway: Supervisor,
        figures: GatewayFigures,
        tellings: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
        price_per_hour: float | None = None,
    ) -> None:
        self.daemon = daemon
        self.watch = LoopWatch()
        self.watch.writer_waits_s = daemon.writer.waits_s
        self.figures = figures
        self.restarts = gateway.gateway_restarts
        self._gateway_url = gateway.gateway_url
        self.fleets = gateway.fleets
        self._tellings = tellings
        self._price_per_hour = price_per_hour
        self._counted: dict[int, _Counted] = {}
        self._jobs: dict[str, dict[str, object]] = {}
        self._num_more = 0
        self._completions: dict[str, Completion] = {}
        self._asked: tuple[bool, set[str], set[str]] | None = None
        self._predicted_s = 0.0

    async def snapshot(self, job: str | None = None) -> dict[str, object]:
        """The deployment: engines, switch, stalls, and jobs, oldest first: those that have not
        ended, the newest that have, and the one that `job` means. Raises UnknownJobError.

        While the store does not answer, or another process keeps it: jobs that run as they are,
        others as they were last seen.
        """
        stalled = self.daemon.writer.stalled
        routing = await self.figures.explain(0)
        self._predict()
        try:
            records, num_more = await asyncio.to_thread(
                jobs.list_shown, self.daemon.store, MOST_ENDED, job
            )
            self._jobs = await self._views(records)
            self._num_more = num_more
            self._counted = {
                each.seq: self._counted[each.seq] for each in records if each.seq in self._counted
            }
        except (StoreLockedError, StoreUnreachableError) as error:
            stalled = str(error)
            await self._see_active()
        # Nothing is awaited between: another snapshot would have other jobs.
        return {
            "gateway": self._gateway_url,
            "leadership": self._leadership(),
            "offline": self.daemon.dispatcher.is_offline_on,
            "stalled": stalled,
            "progress": self._progress(),
            "engines": self.engines,
            "fleets": self.fleets.view(),
            "felt": self.figures.view(),
            "routing": routing,
            "jobs": list(self._jobs.values()),
            "num_more_ended": self._num_more,
        }

    def _leadership(self) -> JsonObject | None:
        store = self.daemon.store
        leader = Leader(self.daemon.name, store.term or 0)
        return None if store.is_sqlite else view_role(leader, leads=True)

    def _progress(self) -> dict[str, object]:
        """How the daemon and the gateway get on."""
        now_s, watch = time.monotonic(), self.watch
        return {
            "writer_waits_s": round(self.daemon.writer.waits_s(now_s), 1),
            "gateway_silent_s": round(self.figures.silent_s(now_s), 1),
            "num_loop_stalls": watch.num_stalls,
            "longest_loop_stall_s": round(watch.longest_s, 1),
            "last_loop_stall_at": watch.last_at,
            "gateway_restarts": self.restarts,
            "replaced_workers": {why: self.figures.num_replaced(why) for why in (STUCK, ENDED)},
        }

    async def job(self, job_id: str) -> dict[str, object]:
        """One job by id, prefix or name, with what holds it up: a stall, or no engine left."""
        stalled = self.daemon.writer.stalled
        self._predict()
        try:
            record = await asyncio.to_thread(jobs.get, self.daemon.store, job_id)
            view = (await self._views([record]))[record.id]
            self._jobs[record.id] = view
        except (StoreLockedError, StoreUnreachableError) as error:
            await self._see_active()
            if job_id not in self._jobs:
                raise
            view, stalled = self._jobs[job_id], str(error)
        job = next((each for each in self.daemon.active.values() if each.id == view["id"]), None)
        failure = find_failure(self.daemon.slots, None if job is None else job.model)
        return view | {"stalled": stalled, "engine_failure": failure}

    async def views(self, records: Sequence[JobRecord]) -> list[dict[str, object]]:
        """These jobs as they are now, in their order. Raises StoreError."""
        self._predict()
        return list((await self._views(records)).values())

    @property
    def engines(self) -> list[dict[str, object]]:
        """The engines, with what their schedulers and the gateway tell."""
        return view_engines(self.daemon.slots, self.figures)

    def _predict(self) -> None:
        """When the running jobs will be done; nobody knows while offline work is switched off."""
        dispatcher, now_s = self.daemon.dispatcher, time.monotonic()
        is_on, turns = dispatcher.is_offline_on, dispatcher.assigner.turns
        asked = is_on, {*dispatcher.jobs}, {*dispatcher.waiting}
        if asked != self._asked or now_s >= self._predicted_s + PREDICTED_S:
            self._asked, self._predicted_s = asked, now_s
            self._completions = turns.completions(dispatcher.waiting) if is_on else {}

    async def _see_active(self) -> None:
        """Take down how far the jobs in memory are; that does not need the store."""
        views = await self._views([job.record for job in self.daemon.active.values()])
        self._jobs.update(views)

    async def _count(self, record: JobRecord) -> tuple[Counts, int]:
        """Of a job that is not in memory. What takes long with millions of rows is done rarely."""
        known = self._counted.get(record.seq)
        began_s = time.monotonic()
        if known is None or known.state is not record.state or known.until_s < began_s:
            counts = await asyncio.to_thread(_count, self.daemon.store, record)
            now_s = time.monotonic()
            lasts_s = math.inf if record.state.is_terminal else COUNT_REST * (now_s - began_s)
            known = self._counted[record.seq] = _Counted(record.state, now_s + lasts_s, counts)
        return known.counts

    async def _views(self, records: Sequence[JobRecord]) -> dict[str, dict[str, object]]:
        """By job. What engines lack for a model is found out once for all jobs."""
        find_lack = cache(partial(_find_lack, self.daemon.slots))
        return {record.id: await self._view(record, find_lack) for record in records}

    async def _view(
        self, record: JobRecord, find_lack: Callable[[str], str | None]
    ) -> dict[str, object]:
        active = self.daemon.active.get(record.seq)
        if active is not None:
            counts, num_cut = active.counts, active.num_cut
        else:
            counts, num_cut = await self._count(record)
        stage = self.daemon.stages.get(record.id)
        told = None if stage is None else stage.describe()
        dispatcher = self.daemon.dispatcher
        if told is None and record.state is JobState.RUNNING and not dispatcher.is_offline_on:
            told = OFFLINE_OFF
        elif told is None and active is not None:
            told = find_lack(active.model)
        is_waiting = record.id in dispatcher.waiting
        view = view_job(
            with_deadline(record, self.daemon.timeouts.job),
            counts,
            active=active,
            predicted=(
                dispatcher.assigner.turns.outlook(record.id),
                None if is_waiting else self._completions.get(record.id),
            ),
            stage=told,
            now_s=time.monotonic(),
        )
        engine_s, price = self.daemon.spent.spent_s.get(record.id, 0.0), self._price_per_hour
        return view | {
            "num_cut": num_cut,
            "on_done": self._tellings.get(record.id),
            "engine_s": round(engine_s, 1),
            "cost": None if price is None else engine_s / HOUR_S * price,
        }


def _count(store: Store, record: JobRecord) -> tuple[Counts, int]:
    """Ended rows and tokens of a job, and its answers that were cut."""
    return results.count(store, record.seq), results.count_cut(store, record)


class _Counted(NamedTuple):
    """What was counted of a job in that state, and until when that will do."""

    state: JobState
    until_s: float
    counts: tuple[Counts, int]


def view_role(leader: Leader, *, leads: bool) -> JsonObject:
    """Whether this daemon leads on its database, who does, and in which term."""
    role = "leader" if leads else "standby"
    return {"role": role, "leader": leader.name, "term": leader.term}


def find_failure(slots: Sequence[Slot], model: str | None) -> str | None:
    """Why no engine is left for rows of a model (None: any): all that may have it have failed."""
    wanted = [slot for slot in slots if not slot.is_off]
    if model == DEFAULT_MODEL and (awaited := _awaited(slots)) is not None:
        wanted = [slot for slot in wanted if slot.serves(model)] or [awaited]
    elif model is not None:
        wanted = [slot for slot in wanted if may_serve([slot], model)]
    if not wanted or not all(slot.is_lost for slot in wanted):
        return None
    engine = wanted[0].engine
    return engine.stage if len(slots) == 1 else f"engine {engine.name}: {engine.stage}"


def _find_lack(slots: Sequence[Slot], model: str) -> str | None:
    """What keeps all rows of a running job from going, of what engines lack; None: nothing."""
    if (failure := find_failure(slots, model)) is not None:
        return f"running, no engine is left: {failure}"
    awaited = _awaited(slots) if model == DEFAULT_MODEL else None
    if awaited is None or any(slot.serves(model) for slot in slots):
        return None
    return f"running, waiting for engine {awaited.engine.name} to tell its models"


def _awaited(slots: Sequence[Slot]) -> Slot | None:
    """The engine that is to tell yet which model rows without one get."""
    return next((slot.default_from for slot in slots), None)


def _stage_of(slot: Slot) -> str:
    if reasons := ", ".join(sorted(slot.drained_for)):
        return f"drains for {reasons}"
    held = slot.engine.progress.is_held and slot.engine.state is EnginePhase.READY
    return "paused or asleep: no rows go to it" if held else slot.engine.stage


def view_engines(slots: Sequence[Slot], figures: GatewayFigures) -> list[dict[str, object]]:
    """Engines as the daemon sees them, with what the gateway and their schedulers tell."""
    return [
        {
            "name": slot.engine.name,
            "url": slot.engine.client.base_url,
            "model": slot.default_model if slot.default_from is None else None,
            "is_attached": isinstance(slot.engine, AttachedEngine),
            "state": str(slot.engine.state),
            "stage": _stage_of(slot),
            "in_flight": slot.window.num_rows,
            "stalled_s": round(slot.engine.progress.stalled_s, 1),
            "num_hangs": slot.engine.progress.num_hangs,
            "ejected_s": figures.ejected_s(slot.engine.name),
            "kv": slot.kv and {"tokens": slot.kv.num_tokens, "block_tokens": slot.kv.block_tokens},
            "promises": figures.promises(slot.engine.name),
            "telemetry": view_engine(slot.link),
        }
        for slot in slots
        if slot.engine.state is not EnginePhase.STOPPED
    ]
