"""The daemon: takes jobs from the store through the engines and back, and never loses a row.

Everything here runs on one event loop; what blocks (reading input, SQL, writing output) runs in
threads. All that is kept in memory is derived from the store, so a killed daemon starts over.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

from batchrun.config import TimeoutsConfig
from batchrun.daemon.dispatcher import Dispatcher
from batchrun.daemon.ending import JobEnd, remove_expired_files, remove_old_results
from batchrun.daemon.engine_link import Slot, Steering
from batchrun.daemon.job import ActiveJob
from batchrun.daemon.opening import ModelFolder, Opener
from batchrun.daemon.prices import EngineSeconds
from batchrun.daemon.view import with_deadline
from batchrun.daemon.writer import (
    RETRY_INTERVAL_S,
    BatchCreator,
    Entry,
    ResultWriter,
    Stage,
    TaskSet,
    until_reached,
    until_stored,
)
from batchrun.engine.agent.messages import OWN, Leadership, here
from batchrun.errors import BatchrunError, InputError, StateError, StoreError
from batchrun.jobs.objects import in_thread
from batchrun.jobs.results.file_bytes import FileBytes
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import pin_again
from batchrun.media.fetching import ImageFetcher
from batchrun.store import jobs
from batchrun.store.api_keys import NO_LIMITS, KeyLimits
from batchrun.store.batches import BatchRecord, WantedBatch
from batchrun.store.database import Store
from batchrun.store.jobs import JobRecord, NewJob
from batchrun.types import DEFAULT_MODEL, JobState

log = logging.getLogger(__name__)

DEADLINE_CHECK_S = 1.0
CLEAN_STOP_S = 8.0
SWITCH_SETTING = "offline"
DEFAULT_SETTING = "default_model"
SIT_OUT_S = 30.0
"""So long rows may sit in an engine while offline work is off; then they are taken back."""
LIVE_STATES = (JobState.VALIDATING, JobState.RUNNING, JobState.FINALIZING, JobState.CANCELLING)


@dataclass(slots=True)
class Daemon:
    """Runs the jobs of one store on some engines. `run` drives it; the rest are user commands.

    `model_folder` tells where the files of a model are, if they are on this machine. Results
    are removed `retention_s` after their job's end; None keeps them. `files` is where the files of
    OpenAI's API lie; None: there are no batches. `images` fetches what rows name. `python` is
    an interpreter with vLLM, `key_limits` what user keys may that have no limit of their own; in
    `kept_in` lie rows that batchrun kept itself. `timeouts` bound rows, and jobs without a
    deadline. `name` is what others call this daemon, `first_model` what batchrun.yaml has the
    first engine serve. Commands raise UnknownJobError, StateError or StoreError.
    """

    store: Store
    slots: Sequence[Slot]
    links: Path
    model_folder: ModelFolder = field(default=lambda _: None)
    retention_s: float | None = None
    files: FileBytes | None = None
    images: ImageFetcher = field(default_factory=ImageFetcher)
    python: Path | None = None
    key_limits: KeyLimits = NO_LIMITS
    kept_in: Sequence[Path] = ()
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    name: str = ""
    first_model: str | None = None
    gateway: str = ""
    before_start: Callable[[ActiveJob], None] = lambda _: None
    active: dict[int, ActiveJob] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)
    writer: ResultWriter = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    steering: Steering = field(init=False)
    opener: Opener = field(init=False)
    end: JobEnd = field(init=False)
    spent: EngineSeconds = field(init=False)
    _commands: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sit_out_until_s: float = math.inf
    _kept_default: list[str | None] = field(init=False)
    _opening: dict[int, JobRecord] = field(default_factory=dict)
    _expiring: set[int] = field(default_factory=set)
    _left_over: Sequence[JobRecord] = field(init=False)
    _creator: BatchCreator = field(init=False)
    _tasks: TaskSet = field(init=False)

    def __post_init__(self) -> None:
        self._tasks = TaskSet(self._on_bug)
        self.writer = ResultWriter(self.store, self._on_committed)
        self._creator = BatchCreator(self.store)
        self.opener = Opener(
            self.store,
            self.slots,
            self.links,
            self.model_folder,
            self.files,
            self.python,
            self.key_limits,
            self.first_model,
        )
        self.end = JobEnd(
            self.store, self.writer, self.links, self.stages, self._pause_for, self.files
        )
        epoch = jobs.begin_epoch(
            self.store, pid=os.getpid(), now_s=time.time(), name=self.name, gateway=self.gateway
        )
        where = f"{OWN}{here()} " if self.store.is_sqlite else ""
        leadership = Leadership(where + self.store.identity(), epoch)
        for slot in self.slots:
            if slot.agent is not None:
                slot.agent.leadership = leadership
        self.dispatcher = Dispatcher(
            self.store, self.writer, self.slots, epoch, self._pause_soon, self.images
        )
        self.dispatcher.row_timeout_s = self.timeouts.row
        links = {s.engine.name: (s.link, s.orders_nonce) for s in self.slots if s.link}
        self.steering = Steering(links, epoch, self.dispatcher.jobs.keys)
        is_on = bool(jobs.read_setting(self.store, SWITCH_SETTING, True))
        self.dispatcher.is_offline_on = self.steering.is_offline_on = is_on
        kept = cast(list[str | None], jobs.read_setting(self.store, DEFAULT_SETTING, ["", None]))
        engine_name, model = self._kept_default = kept
        for slot in self.slots:
            slot.last_model = model if slot.engine.name == engine_name else None
        self._left_over = jobs.list_jobs(self.store, only=LIVE_STATES)
        self.spent = EngineSeconds(self.store)
        self.spent.load()

    async def run(self) -> None:
        """Take up every job that an earlier daemon left, and work until cancelled; then stop.

        A clean stop gives the rows in flight back and commits what has come in, within 10 s.
        Raises what a task of the daemon's own raised: nothing goes on without it.
        """
        self._tasks.spawn(self.writer.run())
        self._tasks.spawn(self.dispatcher.run())
        self._tasks.spawn(self.dispatcher.watch_engines())
        self._tasks.spawn(self.steering.run())
        for slot in self.slots:
            self._tasks.spawn(slot.watch_progress(lambda: self.dispatcher.is_offline_on))
        self._tasks.spawn(
            remove_old_results(self.store, self.links, self.kept_in, age_s=self.retention_s)
        )
        self._tasks.spawn(remove_expired_files(self.store, self.files))
        for record in self._left_over:
            self._take_up(record)
        try:
            while True:
                await self._expire_overdue()
                await self._take_back_rows()
                await self._count_engine_time()
                await self._keep_default_model()
                for outlook in self.dispatcher.assigner.turns.take_news():
                    log.warning("%s %s", outlook.job_id, outlook)
                await asyncio.wait([self._tasks.failure], timeout=DEADLINE_CHECK_S)
                if self._tasks.failure.done():
                    self._tasks.failure.result()
        finally:
            await self._stop()

    async def _keep_default_model(self) -> None:
        """Rows that name no model go on with the same one after a restart, whoever answers then."""
        first = next((slot for slot in self.slots if not slot.is_off and slot.models), None)
        if first is None or not first.models or first.default_from is not None:
            return
        kept: list[str | None] = [first.engine.name, first.models[0]]
        if kept != self._kept_default:
            with suppress(StoreError):
                await asyncio.to_thread(jobs.write_setting, self.store, DEFAULT_SETTING, kept)
                self._kept_default = kept

    def check_model(self, model: str) -> None:
        """Raises InputError when every engine that has not failed has told its models, and this is
        none of them."""
        known = [slot.models for slot in self.slots if not slot.is_lost]
        if model == DEFAULT_MODEL or not known or not all(known):
            return
        names = sorted({name for models in known for name in models or ()})
        if model in names:
            return
        lost = [slot.engine.name for slot in self.slots if slot.is_lost and not slot.is_off]
        failed = f"; failed: {', '.join(lost)}, see `batchrun status`" if lost else ""
        raise InputError(
            f"model: no engine serves {model!r}; they serve {', '.join(names)}{failed}"
        )

    async def submit(self, job: NewJob) -> JobRecord:
        """Add a job; when this returns, the job survives any crash. Raises InputError for a model
        that no engine serves."""
        self.check_model(JobSpec.model_validate_json(job.spec).model)
        record = await asyncio.to_thread(jobs.create, self.store, job, now_s=time.time())
        log.info("%s: submitted, %s, %d rows", record.id, record.name, record.num_rows)
        if record.seq not in self.active.keys() | self._opening.keys():
            self._take_up(record)
        return record

    async def submit_batch(self, wanted: WantedBatch) -> BatchRecord:
        """Add a batch of OpenAI's API, or find the one that its idempotency key stands for."""
        created = await self._creator.create(wanted)
        if created.job.id == wanted.job.id:
            self._take_up(created.job)
        return created

    async def pause(self, job_id: str, reason: str = "paused by the user") -> JobRecord:
        """Stop running a job's rows; those in flight are aborted and become pending again."""
        async with self._commands:
            record = await asyncio.to_thread(jobs.get, self.store, job_id)
            paused = await asyncio.to_thread(jobs.pause, self.store, record.id, reason)
            await self._withdraw(record.seq)
            return paused

    async def resume(self, job_id: str, *, accept_input: bool = False) -> JobRecord:
        """Go on with a paused job; `accept_input`: with its input as it is now.

        Raises DataError, JobSpecError and StorageError when that cannot be the job's input.
        """
        record = await asyncio.to_thread(jobs.get, self.store, job_id)
        pin = await in_thread(pin_again, record, links=self.links) if accept_input else None
        if accept_input:
            await self.writer.flush()  # Answers to what it held are older than its acceptance.
        async with self._commands:
            resume = partial(jobs.resume, now_s=time.time(), pin=pin)
            resumed = await asyncio.to_thread(resume, self.store, record.id)
            self._take_up(resumed)
            return resumed

    async def cancel(self, job_id: str, *, settle_s: float = 0.0) -> JobRecord:
        """End a job; finished rows are kept in its output. Rows in flight may go on for `settle_s`
        and are aborted then."""
        async with self._commands:
            record = await asyncio.to_thread(jobs.get, self.store, job_id)
            cancelling = await asyncio.to_thread(
                jobs.request_cancel, self.store, record.id, now_s=time.time()
            )
            if settle_s == 0:
                await self._withdraw(record.seq)
            elif record.seq in self.active:
                self.dispatcher.hold(self.active[record.seq])
        self._tasks.spawn(self._end_cancelled(cancelling, settle_s), record.id)
        return cancelling

    async def switch_offline(self, *, on: bool) -> None:
        """Turn all offline work on or off, durably.

        Off: rows in engines with batchrun's scheduler sit out from the next step on and go on with
        `on`; after `SIT_OUT_S`, and in other engines at once, they are aborted and pending again.
        """
        await asyncio.to_thread(jobs.write_setting, self.store, SWITCH_SETTING, on)
        self.dispatcher.is_offline_on = on
        obeying = await self.steering.switch(on=on)
        busy = {slot.engine.name for slot in self.slots if slot.window.num_rows}
        wait_s = SIT_OUT_S if busy <= obeying else 0.0
        self._sit_out_until_s = math.inf if on else time.monotonic() + wait_s
        await self._take_back_rows()
        self.dispatcher.wake()

    async def _count_engine_time(self, *, at_once: bool = False) -> None:
        """Count the engines' time towards the jobs that use it."""
        if self.dispatcher.is_offline_on:
            self.spent.look(self.slots, time.monotonic())
        with suppress(StoreError):
            await asyncio.to_thread(self.spent.save, time.monotonic(), at_once=at_once)

    async def _take_back_rows(self) -> None:
        """Abort what has sat out for long enough."""
        if time.monotonic() >= self._sit_out_until_s:
            self._sit_out_until_s = math.inf
            for job in list(self.active.values()):
                await self.dispatcher.abort(job)

    def _take_up(self, record: JobRecord) -> None:
        if record.state in {JobState.VALIDATING, JobState.RUNNING}:
            self._opening[record.seq] = record
            self._tasks.spawn(self._open(record), record.id)
        elif record.state in {JobState.FINALIZING, JobState.CANCELLING}:
            self._tasks.spawn(self.end.close(record), record.id)

    async def _end_cancelled(self, record: JobRecord, settle_s: float) -> None:
        job = self.active.get(record.seq)
        if job is not None:
            await job.settle(settle_s)
            async with self._commands:
                await self._withdraw(record.seq)
        await self.end.close(record)

    async def _open(self, record: JobRecord) -> None:
        """Bring a job into memory and let its rows go, unless it was taken up again meanwhile."""
        await self.writer.flush()
        stage = self.stages.setdefault(record.id, Stage())
        try:
            job = await self.opener.open(record, stage)
        except BatchrunError as error:
            await self._pause_for(record.id, str(error))
            return
        finally:
            self.stages.pop(record.id, None)
        if job is None:
            if self._opening.get(record.seq) is record:
                del self._opening[record.seq]
            return
        async with self._commands:
            if not await self._start(record, job):
                await asyncio.to_thread(job.close)
                return
        log.info("%s: %d rows to run", record.id, job.queue.num_pending)
        self._finish_if_done(job)

    async def _start(self, record: JobRecord, job: ActiveJob) -> bool:
        """Let the rows of an opened job go, unless it was taken up again or is not to run."""
        if self._opening.get(record.seq) is not record:
            return False
        del self._opening[record.seq]
        now = await until_reached(jobs.get, self.store, record.id)
        if now.state is JobState.VALIDATING:
            now = await until_stored(jobs.start, self.store, record.id, now_s=time.time())
        if now.state is not JobState.RUNNING:
            return False
        job.record = with_deadline(now, self.timeouts.job)
        self.active[record.seq] = job
        self.before_start(job)
        self.dispatcher.add(job)
        return True

    async def _finish(self, record: JobRecord, ends_as: JobState) -> None:
        begin = partial(jobs.begin_finalizing, now_s=time.time())
        finalizing = await self._leave_running(begin, record.id, ends_as)
        if finalizing is not None:
            await self.end.close(finalizing)

    async def _expire_overdue(self) -> None:
        open_states = (JobState.VALIDATING, JobState.RUNNING, JobState.PAUSED)
        try:
            records = await asyncio.to_thread(jobs.list_jobs, self.store, only=open_states)
        except StoreError as error:
            log.error("the store cannot be read: %s", error)
            return
        self.dispatcher.forget_rows({record.id for record in records})
        for record in records:
            expires_at = with_deadline(record, self.timeouts.job).expires_at
            is_overdue = expires_at is not None and expires_at <= time.time()
            if is_overdue and record.seq not in self._expiring and self.end.may_try(record.seq):
                self._expiring.add(record.seq)
                self._tasks.spawn(self._expire(record), record.id)

    async def _expire(self, record: JobRecord) -> None:
        try:
            await self._finish(record, JobState.EXPIRED)
        finally:
            self._expiring.discard(record.seq)

    def _on_committed(self, batch: Sequence[Entry]) -> None:
        now_s = time.monotonic()
        self.dispatcher.committed([(outcome.job_id, outcome.row) for _, outcome in batch])
        for seq, outcome in batch:
            job = self.active.get(seq)
            if job is None:
                continue
            job.committed(outcome, now_s)
            self._finish_if_done(job)
        self.dispatcher.wake()

    def _finish_if_done(self, job: ActiveJob) -> None:
        if job.queue.is_finished:
            is_lost = not job.counts.num_completed and not job.record.is_batch
            ends_as = JobState.FAILED if is_lost else JobState.COMPLETED
            self._tasks.spawn(self._finish(job.record, ends_as), job.record.id)

    def _pause_soon(self, job: ActiveJob, reason: str) -> None:
        """Let no more rows go at once, and pause the job as soon as the store takes it."""
        if self.dispatcher.jobs.get(job.record.id) is job:
            self.dispatcher.hold(job)
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
            self.stages.pop(job.id, None)
            self.dispatcher.waiting.discard(job.id)
            self.steering.forget(job.record.id)
            log.info("%s: %s", job.record.id, job.accuracy())

    async def _stop(self) -> None:
        await self._count_engine_time(at_once=True)
        self.dispatcher.leave()
        await asyncio.gather(*map(self.dispatcher.remove, self.active.values()))
        try:
            async with asyncio.timeout(CLEAN_STOP_S):
                await self.writer.flush()
        except TimeoutError:
            log.error("stopped with results that could not be written: %s", self.writer.stalled)
        await self._tasks.cancel()
        await self.images.close()

    def _on_bug(self, job_id: str, error: BaseException) -> None:
        reason = f"internal error: {error!r}; see daemon.log"
        self._tasks.spawn(self._pause_for(job_id, reason))
