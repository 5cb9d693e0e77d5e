"""The one writer of results: commits in batches, acknowledges only what is committed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from batchrun.errors import StoreError
from batchrun.store import Store, results
from batchrun.types import Outcome

log = logging.getLogger(__name__)

MAX_DELAY_S = 0.2
MAX_BATCH = 1_000
RETRY_INTERVAL_S = 1.0

Entry = tuple[int, Outcome]
Flush = asyncio.Future[None]


class ResultWriter:
    """Gathers outcomes for at most `MAX_DELAY_S`, then commits them in one transaction.

    `on_committed` is called on the event loop with each batch once it is durable. While the store
    cannot be written (a full disk, say) `stalled` holds the reason and the batch is kept and tried
    again, so no finished work is thrown away.
    """

    def __init__(self, store: Store, on_committed: Callable[[Sequence[Entry]], None]) -> None:
        self._store = store
        self._on_committed = on_committed
        self._queue: asyncio.Queue[Entry | Flush] = asyncio.Queue()
        self.stalled: str | None = None

    def put(self, job_seq: int, outcome: Outcome) -> None:
        """Hand over a final outcome of a row."""
        self._queue.put_nowait((job_seq, outcome))

    async def flush(self) -> None:
        """Wait until everything handed over so far is committed."""
        done: Flush = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(done)
        await done

    async def run(self) -> None:
        """Commit for ever; cancel to end (after `flush`)."""
        while True:
            batch, flushes = await self._gather()
            if batch:
                await self._commit(batch)
                self._on_committed(batch)
            for flush in flushes:
                if not flush.done():
                    flush.set_result(None)

    async def _gather(self) -> tuple[list[Entry], list[Flush]]:
        batch: list[Entry] = []
        flushes: list[Flush] = []
        item: Entry | Flush = await self._queue.get()
        deadline_s = time.monotonic() + MAX_DELAY_S
        while True:
            if isinstance(item, tuple):
                batch.append(item)
            else:
                flushes.append(item)
            if flushes or len(batch) >= MAX_BATCH:
                return batch, flushes
            try:
                left_s = max(deadline_s - time.monotonic(), 0)
                item = await asyncio.wait_for(self._queue.get(), left_s)
            except TimeoutError:
                return batch, flushes

    async def _commit(self, batch: Sequence[Entry]) -> None:
        while True:
            try:
                await asyncio.to_thread(results.commit, self._store, batch, now_s=time.time())
            except StoreError as error:
                if self.stalled is None:
                    log.error("results cannot be written: %s", error)
                self.stalled = str(error)
                await asyncio.sleep(RETRY_INTERVAL_S)
            else:
                self.stalled = None
                return
