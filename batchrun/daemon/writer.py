"""The one writer of results: commits in batches, acknowledges only what is committed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from batchrun.errors import StoreError
from batchrun.failpoints import failpoint
from batchrun.store import Store, results
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
            try:
                async with asyncio.timeout(left_s):
                    await self._is_pressed.wait()
            except TimeoutError:
                pass
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
