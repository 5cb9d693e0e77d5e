"""Feeds the engines: renders the rows that the dispatch hands out, sends them, settles them."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from batchrun.daemon.dispatch import Assigner
from batchrun.daemon.engine_link import Slot, choose_default
from batchrun.daemon.faults import (
    DOUBT_WAIT_S,
    FIRST_DELAY_S,
    MAX_SOLO_DEATHS,
    Verdict,
    checked_answer,
    retry_delay_s,
)
from batchrun.daemon.in_flight import Assignment, LargeBodies
from batchrun.daemon.job import ActiveJob, Hinter
from batchrun.daemon.writer import ResultWriter, cancel_all
from batchrun.engine.agent.remote import UNTOLD
from batchrun.engine.client import BODY_CODE, encode_body
from batchrun.errors import BatchrunError, EngineError, InputError, StoreError
from batchrun.media.fetching import ImageFetcher, ImageUnreachableError, RowImages, must_fetch
from batchrun.media.images import IMAGE_CODE, ImageError, without_cache_names
from batchrun.store import results
from batchrun.store.database import Store
from batchrun.types import DEFAULT_MODEL, EnginePhase, Outcome, OutcomeKind, Request, RowError
from batchrun.wire import RowKey

log = logging.getLogger(__name__)

SentRow = Assignment[ActiveJob, Slot]

POLL_INTERVAL_S = 0.25
GATHER_S = 0.01
"""Rows that end within this time are replaced together: reading a row costs a switch of threads."""
OFFLINE_PRIORITY = 1
MEET_S = 10.0
"""Agents that do not answer for so long at first are not waited for."""
MODELS_S = 10.0
"""Engines are asked for their models so often: adapters come and go."""
ASK_AGAIN_S = 1.0
MAX_UNTOLD = 5
"""An engine of others that answers and did not tell its models, asked so often, may serve any."""
ASIDE_S = 1.0
"""A row that was aborted, or finds no turn for its images, goes again after others."""
SLOW_READ_S, SLOW_CLOSE_S = 1.0, 5.0
RETRY_SHARE = 0.5
"""A row never waits for longer than this part of the time until its job's deadline."""


@dataclass(slots=True)
class Dispatcher:
    """Hands rows of the active jobs to the engines.

    `pause_job(job, reason)` is called when a job's setting is at fault. No row may take longer than
    `row_timeout_s`. Of the jobs `waiting`, by id, no row goes. Everything runs on one event loop;
    only reading and rendering rows happens in a thread.
    """

    store: Store
    writer: ResultWriter
    slots: Sequence[Slot]
    epoch: int
    pause_job: Callable[[ActiveJob, str], None]
    images: ImageFetcher = field(default_factory=ImageFetcher)
    is_offline_on: bool = True
    row_timeout_s: float = math.inf
    waiting: set[str] = field(default_factory=set)
    rng: random.Random = field(default_factory=random.Random)
    hinter: Hinter = field(init=False)
    assigner: Assigner[ActiveJob, Slot] = field(init=False)
    _row_images: RowImages = field(init=False)
    _bodies: LargeBodies = field(default_factory=LargeBodies)
    _resting: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.hinter = Hinter(self.epoch)
        self.assigner = Assigner(self.slots, self.waiting, self._bodies.resting)
        self._row_images = RowImages(self.images)
        self.assigner.resting = (self._row_images.resting, self._resting)

    @property
    def jobs(self) -> Mapping[str, ActiveJob]:
        """The jobs whose rows go, by id."""
        return self.assigner.jobs

    def wake(self) -> None:
        """Something changed that may let another row go."""
        self._wake.set()

    def add(self, job: ActiveJob) -> None:
        """Let a job's rows go, from now on with its fair share."""
        left_s = job.left_s
        deadline_at = None if left_s == math.inf else time.monotonic() + left_s
        self.assigner.join(job, deadline_at=deadline_at, seq=job.record.seq)
        self.wake()

    def hold(self, job: ActiveJob) -> None:
        """Let no more of a job's rows go; those in flight go on."""
        self.assigner.leave(job)

    async def run(self) -> None:
        """Dispatch for ever; cancel to end."""
        await self._meet_agents()
        while True:
            self._wake.clear()
            now_s = time.monotonic()
            self._look_at_late()
            self._adopt_rows(now_s)
            assignments, again_at_s = self._assign(now_s)
            if assignments:
                await self._send(assignments)
                continue
            pause_s = POLL_INTERVAL_S if again_at_s is None else again_at_s - now_s
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, POLL_INTERVAL_S)):
                    await self._wake.wait()
                    await asyncio.sleep(GATHER_S)

    async def _meet_agents(self) -> None:
        """Hear from the agents what they have, so that none of it is sent again."""
        agents = [slot.agent for slot in self.slots if slot.agent and slot.agent.base_url]
        with suppress(TimeoutError):
            async with asyncio.timeout(MEET_S):
                for agent in agents:
                    await agent.has_met.wait()

    def _adopt_rows(self, now_s: float) -> None:
        """Take over rows of running jobs that agents have from before."""
        for engine, slot in enumerate(self.slots):
            if slot.agent is None:
                continue
            for job_id in slot.agent.inherited.keys() & self.jobs.keys():
                for row in list(slot.agent.inherited[job_id]):
                    self._adopt_row(self.jobs[job_id], row, engine, now_s)

    def _adopt_row(self, job: ActiveJob, row: int, engine: int, now_s: float) -> None:
        agent, assignment = self.slots[engine].agent, None
        assert agent is not None
        content = agent.inherited[job.id][row]
        if content in {job.content, UNTOLD} and 0 <= row < job.record.num_rows:
            assignment = self.assigner.adopt(job, row, engine, now_s)
        if assignment is None:
            agent.forget([(job.id, row)])
            return
        outcome = agent.claim((job.id, row), content)
        task = self._await(assignment, self._fetch(assignment, outcome))
        # A task that is cancelled before its first step takes the row back too.
        task.add_done_callback(lambda _: outcome.cancel())

    async def _fetch(self, assignment: SentRow, outcome: asyncio.Future[Outcome]) -> None:
        job = assignment.job
        try:
            ended = await outcome
            if not job.record.is_batch:
                body = await job.read_back(assignment.row)
                if not isinstance(body, RowError):
                    ended = await checked_answer(job.spec.endpoint, body, ended)
            await self._settle(assignment, ended)
        except EngineError as error:
            self._lose(assignment, error)
        except BatchrunError as error:
            self._give_back(assignment)
            self.pause_job(job, str(error))

    def forget_rows(self, open_jobs: Collection[str]) -> None:
        """Nothing need be kept of the rows of jobs that are not open any more."""
        self._bodies.forget_all_but(open_jobs)
        for agent in filter(None, (slot.agent for slot in self.slots)):
            for job_id in agent.inherited.keys() - open_jobs:
                agent.forget([(job_id, row) for row in agent.inherited[job_id]])

    def committed(self, keys: Collection[RowKey]) -> None:
        """Results of these rows are durable."""
        for slot in self.slots:
            if slot.agent is not None:
                slot.agent.committed(keys)

    def leave(self) -> None:
        """The daemon ends: agents go on with the rows that they have."""
        self.is_offline_on = False
        for slot in self.slots:
            if slot.agent is not None:
                slot.agent.leave()

    async def watch_engines(self) -> None:
        """Send rows again to engines that were down and answer now, and ask engines what their KV
        holds and which models they serve; cancel to end."""
        async with asyncio.TaskGroup() as group:
            for slot in self.slots:
                group.create_task(self._watch_engine(slot))
            while True:
                choose_default(self.slots)
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _watch_engine(self, slot: Slot) -> None:
        is_kv_told, ask_at_s, num_untold = False, 0.0, 0
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            now_s = time.monotonic()
            if slot.engine.state is not EnginePhase.READY:
                is_kv_told, ask_at_s, num_untold = False, 0.0, 0
                continue
            if slot.is_down:
                if await slot.engine.client.is_healthy():
                    slot.came_back()
                    self.wake()
            elif not is_kv_told:
                is_kv_told = True
                with suppress(EngineError):
                    slot.kv = await slot.engine.client.kv_config()
            if now_s >= ask_at_s:
                num_untold = 0 if await self._ask_for_models(slot) else num_untold + 1
                if num_untold >= MAX_UNTOLD and (slot.models or slot.expected_model) is None:
                    self._learn(slot, ())
                ask_at_s = now_s + (ASK_AGAIN_S if slot.models is None else MODELS_S)

    async def _ask_for_models(self, slot: Slot) -> bool:
        """Whether the engine told what it serves; what is known stays while it does not."""
        try:
            models = await slot.engine.client.models()
        except EngineError:
            return False
        self._learn(slot, models)
        return True

    def _learn(self, slot: Slot, models: Sequence[str]) -> None:
        if models != slot.models:
            slot.models = tuple(models)
            choose_default(self.slots)
            self.wake()

    async def remove(self, job: ActiveJob) -> None:
        """Let no more of a job's rows go, abort what is in flight, and close its input."""
        self.hold(job)
        await self.abort(job)
        await job.close_soon(SLOW_CLOSE_S)

    async def abort(self, job: ActiveJob) -> None:
        """Abort what is in flight of a job; its rows become pending again."""
        await cancel_all(job.tasks.values())

    def _assign(self, now_s: float) -> tuple[list[SentRow], float | None]:
        if not self.is_offline_on or self.writer.stalled is not None:
            self.assigner.idle(now_s)
            return [], None
        assigned = self.assigner.assign(now_s)
        for holdout in self.assigner.in_the_way.values():
            if (task := holdout.job.tasks.get(holdout.row)) is not None:
                task.cancel()
        return assigned

    async def _send(self, assignments: Sequence[SentRow]) -> None:
        by_job: dict[str, list[SentRow]] = {}
        for assignment in assignments:
            by_job.setdefault(assignment.job.record.id, []).append(assignment)
        sending = [asyncio.create_task(self._send_group(group)) for group in by_job.values()]
        done, late = await asyncio.wait(sending, timeout=SLOW_READ_S)
        await asyncio.gather(*done)
        for task, job_id in zip(sending, by_job, strict=True):
            if task in late:  # A job whose input is read slowly holds up no other one.
                self._resting[job_id] = task
                task.add_done_callback(lambda _: self.wake())

    def _look_at_late(self) -> None:
        for job_id in [each for each, task in self._resting.items() if task.done()]:
            self._resting.pop(job_id).result()

    async def _send_group(self, group: Sequence[SentRow]) -> None:
        async with group[0].job.reading:
            rendered = await self._render(group)
        for assignment, body in zip(group, rendered, strict=False):
            self._begin(assignment, body)

    async def _render(self, group: Sequence[SentRow]) -> list[dict[str, object] | RowError]:
        """The bodies of one job's rows; none where it left meanwhile or cannot be read."""
        job = group[0].job
        problem = None
        if self.jobs.get(job.record.id) is job:
            try:
                return await asyncio.to_thread(job.render, [each.row for each in group])
            except BatchrunError as error:
                problem = str(error)
            except Exception as error:
                log.exception("rows of %s cannot be made", job.record.id)
                problem = f"internal error: {error!r}; see daemon.log"
        for assignment in group:
            self._release(assignment)
            self._give_back(assignment)
        if problem is not None:
            self.pause_job(job, problem)
        return []

    def _begin(self, assignment: SentRow, body: dict[str, object] | RowError) -> None:
        job, row = assignment.job, assignment.row
        if self.jobs.get(job.record.id) is not job or not self.is_offline_on:
            self._release(assignment)
            self._give_back(assignment)
            return
        if isinstance(body, RowError):
            self._conclude(assignment, Outcome(job.id, row, 0, OutcomeKind.ROW_ERROR, error=body))
            return
        self._await(assignment, self._execute(assignment, body))

    def _await(self, assignment: SentRow, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """See a row that is in flight to its end, in a task of its job."""
        task = asyncio.create_task(work)
        assignment.job.tasks[assignment.row] = task
        task.add_done_callback(lambda task: self._ended(assignment, task))
        return task

    async def _execute(self, assignment: SentRow, body: dict[str, object]) -> None:
        job, row, slot = assignment.job, assignment.row, assignment.slot
        attempt = job.attempts.get(row, 0) + 1
        timeout_s = min(job.spec.row_timeout, self.row_timeout_s)
        asked = {"response_format": body.get("response_format")}
        try:
            data = await self._prepared(assignment, body, timeout_s)
            del body  # Memory holds it once while it is in flight.
            if data is None:
                self._give_back(assignment, ready_at_s=time.monotonic() + ASIDE_S)
                return
            client, where = slot.engine.client, (self.epoch, job.spec.endpoint)
            request = Request(job.id, row, attempt, *where, {}, job.content)
            room = partial(self.writer.room, slot.engine.name)
            with self._bodies.holding(assignment, len(data)):
                outcome = await client.execute(request, data=data, timeout_s=timeout_s, room=room)
            if not job.record.is_batch:
                outcome = await checked_answer(job.spec.endpoint, asked, outcome)
            await self._settle(assignment, outcome)
        except InputError as problem:
            code = IMAGE_CODE if isinstance(problem, ImageError) else BODY_CODE
            error = RowError(code, str(problem))
            is_passing = isinstance(problem, ImageUnreachableError)
            kind = OutcomeKind.RETRY if is_passing else OutcomeKind.ROW_ERROR
            await self._settle(assignment, Outcome(job.id, row, attempt, kind, error=error))
        except EngineError as error:
            self._lose(assignment, error)

    async def _prepared(
        self, assignment: SentRow, body: dict[str, object], timeout_s: float
    ) -> bytes | None:
        """The body as it is sent; None where the row goes later, for its images."""
        job, slot = assignment.job, assignment.slot
        if body.get("model") == DEFAULT_MODEL:
            if slot.default_model is None:
                await self._ask_for_models(slot)
            if slot.default_model is None:
                raise EngineError(f"{slot.engine.client.base_url} serves no model")
            body["model"] = slot.default_model
        if must_fetch(body):
            if not self._row_images.may_begin(job.id, job.owner.id):
                return None
            with slot.preparing(assignment):
                body = await self._row_images.filled(body, job.owner.id, timeout_s)
            self.wake()
        body = without_cache_names(body)
        body.pop("priority", None)
        if slot.uses_priority:
            body["priority"] = OFFLINE_PRIORITY
        if slot.hint_nonce is not None:
            self.hinter.put(body, assignment, slot.hint_nonce)
        return encode_body(body)

    def _lose(self, assignment: SentRow, error: EngineError) -> None:
        """The row's engine is not there: it gets nothing until it answers again."""
        slot = assignment.slot
        if not slot.is_down:
            log.warning("engine %s: %s", slot.engine.name, error)
        slot.is_down = True
        self._give_back(assignment)

    async def _settle(self, assignment: SentRow, outcome: Outcome) -> None:
        job, slot = assignment.job, assignment.slot
        if outcome.kind in {OutcomeKind.OK, OutcomeKind.ROW_ERROR}:
            slot.pressure.taken(slot.window.max_waiting)
            if outcome.kind is OutcomeKind.OK:
                job.doubts.succeeded(assignment.engine)
                slot.answered(outcome.duration_s)
            job.refusals.forget(outcome.row)
            job.compare_cached(outcome.row, outcome.usage, slot.block_tokens)
            self._conclude(assignment, outcome)
        elif outcome.kind is OutcomeKind.JOB_ERROR:
            self._doubt(assignment, outcome)
        elif await self._is_gone(assignment):
            slot.is_down = True
            await self._blame(assignment, outcome)
        elif outcome.kind is OutcomeKind.BUSY:
            self._wait(assignment, outcome)
        else:
            await self._retry(assignment, outcome)

    async def _is_gone(self, assignment: SentRow) -> bool:
        """Whether the row's engine is down; where it ran solo, for more than a moment."""
        slot = assignment.slot
        if slot.is_down:
            return True
        if assignment.key in slot.alone:
            return await slot.has_ended()
        return not await slot.engine.client.is_healthy()

    def _doubt(self, assignment: SentRow, outcome: Outcome) -> None:
        """Every row might fail so, or this one alone."""
        job, error = assignment.job, outcome.error
        assert error is not None
        verdict = job.doubts.judge(outcome.row, error, job.tasks, assignment.engine)
        if verdict is Verdict.ROW:
            self._conclude(assignment, replace(outcome, kind=OutcomeKind.ROW_ERROR))
            return
        self.assigner.give_back(assignment, ready_at_s=time.monotonic() + DOUBT_WAIT_S, moves=True)
        if verdict is Verdict.JOB:
            self.pause_job(job, f"every row would fail: {error.message}")
        elif verdict is Verdict.REST and job.id not in self._resting:
            log.warning("%s rests, every row would fail: %s", job.id, error.message)
            self._resting[job.id] = asyncio.create_task(asyncio.sleep(job.doubts.rest_s(self.rng)))

    def _wait(self, assignment: SentRow, outcome: Outcome) -> None:
        """The engine takes no more now. The row's retries are kept for what fails; it goes again
        a little after the rest, so that a row that is always refused holds up no other."""
        job, slot = assignment.job, assignment.slot
        num_rows, now_s = slot.window.num_rows, time.monotonic()
        slot.pressure.refused(num_rows, outcome.retry_after_s, now_s, self.rng)
        if job.refusals.are_enough(outcome.row, slot.pressure.num_taken):
            self._conclude(assignment, outcome)
        else:
            self._give_back(assignment, ready_at_s=slot.pressure.rests_until_s + FIRST_DELAY_S)

    def _give_back(self, assignment: SentRow, *, ready_at_s: float = 0.0) -> None:
        self.assigner.give_back(assignment, ready_at_s=ready_at_s)

    def _conclude(self, assignment: SentRow, outcome: Outcome) -> None:
        """The row has ended: its result goes to the store."""
        job = assignment.job
        self._release(assignment)
        self.assigner.settle(assignment, outcome.usage, is_ok=outcome.kind is OutcomeKind.OK)
        job.trials.clear(outcome.row)
        self.writer.put(job.record.seq, outcome)
        if (reason := job.breaker.see(outcome)) is not None:
            self.pause_job(job, reason)

    async def _blame(self, assignment: SentRow, outcome: Outcome) -> None:
        """An engine went down with this row in flight. That does not use up the row's retries."""
        job, row, slot = assignment.job, assignment.row, assignment.slot
        if slot.accused is None:
            await self._record_suspects(slot.accuse())
        if not job.trials.is_guilty(row):
            self._give_back(assignment)
            return
        error = RowError("engine_died", f"{MAX_SOLO_DEATHS} engines died while this row ran alone")
        self._conclude(assignment, replace(outcome, kind=OutcomeKind.ROW_ERROR, error=error))

    async def _record_suspects(self, accused: Iterable[SentRow]) -> None:
        rows: dict[int, list[int]] = {}
        for sent in accused:
            rows.setdefault(sent.job.record.seq, []).append(sent.row)
        for job_seq, of_job in rows.items():
            await self._remember(results.record_engine_death, job_seq, of_job)

    async def _retry(self, assignment: SentRow, outcome: Outcome) -> None:
        job = assignment.job
        if outcome.attempt > job.spec.retries:
            self._conclude(assignment, outcome)
            return
        job.attempts[outcome.row] = outcome.attempt
        await self._remember(results.record_attempt, job.record.seq, outcome.row, outcome.attempt)
        delay_s = retry_delay_s(outcome.attempt, outcome.retry_after_s, self.rng)
        delay_s = min(delay_s, job.left_s * RETRY_SHARE)
        self.assigner.give_back(assignment, ready_at_s=time.monotonic() + delay_s, moves=True)

    async def _remember(self, record: Callable[..., None], *values: object) -> None:
        """Write a count that outlives the daemon; without it a restart counts again."""
        try:
            await asyncio.to_thread(record, self.store, *values)
        except StoreError as error:
            log.error("the store cannot be written: %s", error)

    def _ended(self, assignment: SentRow, task: asyncio.Task[None]) -> None:
        """The only place that sees every cancelled task: one may end before its first step."""
        job = assignment.job
        job.tasks.pop(assignment.row, None)
        self._release(assignment)
        if task.cancelled():
            self._give_back(assignment, ready_at_s=time.monotonic() + ASIDE_S)
        elif (error := task.exception()) is not None:
            log.critical("row %d of %s failed", assignment.row, job.record.id, exc_info=error)
            self.pause_job(job, f"internal error: {error!r}; see daemon.log")

    def _release(self, assignment: SentRow) -> None:
        assignment.slot.release(assignment)
        self.wake()
