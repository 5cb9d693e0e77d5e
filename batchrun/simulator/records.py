"""What a simulation notes: each request, each step, each second.

The records go into Parquet files, in row groups as they come: memory does not grow with them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from operator import sub
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import DataError
from batchrun.simulator.cluster import Engines
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.online import PREFIX, OnlineRouter
from batchrun.simulator.virtual.engine import RequestRecord, VirtualEngine
from batchrun.simulator.virtual.setup import StepItem
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

ROWS_PER_GROUP = 65_536

REQUESTS = {
    "is_online": pa.bool_(),
    "job": pa.dictionary(pa.int32(), pa.string()),
    "number": pa.int64(),
    "engine": pa.int16(),
    "arrival_s": pa.float64(),
    "admitted_s": pa.float64(),
    "first_token_s": pa.float64(),
    "last_token_s": pa.float64(),
    "num_prompt_tokens": pa.int32(),
    "num_hit_tokens": pa.int32(),
    "num_output_tokens": pa.int32(),
    "num_late_tokens": pa.int32(),
    "num_preemptions": pa.int32(),
    "is_finished": pa.bool_(),
}
"""One row per request, in the order in which they ended; those that had not come last. `number` is
the call's place in the trace, or the row of `job` (null for online calls). Instants are null where
they did not happen. Late tokens came after arrival + TTFT + i * TPOT of the SLOs."""

STEPS = {
    "engine": pa.int16(),
    "start_s": pa.float64(),
    "duration_s": pa.float64(),
    "num_online_requests": pa.int32(),
    "num_offline_requests": pa.int32(),
    "num_online_tokens": pa.int32(),
    "num_offline_tokens": pa.int32(),
}
"""One row per step that computed anything."""

SECONDS = {
    "engine": pa.int16(),
    "at_s": pa.float64(),
    "online_arrivals": pa.int32(),
    "online_active": pa.int32(),
    "offline_active": pa.int32(),
    "online_waiting": pa.int32(),
    "offline_waiting": pa.int32(),
    "online_running_blocks": pa.int32(),
    "offline_running_blocks": pa.int32(),
    "online_cached_blocks": pa.int32(),
    "offline_cached_blocks": pa.int32(),
    "forecast_blocks": pa.int32(),
    "offline_prompt_tokens": pa.int64(),
    "offline_hit_tokens": pa.int64(),
    "offline_computed_tokens": pa.int64(),
}
"""One row per engine and second. Blocks by class as in Echo's figure 10, the cached ones every ten
seconds (else null); `forecast_blocks` is what
the scheduler expects online requests to want (null without a forecast). The last three and
`online_arrivals` are sums since the row before."""

TABLES = {"requests": REQUESTS, "steps": STEPS, "seconds": SECONDS}


class Table:
    """One file that grows; at most `ROWS_PER_GROUP` rows are held in memory."""

    def __init__(self, path: Path, columns: Mapping[str, pa.DataType]) -> None:
        """Raises OSError when the file cannot be made."""
        self._schema = pa.schema(list(columns.items()))
        self._rows: list[tuple[object, ...]] = []
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def add(self, *row: object) -> None:
        """One row, its values in the order of the columns."""
        self._rows.append(row)
        if len(self._rows) >= ROWS_PER_GROUP:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [
                pa.array(values, field.type)
                for values, field in zip(columns, self._schema, strict=True)
            ]
            self._writer.write_table(pa.table(arrays, schema=self._schema))
            self._rows = []


class Tables(ExitStack):
    """The three files of a simulation in `folder`; closed at the end of the context."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder. Raises DataError when that cannot be done."""
        super().__init__()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.requests, self.steps, self.seconds = (
                self.enter_context(closing(Table(folder / f"{name}.parquet", columns)))
                for name, columns in TABLES.items()
            )
        except OSError as error:
            raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error


CACHED_EVERY_S = 10
"""Counting cached blocks is what takes longest in a second without offline work."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What online users were promised, in seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05


@dataclass(slots=True)
class OnlineTotals:
    """The calls that ended or whose TTFT bound has passed: latencies in seconds, and SLOs kept.

    `longest_wait_s` is the longest that any call waited for its first admission, or still does, and
    `longest_gap_s` the longest between two of its tokens. Hits count at a call's first admission.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    num_calls: int = 0
    num_ended: int = 0
    num_ttft_kept: int = 0
    num_tpot_kept: int = 0
    num_all_kept: int = 0
    num_preemptions: int = 0
    longest_wait_s: float = 0.0
    longest_gap_s: float = 0.0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class OfflineTotals:
    """What became of the rows. Hits count at the first admission of a row; `longest_wait_s` is for
    that, or until now."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    num_preemptions: int = 0
    longest_wait_s: float = 0.0


class Watch:
    """Listens to the engines of a simulation and keeps what its figures need; the rest goes to
    `tables`, if there are any. Memory: two numbers for each online call."""

    def __init__(
        self,
        engines: Engines,
        router: OnlineRouter,
        feed: RowFeed,
        tables: Tables | None,
        *,
        slo: Slo,
        judged_s: tuple[float, float],
    ) -> None:
        self.online, self.offline = OnlineTotals(), OfflineTotals()
        self._engines, self._router, self._feed = engines, router, feed
        self._slo, self._judged_s, self._tables = slo, judged_s, tables
        engines.at_end = partial(self._note, now_s=math.inf)
        self._samplers: list[_Sampler] = []
        if tables is not None:
            engines.after_step = lambda index: self._samplers[index].sample()
            for index, engine in enumerate(engines.engines):
                self._samplers.append(_Sampler(index, engine, router, tables))
                engine.step_listener = self._samplers[-1].note_step

    def close(self) -> None:
        """The clock stands: note what has not ended."""
        for index, engine in enumerate(self._engines.engines):
            for record in engine.records.values():
                self._note(index, record, engine.now_s)

    def _note(self, index: int, record: RequestRecord, now_s: float) -> None:
        """`now_s` is infinity for a request that has ended."""
        num_late = 0
        totals = self.online if record.is_online else self.offline
        totals.num_preemptions += record.num_preemptions
        admitted_s = now_s if record.admitted_at_s is None else record.admitted_at_s
        if record.admitted_at_s is not None:
            totals.prompt_tokens += record.num_prompt_tokens
            totals.hit_tokens += record.num_hit_tokens
        if admitted_s != math.inf:
            totals.longest_wait_s = max(totals.longest_wait_s, admitted_s - record.arrival_at_s)
        if record.is_online:
            num_late = self._note_online(record, now_s)
            name: str | None = None
            number = int(record.request_id.removeprefix(PREFIX))
        else:
            sent = self._feed.sent[record.request_id]
            name, number = sent.job.plan.name, sent.row
            if self._samplers and record.finished_at_s is not None:
                self._samplers[index].row_ended(record)
        if self._tables is not None:
            times = record.token_times_s
            self._tables.requests.add(
                record.is_online,
                name,
                number,
                index,
                record.arrival_at_s,
                record.admitted_at_s,
                times[0] if times else None,
                times[-1] if times else None,
                record.num_prompt_tokens,
                record.num_hit_tokens,
                len(times),
                num_late,
                record.num_preemptions,
                record.finished_at_s is not None,
            )

    def _note_online(self, record: RequestRecord, now_s: float) -> int:
        """The number of tokens that came after they were due, one that is overdue included.

        A call that has not ended counts once its first token is due.
        """
        slo, totals, times = self._slo, self.online, record.token_times_s
        due_s = record.arrival_at_s + slo.ttft_s
        late = sum(at_s > due_s + i * slo.tpot_s for i, at_s in enumerate(times))
        is_open = now_s != math.inf
        late += is_open and due_s + len(times) * slo.tpot_s < now_s
        totals.num_ended += not is_open
        first_s, after_s = self._judged_s
        if (is_open and now_s < due_s) or not first_s <= record.arrival_at_s < after_s:
            return late
        ttft_s = (times[0] if times else now_s) - record.arrival_at_s
        totals.num_calls += 1
        totals.ttft_s.append(ttft_s)
        totals.num_ttft_kept += bool(times) and ttft_s <= slo.ttft_s
        totals.num_all_kept += not late
        if len(times) > 1:
            totals.longest_gap_s = max(totals.longest_gap_s, *map(sub, times[1:], times))
            tpot_s = (times[-1] - times[0]) / (len(times) - 1)
            totals.tpot_s.append(tpot_s)
            totals.num_tpot_kept += tpot_s <= slo.tpot_s
        return late


class _Sampler:
    """One engine: each step, and once a second."""

    def __init__(
        self, index: int, engine: VirtualEngine, router: OnlineRouter, tables: Tables
    ) -> None:
        self._index, self._engine = index, engine
        self._router, self._seconds, self._steps = router, tables.seconds, tables.steps
        self._blocks = BlocksByClass(engine)
        self._next_s = self._look_s = 0.0
        self._num_arrived = 0
        self._sums = [0, 0, 0]

    def row_ended(self, record: RequestRecord) -> None:
        """Count its hits."""
        self._sums[0] += record.num_prompt_tokens
        self._sums[1] += record.num_hit_tokens

    def note_step(
        self, start_s: float, duration_s: float, online: list[StepItem], offline: list[StepItem]
    ) -> None:
        """The engine's step listener."""
        num_online, num_offline = (sum([item[0] for item in each]) for each in (online, offline))
        self._sums[2] += num_offline
        row = self._index, start_s, duration_s, len(online), len(offline), num_online, num_offline
        self._steps.add(*row)

    def sample(self) -> None:
        """Note the second, if one has begun since the last."""
        engine = self._engine
        if engine.now_s < self._next_s:
            return
        self._next_s = math.floor(engine.now_s) + 1.0
        scheduler = engine.scheduler
        forecast = None
        if isinstance(scheduler, ColocatedScheduler):
            forecast = scheduler.state.estimates.forecast.forecast_blocks
        cached: tuple[int | None, int | None] = (None, None)
        if engine.now_s >= self._look_s:
            self._look_s = self._next_s - 1 + CACHED_EVERY_S
            cached = self._blocks.cached()
        self._seconds.add(
            self._index, engine.now_s, self._arrivals(), *self._requests(),
            *self._blocks.running(), *cached, forecast,
            *self._sums,
        )  # fmt: skip
        self._sums = [0, 0, 0]

    def _arrivals(self) -> int:
        """All calls to the deployment since the last second; told of the first engine."""
        if self._index:
            return 0
        before, self._num_arrived = self._num_arrived, self._router.num_arrived
        return self._num_arrived - before

    def _requests(self) -> Iterator[int]:
        """Active and waiting requests, online and offline of each."""
        records = self._engine.records
        running = [records[r.request_id] for r in self._engine.scheduler.running]
        num_online = sum(record.is_online for record in running)
        num_live = sum(record.is_online for record in records.values())
        yield num_online
        yield len(running) - num_online
        yield num_live - num_online
        yield len(records) - num_live - (len(running) - num_online)


GROUP_SUFFIX = b"\0\0\0\0"
"""vLLM keys a cached block by its hash and its KV group's number; here there is one group."""


class BlocksByClass:
    """Counts the KV blocks of one engine by class. Make it before the first request comes."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self._online_keys: set[bytes] = set()
        engine.end_listeners.append(self._note_online_keys)

    def running(self) -> tuple[int, int]:
        """Distinct blocks that online requests hold, and that only offline ones hold."""
        manager = self._engine.scheduler.kv_cache_manager
        pool = manager.block_pool
        num_held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        online = {
            block.block_id
            for record in self._online_running()
            for group in manager.get_blocks(record.request_id).blocks
            for block in group
        }
        return len(online), num_held - len(online)

    def cached(self) -> tuple[int, int]:
        """Free blocks with content of online requests that can be hit, and of offline ones.

        Walks over the free blocks: about 1 ms for 8,600.
        """
        pool = self._engine.scheduler.kv_cache_manager.block_pool
        online = self._online_running()
        for record in online:
            self._note_online_keys(record)
        free = pool.free_block_queue.get_all_free_blocks()
        keys = [key for block in free if (key := block.block_hash)]
        num_online = sum([key in self._online_keys for key in keys])
        if len(self._online_keys) > 2 * pool.num_gpu_blocks:
            self._online_keys.intersection_update(keys)
            for record in online:
                self._note_online_keys(record)
        return num_online, len(keys) - num_online

    def _online_running(self) -> list[RequestRecord]:
        records = self._engine.records
        running = [records[request.request_id] for request in self._engine.scheduler.running]
        return [record for record in running if record.is_online]

    def _note_online_keys(self, record: RequestRecord) -> None:
        if record.is_online and record.request is not None:
            self._online_keys.update(
                block_hash + GROUP_SUFFIX for block_hash in record.request.block_hashes
            )
