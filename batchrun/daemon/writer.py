"""The one writer of results: commits in batches, acknowledges only what is committed.

Also the daemon's background tasks, and work that waits until the store is there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from batchrun.errors import StoreError, StoreUnreachableError
from batchrun.failpoints import failpoint
from batchrun.store import results
from batchrun.store.database import Store
from batchrun.types import Outcome

log = logging.getLogger(__name__)

MAX_DELAY_S = 0.2
MAX_BATCH = 4_000
COMMIT_RETRY_S = 1.0

Entry = tuple[int, Outcome]


class ResultWriter:
    """Gathers outcomes for at most `MAX_DELAY_S`, then commits them in one transaction.

    Compressing and committing happen in a thread. `on_committed` is called on the event loop with
    each batch once it is durable. While the store cannot be written (a full disk, say) `stalled`
    holds the reason and the batch is kept and tried again, so no finished work is thrown away.
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
        self.stalled: str | None = None

    def put(self, job_seq: int, outcome: Outcome) -> None:
        """Hand over a final outcome of a row."""
        if not self._waiting:
            self._first_at_s = time.monotonic()
        self._waiting.append((job_seq, outcome))
        self._num_put += 1
        self._has_work.set()
        if len(self._waiting) >= MAX_BATCH:
            self._is_pressed.set()

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
                await self._commit(batch)
                failpoint("writer.commit.after")
                self._num_committed += len(batch)
                self._on_committed(batch)
            while self._flushes and self._flushes[0][0] <= self._num_committed:
                _, flush = self._flushes.popleft()
                if not flush.done():
                    flush.set_result(None)

    async def _gather(self) -> list[Entry]:
        """What waits, at most `MAX_BATCH`; at once when so much does or a flush asks for it."""
        await self._has_work.wait()
        if not self._flushes and len(self._waiting) < MAX_BATCH:
            self._is_pressed.clear()
            left_s = max(self._first_at_s + MAX_DELAY_S - time.monotonic(), 0)
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._is_pressed.wait()
        batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        if not self._waiting:
            self._has_work.clear()
        return batch

    async def _commit(self, batch: Sequence[Entry]) -> None:
        while True:
            try:
                await asyncio.to_thread(results.commit, self._store, batch, now_s=time.time())
            except StoreError as error:
                if self.stalled is None:
                    log.error("results cannot be written: %s", error)
                self.stalled = str(error)
                await asyncio.sleep(COMMIT_RETRY_S)
            else:
                self.stalled = None
                return


T = TypeVar("T")

RETRY_INTERVAL_S = 2.0


async def until_stored(work: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Do what changes the store; while it cannot be written, wait and try again."""
    return await _until(StoreError, work, *args, **kwargs)


async def until_reached(work: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Do what reads the store; while its database does not answer, wait and try again."""
    return await _until(StoreUnreachableError, work, *args, **kwargs)


async def _until(
    passing: type[StoreError], work: Callable[..., T], *args: object, **kwargs: object
) -> T:
    while True:
        try:
            return await asyncio.to_thread(work, *args, **kwargs)
        except passing as error:
            log.error("waiting for the store: %s", error)
            await asyncio.sleep(RETRY_INTERVAL_S)


class TaskSet:
    """Background tasks. A bug in one goes to `on_bug(job_id, error)`; in one without a job, it
    ends the daemon cleanly: everything it knows is in the store."""

    def __init__(self, on_bug: Callable[[str, BaseException], None]) -> None:
        self._on_bug = on_bug
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None], job_id: str | None = None) -> None:
        """Run `work` in the background, on behalf of a job or of the daemon itself."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, job_id))

    async def cancel_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None], job_id: str | None) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.critical("a task of the daemon failed", exc_info=error)
        if job_id is None:
            os.kill(os.getpid(), signal.SIGTERM)
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
