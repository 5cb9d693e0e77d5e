"""The daemon: takes jobs from the store through the engines and back, and never loses a row.

Everything here runs on one event loop; what blocks (reading input, SQL, writing output) runs in
threads. All that is kept in memory is derived from the store, so a killed daemon starts over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchrun.config import WindowConfig
from batchrun.daemon.active_job import ActiveJob
from batchrun.daemon.closing import export
from batchrun.daemon.dispatcher import Dispatcher
from batchrun.daemon.opening import open_job
from batchrun.daemon.slots import Slot
from batchrun.daemon.tasks import Stage, TaskSet
from batchrun.daemon.writer import Entry, ResultWriter
from batchrun.errors import BatchrunError, StateError, StoreError
from batchrun.store import JobRecord, NewJob, Store, jobs
from batchrun.types import JobState

log = logging.getLogger(__name__)

DEADLINE_CHECK_S = 1.0
RETRY_INTERVAL_S = 2.0
OUTPUT_RETRY_S = 30.0
CLEAN_STOP_S = 8.0
OFFLINE_SETTING = "offline"
LIVE_STATES = (JobState.VALIDATING, JobState.RUNNING, JobState.FINALIZING, JobState.CANCELLING)


@dataclass(slots=True)
class Daemon:
    """Runs the jobs of one store on some engines. `run` drives it; the rest are user commands.

    Commands raise UnknownJobError, StateError or StoreError.
    """

    store: Store
    slots: Sequence[Slot]
    window: WindowConfig
    links: Path
    active: dict[int, ActiveJob] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)
    writer: ResultWriter = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    _commands: asyncio.Lock = field(default_factory=asyncio.Lock)
    _opening: dict[int, JobRecord] = field(default_factory=dict)
    _closing: dict[int, asyncio.Lock] = field(default_factory=dict)
    _output_retry_at_s: dict[int, float] = field(default_factory=dict)
    _tasks: TaskSet = field(init=False)

    def __post_init__(self) -> None:
        self._tasks = TaskSet(self._on_bug)
        self.writer = ResultWriter(self.store, self._on_committed)
        epoch = jobs.begin_epoch(self.store, pid=os.getpid(), now_s=time.time())
        self.dispatcher = Dispatcher(
            self.store, self.writer, self.slots, self.window, epoch, self._pause_soon
        )
        self.dispatcher.is_offline_on = bool(jobs.read_setting(self.store, OFFLINE_SETTING, True))

    async def run(self) -> None:
        """Take up every unfinished job and work until cancelled; then stop cleanly.

        A clean stop gives the rows in flight back and commits what has come in, within 10 s.
        """
        self._tasks.spawn(self.writer.run())
        self._tasks.spawn(self.dispatcher.run())
        self._tasks.spawn(self.dispatcher.watch_suspects())
        for record in await asyncio.to_thread(jobs.list_jobs, self.store, only=LIVE_STATES):
            self._take_up(record)
        try:
            while True:
                await self._expire_overdue()
                await asyncio.sleep(DEADLINE_CHECK_S)
        finally:
            await self._stop()

    async def submit(self, job: NewJob) -> JobRecord:
        """Add a job; when this returns, the job survives any crash."""
        record = await asyncio.to_thread(jobs.create, self.store, job, now_s=time.time())
        self._take_up(record)
        return record

    async def pause(self, job_id: str, reason: str = "paused by the user") -> JobRecord:
        """Stop running a job's rows; those in flight are aborted and become pending again."""
        async with self._commands:
            record = await asyncio.to_thread(jobs.get, self.store, job_id)
            paused = await asyncio.to_thread(jobs.pause, self.store, record.id, reason)
            await self._withdraw(record.seq)
            return paused

    async def resume(self, job_id: str) -> JobRecord:
        """Go on with a paused job."""
        async with self._commands:
            record = await asyncio.to_thread(jobs.get, self.store, job_id)
            resumed = await asyncio.to_thread(jobs.resume, self.store, record.id)
            self._take_up(resumed)
            return resumed

    async def cancel(self, job_id: str) -> JobRecord:
        """End a job now: rows in flight are aborted, finished rows are kept in its output."""
        async with self._commands:
            record = await asyncio.to_thread(jobs.get, self.store, job_id)
            cancelling = await asyncio.to_thread(jobs.request_cancel, self.store, record.id)
            await self._withdraw(record.seq)
            self._tasks.spawn(self._close(cancelling), record.id)
            return cancelling

    async def set_offline(self, *, on: bool) -> None:
        """Turn all offline work on or off, durably; off aborts what is in flight."""
        await asyncio.to_thread(jobs.write_setting, self.store, OFFLINE_SETTING, on)
        self.dispatcher.is_offline_on = on
        if not on:
            for job in list(self.active.values()):
                await self.dispatcher.abort(job)
        self.dispatcher.wake()

    def _take_up(self, record: JobRecord) -> None:
        if record.state in {JobState.VALIDATING, JobState.RUNNING}:
            self._opening[record.seq] = record
            self._tasks.spawn(self._open(record), record.id)
        elif record.state in {JobState.FINALIZING, JobState.CANCELLING}:
            self._tasks.spawn(self._close(record), record.id)

    async def _open(self, record: JobRecord) -> None:
        """Bring a job into memory and let its rows go, unless it was taken up anew meanwhile."""
        await self.writer.flush()
        stage = self.stages.setdefault(record.id, Stage())
        try:
            job = await asyncio.to_thread(
                open_job, self.store, record, links=self.links, progress=stage
            )
        except BatchrunError as error:
            await self._pause_for(record.id, str(error))
            return
        finally:
            self.stages.pop(record.id, None)
        async with self._commands:
            if self._opening.get(record.seq) is not record:
                return
            del self._opening[record.seq]
            now = await asyncio.to_thread(jobs.get, self.store, record.id)
            if now.state is JobState.VALIDATING:
                now = await self._stored(jobs.start, record.id, now_s=time.time())
            if now.state is not JobState.RUNNING:
                return
            job.record = now
            self.active[record.seq] = job
            self.dispatcher.add(job)
        log.info("%s: %d rows to run", record.id, job.queue.num_pending)
        self._finish_if_done(job)

    async def _finish(self, record: JobRecord, ends_as: JobState) -> None:
        finalizing = await self._leave_running(jobs.begin_finalizing, record.id, ends_as)
        if finalizing is not None:
            await self._close(finalizing)

    async def _close(self, record: JobRecord) -> None:
        """Write the output file, then end the job. One at a time: an export cannot be stopped."""
        await self.writer.flush()
        async with self._closing.setdefault(record.seq, asyncio.Lock()):
            now = await asyncio.to_thread(jobs.get, self.store, record.id)
            if now.state in {JobState.FINALIZING, JobState.CANCELLING}:
                await self._export(now)

    async def _export(self, record: JobRecord) -> None:
        stage = self.stages.setdefault(record.id, Stage())
        reason = None
        try:
            await asyncio.to_thread(export, self.store, record, links=self.links, progress=stage)
        except BatchrunError as error:
            reason = f"output not written: {error}"
        finally:
            self.stages.pop(record.id, None)
        if reason is not None and record.state is JobState.FINALIZING:
            self._output_retry_at_s[record.seq] = time.monotonic() + OUTPUT_RETRY_S
            await self._pause_for(record.id, reason)
            return
        try:
            await self._stored(jobs.finish, record.id, now_s=time.time(), reason=reason)
        except StateError as error:
            log.info("%s", error)

    async def _expire_overdue(self) -> None:
        open_states = (JobState.VALIDATING, JobState.RUNNING, JobState.PAUSED)
        try:
            records = await asyncio.to_thread(jobs.list_jobs, self.store, only=open_states)
        except StoreError as error:
            log.error("the store cannot be read: %s", error)
            return
        now_s = time.monotonic()
        for record in records:
            is_overdue = record.expires_at is not None and record.expires_at <= time.time()
            if is_overdue and self._output_retry_at_s.get(record.seq, now_s) <= now_s:
                self._tasks.spawn(self._finish(record, JobState.EXPIRED), record.id)

    def _on_committed(self, batch: Sequence[Entry]) -> None:
        now_s = time.monotonic()
        for seq, outcome in batch:
            job = self.active.get(seq)
            if job is None:
                continue
            job.committed(outcome, now_s)
            self._finish_if_done(job)
        self.dispatcher.wake()

    def _finish_if_done(self, job: ActiveJob) -> None:
        if job.queue.is_finished:
            self._tasks.spawn(self._finish(job.record, JobState.COMPLETED), job.record.id)

    def _pause_soon(self, job: ActiveJob, reason: str) -> None:
        """Let no more rows go at once, and pause the job as soon as the store takes it."""
        if self.dispatcher.jobs.get(job.record.id) is job:
            del self.dispatcher.jobs[job.record.id]
            self._tasks.spawn(self._pause_unless_done(job, reason), job.record.id)

    async def _pause_unless_done(self, job: ActiveJob, reason: str) -> None:
        await self.writer.flush()
        if not job.queue.is_finished:
            await self._pause_for(job.record.id, reason)

    async def _pause_for(self, job_id: str, reason: str) -> None:
        log.warning("%s paused: %s", job_id, reason)
        await self._leave_running(jobs.pause, job_id, reason)

    async def _leave_running(
        self, transition: Callable[..., JobRecord], job_id: str, *args: object
    ) -> JobRecord | None:
        """Make a transition that ends the running of rows; None when the job is past it.

        While the store cannot be written it tries again, and users' commands get their turn.
        """
        while True:
            async with self._commands:
                try:
                    record = await asyncio.to_thread(transition, self.store, job_id, *args)
                    await self._withdraw(record.seq)
                    return record
                except StateError as error:
                    log.info("%s", error)
                    return None
                except StoreError as error:
                    log.error("the store cannot be written: %s", error)
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _withdraw(self, job_seq: int) -> None:
        job = self.active.get(job_seq)
        if job is not None:
            await self.dispatcher.remove(job)
            self.active.pop(job_seq, None)

    async def _stored(
        self, transition: Callable[..., JobRecord], *args: object, **kwargs: object
    ) -> JobRecord:
        """Make a transition; while the store cannot be written, wait and try again."""
        while True:
            try:
                return await asyncio.to_thread(transition, self.store, *args, **kwargs)
            except StoreError as error:
                log.error("the store cannot be written: %s", error)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _stop(self) -> None:
        self.dispatcher.is_offline_on = False
        for job in list(self.active.values()):
            await self.dispatcher.remove(job)
        try:
            await asyncio.wait_for(self.writer.flush(), CLEAN_STOP_S)
        except TimeoutError:
            log.error("stopped with results that could not be written: %s", self.writer.stalled)
        await self._tasks.cancel_all()

    def _on_bug(self, job_id: str, error: BaseException) -> None:
        reason = f"internal error: {error!r}; see daemon.log"
        self._tasks.spawn(self._pause_for(job_id, reason))
