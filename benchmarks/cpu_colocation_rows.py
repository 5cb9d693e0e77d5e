"""Offline rows for `benchmarks.cpu_colocation`: an endless stream of fresh document sets.

Each set is a job of its own: a Parquet file and a job file that are read, planned and rendered by
the code that the daemon runs, and hinted by its `Hinter`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from batchrun.daemon.dispatch import shared_prefixes
from batchrun.daemon.dispatcher import OFFLINE_PRIORITY
from batchrun.daemon.job import ActiveJob, Hinter
from batchrun.daemon.opening import open_job
from batchrun.engine.client import EngineClient
from batchrun.hints import put_hint
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.pool.row_queue import TICK_S, Window
from batchrun.store import jobs
from batchrun.store.database import Store
from batchrun.types import Outcome, OutcomeKind, Request
from benchmarks.text_jobs import DocumentSet

MAX_ROWS, MAX_TOKENS = 256, 2_000_000
"""In the engine at once, the same for every server: vLLM's `run-batch` sends all rows, and vLLM
takes them in the order of arrival, so rows beyond these would only wait there."""
READY_TOKENS = 8_000_000
"""More than any server serves in a minute and a half."""


OfflineRow = tuple[Request, int]
"""A request ready to be sent, and about how many tokens its prompt has."""


@dataclass(frozen=True, slots=True)
class RowStream:
    """The rows of a seed's sets, one set after the other, without end.

    They come in the order of batchrun's pool, which is also what grouping by hand gives, or
    shuffled. With a `nonce` every row carries a hint and goes as the daemon sends it; without one
    it carries vLLM's priority alone.
    """

    folder: Path
    store: Store
    seed: int
    is_shuffled: bool = False
    nonce: str | None = None
    sets: DocumentSet = field(default_factory=DocumentSet)

    async def rows(self) -> AsyncIterator[OfflineRow]:
        """Each next row; about 1 s for the first of a set."""
        hinter = Hinter(epoch=1 + self.seed)
        for number in count():
            job = await asyncio.to_thread(self._submit, f"set-{self.seed}-{number}")
            planned = job.plan.order.rows.tolist()
            numbers = sorted(planned) if self.is_shuffled else planned
            bodies = await asyncio.to_thread(job.render, numbers)
            job.close()
            for row, body in zip(numbers, bodies, strict=True):
                assert isinstance(body, dict)
                body["priority"] = OFFLINE_PRIORITY
                job.queue.prefer(np.array([row]))
                job.queue.take(row)
                if self.nonce is not None:
                    hint = hinter.hint(job, row, shared_prefixes(job, row))
                    assert hint is not None
                    put_hint(body, hint, self.nonce)
                request = Request(job.id, row, 1, 1, job.spec.endpoint, body)
                yield request, job.plan.estimate_tokens(row)

    def _submit(self, name: str) -> ActiveJob:
        path = self.sets.job(name).write(self.folder)
        new = prepare_job(load_job_file(path, cwd=self.folder), links=self.folder)
        record = jobs.create(self.store, new, now_s=time.time())
        return open_job(self.store, record, links=self.folder)


@dataclass(slots=True)
class Feeder:
    """Feeds one engine until it is cancelled; then aborts what is in flight.

    Rows go as the daemon's window lets them: at most 50,000 tokens or four long ones a tick. `done`
    has the rows that ended, `sent_s` the rows in flight, with their instants on the monotonic
    clock.
    """

    client: EngineClient
    rows: AsyncIterator[OfflineRow]
    window: Window = field(default_factory=lambda: Window(MAX_ROWS, MAX_TOKENS))
    done: list[tuple[float, Outcome]] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    _ready: deque[OfflineRow] = field(default_factory=deque)

    async def prepare(self) -> None:
        """Make as many sets as a window needs before it begins: making one takes a core for a
        second, which would be taken from the calls of that second."""
        num_tokens = 0
        while num_tokens < READY_TOKENS:
            self._ready.append(await anext(self.rows))
            num_tokens += self._ready[-1][1]

    async def run(self) -> None:
        """Send rows for ever; cancel to end."""
        request, tokens = await self._next()
        async with asyncio.TaskGroup() as group:
            while True:
                if not self._has_room(tokens):
                    await asyncio.sleep(TICK_S)
                    continue
                now_s = time.monotonic()
                self.window.add(tokens, now_s)
                self.sent_s.append(now_s)
                group.create_task(self._execute(request, tokens, now_s))
                request, tokens = await self._next()

    async def _next(self) -> OfflineRow:
        return self._ready.popleft() if self._ready else await anext(self.rows)

    def _has_room(self, tokens: int) -> bool:
        now_s = time.monotonic()
        return self.window.opens_at_s(tokens, now_s) <= now_s and self.window.has_room(tokens, 0)

    async def _execute(self, request: Request, tokens: int, now_s: float) -> None:
        try:
            outcome = await self.client.execute(request)
            self.done.append((time.monotonic(), outcome))
            if outcome.kind is not OutcomeKind.OK:
                await asyncio.sleep(TICK_S)
        finally:
            self.sent_s.remove(now_s)
            self.window.remove(tokens)
