"""The one writer of results: commits in batches, acknowledges only what is committed. Batches of
OpenAI's API that are made at the same time are committed together, too.

Also the daemon's background tasks, and work that waits until the store is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from batchrun.errors import StoreError, StoreUnreachableError
from batchrun.failpoints import failpoint
from batchrun.jobs.objects import in_thread
from batchrun.store import batches, results
from batchrun.store.batches import BatchRecord, WantedBatch
from batchrun.store.database import Store
from batchrun.types import Outcome

log = logging.getLogger(__name__)

MAX_DELAY_S = 0.2
MAX_BATCH = 4_000
MAX_BATCH_BYTES = 32 << 20
"""Of replies: so much is committed at once, and while more waits no long reply is taken in."""
MAX_LONG_REPLIES = 4
"""Of one engine; none has to wait for those of another."""
COMMIT_RETRY_S = 1.0
SLOW_COMMIT_S = 10.0
"""While one commit takes longer, no more rows go: their results would only wait."""

Entry = tuple[int, Outcome]


class ResultWriter:
    """Gathers outcomes for at most `MAX_DELAY_S`, then commits them in one transaction.

    Compressing and committing happen in a thread. `on_committed` is called on the event loop with
    each batch once it is durable. While the store cannot be written (a full disk, say) the batch is
    kept and tried again, so no finished work is thrown away.
    """

    def __init__(self, store: Store, on_committed: Callable[[Sequence[Entry]], None]) -> None:
        self._store = store
        self._on_committed = on_committed
        self._waiting: list[Entry] = []
        self._first_at_s = 0.0
        self._num_put = 0
        self._num_committed = 0
        self._flushes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._has_work = asyncio.Event()
        self._is_pressed = asyncio.Event()
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._long_replies: dict[str, asyncio.Semaphore] = {}
        self._commit_began_s: float | None = None
        self._problem: str | None = None

    @property
    def stalled(self) -> str | None:
        """Why results are not committed now; None while they are."""
        waits_s = self.waits_s(time.monotonic())
        if self._problem is None and waits_s > SLOW_COMMIT_S:
            return f"results have waited for {waits_s:.0f} s to be committed"
        return self._problem

    def put(self, job_seq: int, outcome: Outcome) -> None:
        """Hand over a final outcome of a row."""
        if not self._waiting:
            self._first_at_s = time.monotonic()
        self._waiting.append((job_seq, outcome))
        self._num_put += 1
        self._num_bytes += len(outcome.body or b"")
        self._has_work.set()
        if self._num_bytes >= MAX_BATCH_BYTES:
            self._has_room.clear()
        if len(self._waiting) >= MAX_BATCH or self._num_bytes >= MAX_BATCH_BYTES:
            self._is_pressed.set()

    def waits_s(self, now_s: float) -> float:
        """For how long the results that are being committed have waited for it, at an instant of
        the monotonic clock; 0 where none are. Any thread may ask."""
        began_s = self._commit_began_s
        return 0.0 if began_s is None else max(0.0, now_s - began_s)

    @asynccontextmanager
    async def room(self, engine: str) -> AsyncIterator[None]:
        """Wait until there is room for a long reply of an engine; to be left when its outcome was
        handed over, or just before."""
        async with self._long_replies.setdefault(engine, asyncio.Semaphore(MAX_LONG_REPLIES)):
            await self._has_room.wait()
            yield

    async def flush(self) -> None:
        """Wait until everything handed over so far is committed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flushes.append((self._num_put, done))
        self._has_work.set()
        self._is_pressed.set()
        await done

    async def run(self) -> None:
        """Commit for ever; cancel to end (after `flush`)."""
        while True:
            batch = await self._gather()
            if batch:
                failpoint("writer.commit.before")
                self._commit_began_s = time.monotonic()
                await self._commit(batch)
                self._commit_began_s = None
                failpoint("writer.commit.after")
                self._num_committed += len(batch)
                self._num_bytes -= sum(len(outcome.body or b"") for _, outcome in batch)
                if self._num_bytes < MAX_BATCH_BYTES:
                    self._has_room.set()
                self._on_committed(batch)
            while self._flushes and self._flushes[0][0] <= self._num_committed:
                _, flush = self._flushes.popleft()
                if not flush.done():
                    flush.set_result(None)

    async def _gather(self) -> list[Entry]:
        """What waits, at most `MAX_BATCH` or `MAX_BATCH_BYTES`; at once when so much does or a
        flush asks for it."""
        await self._has_work.wait()
        is_enough = len(self._waiting) >= MAX_BATCH or self._num_bytes >= MAX_BATCH_BYTES
        if not self._flushes and not is_enough:
            self._is_pressed.clear()
            left_s = max(self._first_at_s + MAX_DELAY_S - time.monotonic(), 0)
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._is_pressed.wait()
        num_rows = self._num_rows_of_batch()
        batch, self._waiting = self._waiting[:num_rows], self._waiting[num_rows:]
        if not self._waiting:
            self._has_work.clear()
        return batch

    def _num_rows_of_batch(self) -> int:
        num_bytes = 0
        for num_rows, (_, outcome) in enumerate(self._waiting[:MAX_BATCH], 1):
            num_bytes += len(outcome.body or b"")
            if num_bytes >= MAX_BATCH_BYTES:
                return num_rows
        return MAX_BATCH

    async def _commit(self, batch: Sequence[Entry]) -> None:
        while True:
            try:
                await asyncio.to_thread(results.commit, self._store, batch, now_s=time.time())
            except StoreError as error:
                if self._problem is None:
                    log.error("results cannot be written: %s", error)
                self._problem = str(error)
                await asyncio.sleep(COMMIT_RETRY_S)
            else:
                self._problem = None
                return


class BatchCreator:
    """Adds batches of OpenAI's API: those that come while others are written share one commit."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[tuple[WantedBatch, asyncio.Future[BatchRecord]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def create(self, wanted: WantedBatch) -> BatchRecord:
        """See `batches.create_all`. Raises QuotaError and StoreError. A caller who goes takes
        nothing from those whose batches are written with his."""
        made: asyncio.Future[BatchRecord] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, made))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return await made

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            work = partial(batches.create_all, now_s=time.time())
            found: Sequence[BatchRecord | Exception]
            try:
                found = await asyncio.to_thread(work, self._store, [wanted for wanted, _ in group])
            except Exception as error:  # noqa: BLE001 - those who wait are told, whatever it is
                found = [error] * len(group)
            for (_, made), record in zip(group, found, strict=True):
                if made.done():
                    continue
                if isinstance(record, BatchRecord):
                    made.set_result(record)
                else:
                    made.set_exception(record)
        self._writing = None


T = TypeVar("T")

RETRY_INTERVAL_S = 2.0


async def until_stored(work: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Do what changes the store; while it cannot be written, wait and try again."""
    return await _until(StoreError, asyncio.to_thread, partial(work, *args, **kwargs))


async def until_reached(work: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Do what reads the store; while its database does not answer, wait and try again."""
    return await _until(StoreUnreachableError, asyncio.to_thread, partial(work, *args, **kwargs))


async def until_read_or_written(work: Callable[..., T], *args: object, **kwargs: object) -> T:
    """As `until_reached`, for a whole input or output: that may take minutes, in which commits and
    callers need threads."""
    return await _until(StoreUnreachableError, in_thread, partial(work, *args, **kwargs))


async def _until(
    passing: type[StoreError],
    in_some_thread: Callable[[Callable[[], T]], Awaitable[T]],
    work: Callable[[], T],
) -> T:
    while True:
        try:
            return await in_some_thread(work)
        except passing as error:
            log.error("waiting for the store: %s", error)
            await asyncio.sleep(RETRY_INTERVAL_S)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks; returns when they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TaskSet:
    """Background tasks. A bug in one goes to `on_bug(job_id, error)`; in one without a job, it is
    the `failure` that ends the daemon cleanly: everything it knows is in the store."""

    def __init__(self, on_bug: Callable[[str, BaseException], None]) -> None:
        self._on_bug = on_bug
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_event_loop().create_future()

    def spawn(self, work: Coroutine[None, None, None], job_id: str | None = None) -> None:
        """Run `work` in the background, on behalf of a job or of the daemon itself."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, job_id))

    async def cancel(self) -> None:
        """End them all."""
        await cancel_all(self._tasks)

    def _ended(self, task: asyncio.Task[None], job_id: str | None) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.critical("a task of the daemon failed", exc_info=error)
        if job_id is None:
            if not self.failure.done():
                self.failure.set_exception(error)
        else:
            self._on_bug(job_id, error)


@dataclass(slots=True)
class Stage:
    """How far a job's opening or closing has come, for `status`."""

    name: str = ""
    done: int = 0
    total: int = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.name, self.done, self.total = stage, done, total

    def describe(self) -> str:
        """A few words for people."""
        return f"{self.name} {self.done:,} of {self.total:,}" if self.total else self.name
