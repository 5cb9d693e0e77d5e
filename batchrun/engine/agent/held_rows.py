"""The rows that an agent has: run beside the engine, their outcomes kept until they are fetched.

A row is held from its arrival until it is forgotten. While no daemon is there, its outcome is
written to a file; it counts as kept when it is on the disk. Outcomes that end no row (the engine
died, or took no more) are told to a daemon that is there, and not kept.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from batchrun.engine.agent.messages import EndedRows, FromAgent, HeldRows, SentRow, in_batches
from batchrun.engine.client import EngineClient, failure
from batchrun.types import Outcome, OutcomeKind, Request, RowError
from batchrun.wire import RowKey

log = logging.getLogger(__name__)

GATHER_S = 0.005
"""Rows that end within this time are told together."""
MAX_ROWS_TOLD = 4_096
MAX_KEPT_BYTES = 256 << 20
"""Outcomes beyond that are given up; their rows run again."""
KEEP_AGAIN_S = 1.0
TABLE = "CREATE TABLE IF NOT EXISTS outcomes (job, row, outcome, PRIMARY KEY (job, row))"
FINAL = frozenset({OutcomeKind.OK, OutcomeKind.ROW_ERROR})
_OUTCOME = msgspec.msgpack.Decoder(Outcome)


class KeptOutcomes:
    """A file of outcomes. Blocking; what returned has reached the disk.

    Raises OSError when the file cannot be written. One that is damaged is put aside.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._run(TABLE)
            self._run("SELECT count(outcome) FROM outcomes")
        except OSError as error:
            # What only cannot be reached, or has no room, is an OperationalError.
            if type(error.__cause__) is not sqlite3.DatabaseError:
                raise
            aside = path.with_suffix(".damaged")
            log.error("%s; it is kept as %s, and its rows run again", error, aside.name)
            path.replace(aside)
            self._run(TABLE)

    def load(self) -> list[Outcome]:
        """All of them, but for those that another version of batchrun kept in another way."""
        outcomes = []
        for (text,) in self._run("SELECT outcome FROM outcomes"):
            try:
                outcomes.append(_OUTCOME.decode(text))
            except msgspec.MsgspecError as error:
                log.error("%s: a row runs again, its outcome is unknown: %s", self._path, error)
        return outcomes

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Keep these, in place of older ones of the same rows."""
        rows = [(each.job_id, each.row, msgspec.msgpack.encode(each)) for each in outcomes]
        self._run("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?)", rows)

    def remove(self, keys: Iterable[RowKey]) -> None:
        """These are kept no longer, where they were."""
        self._run("DELETE FROM outcomes WHERE job = ? AND row = ?", list(keys))

    def _run(
        self, statement: str, rows: Sequence[tuple[object, ...]] | None = None
    ) -> list[tuple[bytes]]:
        try:
            with closing(sqlite3.connect(self._path)) as connection, connection:
                connection.execute("PRAGMA synchronous=FULL")
                if rows is not None:
                    connection.executemany(statement, rows)
                    return []
                return connection.execute(statement).fetchall()
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error


class RowKeeper:
    """All rows that one agent holds. Used within one event loop.

    `tell` sends a message to the daemon and says whether one is there. `on_death` is called when a
    row met a dead engine, before the row's outcome is told.
    """

    def __init__(
        self,
        client: EngineClient,
        kept: KeptOutcomes,
        tell: Callable[[FromAgent], bool],
        on_death: Callable[[], None],
    ) -> None:
        self._client = client
        self._kept = kept
        self._tell = tell
        self._on_death = on_death
        self._running: dict[RowKey, asyncio.Task[None]] = {}
        self._contents: dict[RowKey, str] = {}
        self._sent_at_s: dict[RowKey, float] = {}
        self._ended = {(each.job_id, each.row): each for each in kept.load()}
        self._saved = set(self._ended)
        self._forgotten: set[RowKey] = set()
        self._untold: list[Outcome] = []
        self._has_daemon = False
        self._wake = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Rows that the engine has."""
        return len(self._running)

    @property
    def newest_s(self) -> float:
        """When the newest of them was sent to it; minus infinity without any."""
        return next(reversed(self._sent_at_s.values()), -math.inf)

    @property
    def num_held(self) -> int:
        """Rows that run or have an outcome."""
        return len(self._running) + len(self._ended)

    def take(self, rows: Iterable[SentRow], *, is_refused: bool) -> None:
        """Run rows that are not held yet, or were made from something else; tell again of those
        that have ended."""
        for row in rows:
            ended = self._ended.get(row.key)
            held = self._contents.get(row.key) if ended is None else ended.content
            if held not in {None, row.content}:
                self.forget([row.key])
                ended = None
            if ended is not None:
                self._tell_soon(ended)
            elif row.key not in self._running:
                task = asyncio.create_task(self._run_row(row, is_refused=is_refused))
                self._running[row.key] = task
                self._contents[row.key] = row.content
                self._sent_at_s[row.key] = time.monotonic()
                task.add_done_callback(partial(self._ran, row))

    def forget(self, keys: Collection[RowKey]) -> None:
        """End what still runs of these rows, and keep nothing of them."""
        for key in keys:
            task = self._running.pop(key, None)
            self._sent_at_s.pop(key, None)
            self._contents.pop(key, None)
            if task is not None:
                task.cancel()
            self._ended.pop(key, None)
        saved = self._saved.intersection(keys)
        if saved:
            self._saved -= saved
            self._forgotten |= saved
            self._wake.set()

    def meet(self) -> None:
        """A daemon has come: tell it what is held, and all outcomes."""
        self._has_daemon = True
        contents = self._contents | {key: each.content for key, each in self._ended.items()}
        self._tell(HeldRows(tuple(contents), tuple(contents.values())))
        self._untold = list(self._ended.values())
        self._wake.set()

    def part(self) -> None:
        """No daemon is there any more."""
        self._has_daemon = False
        self._wake.set()

    async def run(self) -> None:
        """Tell and keep outcomes, until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            if self._has_daemon:
                untold, self._untold = self._untold, []
                for batch in in_batches(untold, _size, MAX_ROWS_TOLD):
                    self._tell(EndedRows(tuple(batch)))
            await self._keep()

    async def close(self) -> None:
        """End all rows. What is kept stays."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._keep()

    async def _run_row(self, row: SentRow, *, is_refused: bool) -> None:
        request = _request_of(row)
        if is_refused:
            error = RowError("draining", "the engine's agent takes no more rows")
            outcome = failure(request, OutcomeKind.BUSY, error, duration_s=0.0)
        else:
            outcome = await self._client.execute(request, data=row.body, timeout_s=row.timeout_s)
        outcome = replace(outcome, content=row.content)
        if outcome.kind in FINAL:
            self._ended[row.key] = outcome
        elif outcome.kind is OutcomeKind.RETRY and not await self._client.is_healthy():
            self._on_death()
        self._tell_soon(outcome)

    def _ran(self, row: SentRow, task: asyncio.Task[None]) -> None:
        key = row.key
        is_held = self._running.get(key) is task
        if is_held:
            del self._running[key], self._sent_at_s[key], self._contents[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("row %d of %s failed", key[1], key[0], exc_info=error)
            if is_held:
                told = RowError("agent_error", f"the engine's agent failed: {error!r}")
                outcome = failure(_request_of(row), OutcomeKind.RETRY, told, duration_s=0.0)
                self._tell_soon(replace(outcome, content=row.content))

    def _tell_soon(self, outcome: Outcome) -> None:
        if self._has_daemon:
            self._untold.append(outcome)
        self._wake.set()

    async def _keep(self) -> None:
        """Bring the file up to date: without a daemon it gets what is not in it yet."""
        forgotten, self._forgotten = self._forgotten, set()
        new: dict[RowKey, Outcome] = {}
        if not self._has_daemon:
            new = {key: each for key, each in self._ended.items() if key not in self._saved}
            self._give_up_beyond(MAX_KEPT_BYTES, new)
        try:
            if forgotten:
                await asyncio.to_thread(self._kept.remove, forgotten)
            if new:
                await asyncio.to_thread(self._kept.add, new.values())
        except OSError as error:
            log.error("outcomes cannot be kept: %s", error)
            self._forgotten |= forgotten
            asyncio.get_running_loop().call_later(KEEP_AGAIN_S, self._wake.set)
            return
        self._saved |= new.keys() & self._ended.keys()
        self._forgotten |= new.keys() - self._ended.keys()

    def _give_up_beyond(self, limit_bytes: int, new: dict[RowKey, Outcome]) -> None:
        """Forget new outcomes that would make the file larger than the limit."""
        num_bytes = sum(_size(self._ended[key]) for key in self._saved)
        for key, outcome in list(new.items()):
            num_bytes += _size(outcome)
            if num_bytes > limit_bytes:
                log.warning(
                    "row %d of %s is given up: the file of outcomes is full", key[1], key[0]
                )
                del new[key], self._ended[key]


def _request_of(row: SentRow) -> Request:
    return Request(row.job_id, row.row, row.attempt, row.epoch, row.endpoint, {})


def _size(outcome: Outcome) -> int:
    return len(outcome.body or b"")
