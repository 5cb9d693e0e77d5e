"""Feeds the engines: takes rows in planned order, keeps a bounded window in flight on each."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from batchrun.config import WindowConfig
from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.backoff import retry_delay_s
from batchrun.daemon.hinting import Hinter
from batchrun.daemon.slots import Assignment, Slot, choose_slot
from batchrun.daemon.writer import ResultWriter
from batchrun.errors import BatchrunError, EngineError, StoreError
from batchrun.inputs import RowRenderError
from batchrun.store import Store, results
from batchrun.types import EngineState, Outcome, OutcomeKind, Request, RowError

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.25
ROWS_PER_READ = 16
OFFLINE_PRIORITY = 1
DEFAULT_MODEL = "default"
SOLO_AFTER_DEATHS = 2
MAX_DEATHS = 4


@dataclass(slots=True)
class Dispatcher:
    """Hands rows of the active jobs to the engines.

    `pause_job(job, reason)` is called when a job's setting is at fault. Everything runs on one
    event loop; only reading and rendering rows happens in a thread.
    """

    store: Store
    writer: ResultWriter
    slots: Sequence[Slot]
    window: WindowConfig
    epoch: int
    pause_job: Callable[[ActiveJob, str], None]
    jobs: dict[str, ActiveJob] = field(default_factory=dict)
    is_offline_on: bool = True
    rng: random.Random = field(default_factory=random.Random)
    hinter: Hinter = field(init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.hinter = Hinter(self.epoch)

    def wake(self) -> None:
        """Something changed that may let another row go."""
        self._wake.set()

    def add(self, job: ActiveJob) -> None:
        """Let a job's rows go, from now on with its fair share."""
        shares = [other.served_tokens / other.spec.weight for other in self.jobs.values()]
        job.served_tokens = int(min(shares, default=0.0) * job.spec.weight)
        self.jobs[job.record.id] = job
        self.wake()

    async def run(self) -> None:
        """Dispatch for ever; cancel to end."""
        while True:
            self._wake.clear()
            assignments = self._assign()
            if assignments:
                await self._send(assignments)
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_INTERVAL_S)

    async def watch_suspects(self) -> None:
        """Send rows again to engines that were down and answer now; cancel to end."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            for slot in self.slots:
                if slot.is_suspect and slot.engine.state is EngineState.READY:
                    slot.is_suspect = not await slot.engine.client.is_healthy()
                    self.wake()

    async def remove(self, job: ActiveJob) -> None:
        """Let no more of a job's rows go, and abort what is in flight."""
        self.jobs.pop(job.record.id, None)
        await self.abort(job)

    async def abort(self, job: ActiveJob) -> None:
        """Abort what is in flight of a job; its rows become pending again."""
        tasks = list(job.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _assign(self) -> list[Assignment]:
        if not self.is_offline_on or self.writer.stalled is not None:
            return []
        now_s = time.monotonic()
        assignments: list[Assignment] = []
        while len(assignments) < ROWS_PER_READ:
            ready = [job for job in self.jobs.values() if job.is_ready(now_s)]
            if not ready:
                break
            job = min(ready, key=lambda job: job.served_tokens / job.spec.weight)
            row = job.queue.peek(now_s)
            assert row is not None
            tokens = job.plan.estimate_tokens(row)
            solo = job.deaths.get(row, 0) >= SOLO_AFTER_DEATHS
            slot = choose_slot(self.slots, self.window, job.group_of[row], tokens, solo=solo)
            if slot is None:
                break
            slot.is_solo = solo
            job.queue.take(row)
            job.served_tokens += tokens
            slot.num_in_flight += 1
            slot.in_flight_tokens += tokens
            assignments.append(Assignment(job, row, slot, tokens))
        return assignments

    async def _send(self, assignments: Sequence[Assignment]) -> None:
        by_job: dict[str, list[Assignment]] = {}
        for assignment in assignments:
            by_job.setdefault(assignment.job.record.id, []).append(assignment)
        for group in by_job.values():
            job = group[0].job
            rows = [assignment.row for assignment in group]
            try:
                rendered = await asyncio.to_thread(_render_rows, job, rows)
            except BatchrunError as error:
                for assignment in group:
                    self._release(assignment)
                    job.queue.give_back(assignment.row)
                self.pause_job(job, str(error))
                continue
            for assignment, body in zip(group, rendered, strict=True):
                self._begin(assignment, body)

    def _begin(self, assignment: Assignment, body: dict[str, object] | RowError) -> None:
        job, row = assignment.job, assignment.row
        if self.jobs.get(job.record.id) is not job or not self.is_offline_on:
            self._release(assignment)
            job.queue.give_back(row)
            return
        if isinstance(body, RowError):
            self._release(assignment)
            self._conclude(job, Outcome(job.record.id, row, 0, OutcomeKind.ROW_ERROR, error=body))
            return
        task = asyncio.create_task(self._execute(assignment, body))
        job.tasks[row] = task
        task.add_done_callback(lambda task: self._ended(assignment, task))

    async def _execute(self, assignment: Assignment, body: dict[str, object]) -> None:
        job, row, slot = assignment.job, assignment.row, assignment.slot
        attempt = job.attempts.get(row, 0) + 1
        try:
            if body.get("model") == DEFAULT_MODEL:
                body["model"] = await self._default_model(slot)
            if slot.uses_priority:
                body["priority"] = OFFLINE_PRIORITY
            if slot.hint_nonce is not None:
                self.hinter.add_hint(body, job, row, slot.hint_nonce)
            request = Request(job.record.id, row, attempt, self.epoch, job.spec.endpoint, body)
            outcome = await slot.engine.client.execute(request)
            await self._settle(assignment, outcome)
        except EngineError as error:
            slot.is_suspect = True
            log.warning("engine %s: %s", slot.engine.name, error)
            job.queue.give_back(row)

    async def _settle(self, assignment: Assignment, outcome: Outcome) -> None:
        """Decide what an outcome means for its row."""
        job, slot = assignment.job, assignment.slot
        if outcome.kind in {OutcomeKind.OK, OutcomeKind.ROW_ERROR}:
            self._conclude(job, outcome)
        elif outcome.kind is OutcomeKind.JOB_ERROR:
            job.queue.give_back(outcome.row)
            assert outcome.error is not None
            self.pause_job(job, f"every row would fail: {outcome.error.message}")
        elif slot.is_suspect or not await slot.engine.client.is_healthy():
            slot.is_suspect = True
            await self._blame(job, outcome)
        else:
            await self._retry(job, outcome)

    def _conclude(self, job: ActiveJob, outcome: Outcome) -> None:
        """The row has ended: its result goes to the store."""
        self.writer.put(job.record.seq, outcome)
        reason = job.breaker.see(outcome)
        if reason is not None:
            self.pause_job(job, reason)

    async def _blame(self, job: ActiveJob, outcome: Outcome) -> None:
        """An engine went down with this row in flight.

        That does not use up the row's retries. A row that was there `SOLO_AFTER_DEATHS` times runs
        with nothing beside it, so that only the row that kills engines reaches `MAX_DEATHS`.
        """
        row = outcome.row
        job.deaths[row] = job.deaths.get(row, 0) + 1
        await self._remember(results.record_engine_death, job.record.seq, [row])
        if job.deaths[row] < MAX_DEATHS:
            job.queue.give_back(row)
            return
        error = RowError("engine_died", f"{MAX_DEATHS} engines died while this row ran")
        self._conclude(job, replace(outcome, kind=OutcomeKind.ROW_ERROR, error=error))

    async def _retry(self, job: ActiveJob, outcome: Outcome) -> None:
        if outcome.attempt > job.spec.retries:
            self._conclude(job, outcome)
            return
        job.attempts[outcome.row] = outcome.attempt
        await self._remember(results.record_attempt, job.record.seq, outcome.row, outcome.attempt)
        delay_s = retry_delay_s(outcome.attempt, outcome.retry_after_s, self.rng)
        job.queue.give_back(outcome.row, ready_at_s=time.monotonic() + delay_s)

    async def _remember(self, record: Callable[..., None], *values: object) -> None:
        """Write a count that outlives the daemon; without it a restart counts anew."""
        try:
            await asyncio.to_thread(record, self.store, *values)
        except StoreError as error:
            log.error("the store cannot be written: %s", error)

    def _ended(self, assignment: Assignment, task: asyncio.Task[None]) -> None:
        """The only place that sees every cancelled task: one may end before its first step."""
        job = assignment.job
        job.tasks.pop(assignment.row, None)
        self._release(assignment)
        if task.cancelled():
            job.queue.give_back(assignment.row)
        elif (error := task.exception()) is not None:
            log.critical("row %d of %s failed", assignment.row, job.record.id, exc_info=error)
            self.pause_job(job, f"internal error: {error!r}; see daemon.log")

    def _release(self, assignment: Assignment) -> None:
        assignment.slot.num_in_flight -= 1
        assignment.slot.in_flight_tokens -= assignment.tokens
        self.wake()

    async def _default_model(self, slot: Slot) -> str:
        if slot.default_model is None:
            models = await slot.engine.client.models()
            if not models:
                raise EngineError(f"{slot.engine.client.base_url} serves no model")
            slot.default_model = models[0]
        return slot.default_model


def _render_rows(job: ActiveJob, rows: Sequence[int]) -> list[dict[str, object] | RowError]:
    """The bodies of these rows, read back from the input."""
    rendered: list[dict[str, object] | RowError] = []
    for row, values in zip(rows, job.data.read_rows(rows, job.template.columns_used), strict=True):
        try:
            rendered.append(job.template.render(values, row_number=row))
        except RowRenderError as problem:
            rendered.append(problem.row_error)
    return rendered
