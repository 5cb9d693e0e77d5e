"""Sends offline rows to an engine and keeps a bounded window of them there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from batchrun.engine.client import EngineClient
from batchrun.types import Outcome, OutcomeKind
from benchmarks.cpu_colocation_job import OfflineRow, RowStream


@dataclass(frozen=True, slots=True)
class Trickle:
    """How much may be in the engine and how fast it may come (design 6.1, "Window").

    A row of `long_row_tokens` or more is long. Each tick brings at least one row if there is room.
    The same for every server: vLLM's `run-batch` sends all rows at once, and vLLM takes them in
    the order of arrival, so rows beyond this window would only wait there.
    """

    max_requests: int = 256
    max_tokens: int = 2_000_000
    tick_s: float = 0.1
    tick_tokens: int = 50_000
    tick_long_rows: int = 4
    long_row_tokens: int = 4_096


@dataclass(frozen=True, slots=True)
class DoneRow:
    """A row that ended. Instants are on the monotonic clock."""

    sent_at_s: float
    ended_at_s: float
    outcome: Outcome


@dataclass(slots=True)
class Feeder:
    """Feeds one engine from a stream until it is cancelled; then aborts what is in flight."""

    client: EngineClient
    stream: RowStream
    trickle: Trickle = field(default_factory=Trickle)
    done: list[DoneRow] = field(default_factory=list)
    in_flight_since_s: dict[asyncio.Task[None], float] = field(default_factory=dict)
    in_flight_tokens: int = 0

    async def run(self) -> None:
        """Send rows for ever; cancel to end."""
        try:
            while True:
                for row in await self._next_tick():
                    self._send(row)
                await asyncio.sleep(self.trickle.tick_s)
        finally:
            await self._abort()

    def failed(self) -> Sequence[Outcome]:
        """Outcomes that are no answer."""
        return [row.outcome for row in self.done if row.outcome.kind is not OutcomeKind.OK]

    def oldest_in_flight_s(self, now_s: float) -> float:
        """How long the oldest row that has no answer yet has been in the engine."""
        return max(
            (now_s - sent_at_s for sent_at_s in self.in_flight_since_s.values()), default=0.0
        )

    async def _next_tick(self) -> list[OfflineRow]:
        limits = self.trickle
        rows: list[OfflineRow] = []
        tokens = num_long = 0
        while True:
            row = await self.stream.peek()
            tokens += row.prompt_tokens
            num_long += row.prompt_tokens >= limits.long_row_tokens
            is_over = tokens > limits.tick_tokens or num_long > limits.tick_long_rows
            if (rows and is_over) or not self._has_room(len(rows) + 1, tokens):
                return rows
            rows.append(self.stream.take())

    def _has_room(self, num_more: int, more_tokens: int) -> bool:
        num_requests = len(self.in_flight_since_s) + num_more
        fits = self.in_flight_tokens + more_tokens <= self.trickle.max_tokens
        return num_requests == 1 or (fits and num_requests <= self.trickle.max_requests)

    def _send(self, row: OfflineRow) -> None:
        self.in_flight_tokens += row.prompt_tokens
        task = asyncio.create_task(self._execute(row))
        self.in_flight_since_s[task] = time.monotonic()
        task.add_done_callback(self.in_flight_since_s.pop)

    async def _execute(self, row: OfflineRow) -> None:
        sent_at_s = time.monotonic()
        try:
            outcome = await self.client.execute(row.request)
            self.done.append(DoneRow(sent_at_s, time.monotonic(), outcome))
            if outcome.kind is not OutcomeKind.OK:
                await asyncio.sleep(self.trickle.tick_s)
        finally:
            self.in_flight_tokens -= row.prompt_tokens

    async def _abort(self) -> None:
        tasks = list(self.in_flight_since_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
