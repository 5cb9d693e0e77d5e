"""From the records of a run to one flat record of figures (design section 11).

What a virtual engine holds and does, once per virtual second.

What an engine has learnt before a run: its online traffic, and how long steps take.

One run: a scheduler class through a scenario.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId
from vllm.v1.core.sched.scheduler import Scheduler

from batchrun.estimator.forecast import KvForecast
from batchrun.estimator.step_load import StepLoad
from batchrun.simulator.virtual.engine import (
    DEFAULT_TIMING,
    RequestRecord,
    Timing,
    TrafficSource,
    VirtualEngine,
)
from batchrun.simulator.virtual.feeder import DAEMON_WINDOW, JobFeeder, OnlineSource
from batchrun.simulator.virtual.laws import A100Law, StepItem, StepLaw
from batchrun.simulator.virtual.scenarios import (
    Order,
    Scenario,
    draw_calls,
    draw_job,
    planned_order,
)
from batchrun.simulator.virtual.setup import EngineShape, stock_scheduler

Figures = dict[str, object]


@dataclass(frozen=True, slots=True)
class Slo:
    """What online users were promised, in seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05


def summarize(engine: VirtualEngine, slo: Slo) -> Figures:
    """The figures of the run so far. All but `plan_ms` repeat exactly.

    Online figures count every call whose TTFT bound has passed; one without its first token by
    then is a miss, and its TTFT is the time waited so far. Means and percentiles of nothing are
    None. A wait is the time from arrival to the first admission, or to now.
    """
    end_s = engine.now_s
    online = [r for r in engine.records.values() if r.is_online]
    offline = [r for r in engine.records.values() if not r.is_online]
    judged = [r for r in online if r.arrival_at_s <= end_s - slo.ttft_s]
    totals = engine.totals
    computed = totals.num_online_computed_tokens + totals.num_offline_computed_tokens
    return {
        "duration_s": end_s,
        **_offline_figures(offline, end_s),
        **_online_figures(judged, slo, end_s),
        "computed_tokens_per_s": computed / end_s,
        "offline_computed_tokens_per_s": totals.num_offline_computed_tokens / end_s,
        "prefix_hit_rate": _hit_rate(offline),
        "online_longest_wait_s": _longest_wait_s(online, end_s),
        "offline_longest_wait_s": _longest_wait_s(offline, end_s),
        "online_preemptions": sum(r.num_preemptions for r in online),
        "offline_preemptions": sum(r.num_preemptions for r in offline),
        "steps": totals.num_steps,
        "empty_steps": totals.num_empty_steps,
        "busy_share": totals.busy_s / end_s,
        "online_step_share": _ratio(totals.online_share_sum, totals.num_steps),
        "plan_ms": _percentile([1e3 * s for s in totals.planning_wall_s], 50),
    }


def online_percentiles(engine: VirtualEngine, slo: Slo) -> dict[str, list[float]]:
    """The percentiles 0 to 100 of TTFT and TPOT over the calls that `summarize` judges."""
    end_s = engine.now_s
    records = [
        r for r in engine.records.values() if r.is_online and r.arrival_at_s <= end_s - slo.ttft_s
    ]
    values = {
        "ttft_percentiles_s": [_ttft_s(r, end_s) for r in records],
        "tpot_percentiles_s": [_tpot_s(r) for r in records if len(r.token_times_s) > 1],
    }
    return {
        name: np.percentile(series, np.arange(101)).tolist() if series else []
        for name, series in values.items()
    }


def _offline_figures(records: Sequence[RequestRecord], end_s: float) -> Figures:
    """Served tokens: prompt (hits included) and output of the rows that are done."""
    done = [r for r in records if r.finished_at_s is not None and r.finish_reason != "abort"]
    served = sum(r.num_prompt_tokens + len(r.output_token_ids) for r in done)
    return {
        "offline_tokens_per_s": served / end_s,
        "offline_rows_per_s": len(done) / end_s,
        "offline_rows": len(done),
    }


def _online_figures(records: Sequence[RequestRecord], slo: Slo, end_s: float) -> Figures:
    ttft = [_ttft_s(r, end_s) for r in records]
    tpot = [_tpot_s(r) for r in records if len(r.token_times_s) > 1]
    is_prompt = [bool(r.token_times_s) and _ttft_s(r, end_s) <= slo.ttft_s for r in records]
    return {
        "online_requests": len(records),
        "ttft_p50_s": _percentile(ttft, 50),
        "ttft_p99_s": _percentile(ttft, 99),
        "tpot_p50_s": _percentile(tpot, 50),
        "tpot_p99_s": _percentile(tpot, 99),
        "slo_ttft": _mean(is_prompt),
        "slo_tpot": _mean([value <= slo.tpot_s for value in tpot]),
        "slo_deadline": _mean([_keeps_deadlines(r, slo, end_s) for r in records]),
    }


def _ttft_s(record: RequestRecord, end_s: float) -> float:
    first_s = record.token_times_s[0] if record.token_times_s else end_s
    return first_s - record.arrival_at_s


def _tpot_s(record: RequestRecord) -> float:
    times = record.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1)


def _keeps_deadlines(record: RequestRecord, slo: Slo, end_s: float) -> bool:
    """Echo's deadline: token i by arrival + TTFT + i * TPOT, one that is overdue included."""
    first_due_s = record.arrival_at_s + slo.ttft_s
    times = record.token_times_s
    if record.finished_at_s is None and first_due_s + len(times) * slo.tpot_s < end_s:
        return False
    return all(at_s <= first_due_s + i * slo.tpot_s for i, at_s in enumerate(times))


def _hit_rate(records: Sequence[RequestRecord]) -> float | None:
    """Hit tokens by prompt tokens, over first admissions."""
    admitted = [r for r in records if r.admitted_at_s is not None]
    hits = sum(r.num_hit_tokens for r in admitted)
    return _ratio(hits, sum(r.num_prompt_tokens for r in admitted))


def _longest_wait_s(records: Iterable[RequestRecord], end_s: float) -> float | None:
    waits = [
        (end_s if r.admitted_at_s is None else r.admitted_at_s) - r.arrival_at_s for r in records
    ]
    return max(waits, default=None)


def _mean(values: Sequence[float]) -> float | None:
    return _ratio(sum(values), len(values))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


GROUP_SUFFIX = b"\0\0\0\0"
"""vLLM keys a cached block by its hash and its KV group's number; here there is one group."""


class Timeline:
    """Samples of one run, as columns of equal length.

    `at_s` is the instant. Blocks by class, as in Echo's figure 10: held by running requests
    (`online_running_blocks`, `offline_running_blocks`), and free with content that can still be hit
    (`online_cached_blocks`, `offline_cached_blocks`); the rest of `total_blocks` is empty.
    `forecast_blocks` is what the rule of section 5.3 expects online requests to want, from
    `kv_samples` of earlier traffic and the samples so far; None without enough of them.
    `online_active` and `offline_active` requests run. `offline_hit_tokens` and
    `offline_prompt_tokens` add up over first admissions.

    A sample walks over the free blocks (`BlocksByClass`).
    """

    def __init__(self, engine: VirtualEngine, kv_samples: Sequence[tuple[float, int]] = ()) -> None:
        self.columns: dict[str, list[float | int | None]] = {}
        self._engine = engine
        self._blocks = BlocksByClass(engine)
        self._forecast = KvForecast()
        for at_s, blocks in kv_samples:
            self._forecast.sample(at_s, blocks)

    @property
    def total_blocks(self) -> int:
        """Blocks that requests can have; vLLM keeps one for itself."""
        return self._engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def sample(self) -> None:
        """Add one row of figures as of now."""
        engine = self._engine
        records = engine.records
        running = [records[request.request_id] for request in engine.scheduler.running]
        num_online = sum(record.is_online for record in running)
        online_blocks, offline_blocks = self._blocks.running()
        online_cached, offline_cached = self._blocks.cached()
        self._forecast.sample(engine.now_s, online_blocks)
        admitted = [r for r in records.values() if r.admitted_at_s is not None and not r.is_online]
        self._add({
            "at_s": engine.now_s,
            "online_running_blocks": online_blocks,
            "offline_running_blocks": offline_blocks,
            "online_cached_blocks": online_cached,
            "offline_cached_blocks": offline_cached,
            "forecast_blocks": self._forecast.forecast_blocks,
            "online_active": num_online,
            "offline_active": len(running) - num_online,
            "offline_hit_tokens": sum(r.num_hit_tokens for r in admitted),
            "offline_prompt_tokens": sum(r.num_prompt_tokens for r in admitted),
        })

    def _add(self, row: dict[str, float | int | None]) -> None:
        for name, value in row.items():
            self.columns.setdefault(name, []).append(value)


class BlocksByClass:
    """Counts the KV blocks of one engine by class. Make it before the first request comes."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self._online_keys: set[BlockHashWithGroupId] = set()
        engine.end_listeners.append(self._note_online_keys)

    def running(self) -> tuple[int, int]:
        """Distinct blocks that online requests hold, and that only offline ones hold."""
        pool = self._engine.scheduler.kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        num_online = self._blocks_of(self._online_running())
        return num_online, held - num_online

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
            self._forget_evicted(online, keys)
        return num_online, len(keys) - num_online

    def _online_running(self) -> list[RequestRecord]:
        records = self._engine.records
        running = [records[request.request_id] for request in self._engine.scheduler.running]
        return [record for record in running if record.is_online]

    def _note_online_keys(self, record: RequestRecord) -> None:
        if record.is_online and record.request is not None:
            self._online_keys.update(
                BlockHashWithGroupId(block_hash + GROUP_SUFFIX)
                for block_hash in record.request.block_hashes
            )

    def _forget_evicted(
        self, running: Sequence[RequestRecord], cached: Sequence[BlockHashWithGroupId]
    ) -> None:
        self._online_keys.intersection_update(cached)
        for record in running:
            self._note_online_keys(record)

    def _blocks_of(self, records: Sequence[RequestRecord]) -> int:
        """Distinct blocks that these requests hold."""
        manager = self._engine.scheduler.kv_cache_manager
        held: set[int] = set()
        for record in records:
            for group in manager.get_blocks(record.request_id).blocks:
                held.update(block.block_id for block in group)
        return len(held)


OFFLINE_S = 60.0
KEPT_STEPS = 4_000
SEED_OFFSET = 1_000
"""The warm-up draws from the scenario's generators, but never the run's own requests."""


@dataclass(frozen=True, slots=True, eq=False)
class WarmUp:
    """Observations that end where a run's clock begins, at 0.

    `kv_samples` are (instant in seconds, blocks held by online requests), oldest first: the
    highest use in each second. `steps` are what was computed and the seconds that it took.
    """

    kv_samples: Sequence[tuple[float, int]]
    steps: Sequence[tuple[StepLoad, float]]

    def without_online_use(self) -> WarmUp:
        """The same for an engine that served nobody in that time."""
        return replace(self, kv_samples=[(at_s, 0) for at_s, _ in self.kv_samples])


@runtime_checkable
class Learner(Protocol):
    """A scheduler that takes earlier observations in."""

    def warm_up(
        self, kv_samples: Iterable[tuple[float, int]], steps: Iterable[tuple[StepLoad, float]]
    ) -> None:
        """See `WarmUp`."""
        ...


def observe(
    scenario: Scenario, seed: int, shape: EngineShape, law: StepLaw, *, online_s: float
) -> WarmUp:
    """Watch stock vLLM: a minute of offline work alone, then `online_s` of the online traffic.

    Keeps the last `KEPT_STEPS` steps of each. Takes about 1 s per virtual minute on one core.
    """
    seed += SEED_OFFSET
    job = planned_order(draw_job(scenario.job, seed, Order.SHUFFLED))
    offline = _Watch(JobFeeder(job, window=DAEMON_WINDOW), shape, law)
    offline.run_until(OFFLINE_S)
    calls = draw_calls(replace(scenario, duration_s=online_s), seed)
    online = _Watch(OnlineSource(calls, seed), shape, law)
    online.run_until(online_s)
    return WarmUp(
        [(second - online_s, blocks) for second, blocks in enumerate(online.max_blocks)],
        [*offline.steps, *online.steps],
    )


class _Watch:
    """Runs stock vLLM and notes its steps, and the most blocks held in each second."""

    def __init__(self, source: TrafficSource, shape: EngineShape, law: StepLaw) -> None:
        watched = _WatchedLaw(law)
        self.steps = watched.steps
        self.max_blocks: list[int] = []
        self._block_tokens = shape.block_tokens
        self._engine = VirtualEngine(stock_scheduler(2), shape, watched, [source])
        self._source = source

    def run_until(self, end_s: float) -> None:
        engine, source = self._engine, self._source
        while engine.now_s < end_s:
            if not engine.step():
                engine.now_s = min(max(engine.now_s, source.next_due_s), end_s)
            self._sample(int(min(engine.now_s, end_s - 1)))

    def _sample(self, second: int) -> None:
        blocks, size = 0, self._block_tokens
        for request in self._engine.scheduler.running:
            blocks += -(-request.num_computed_tokens // size)
        while len(self.max_blocks) <= second:
            self.max_blocks.append(blocks)
        self.max_blocks[second] = max(self.max_blocks[second], blocks)


class _WatchedLaw:
    """A law whose durations are noted, as an engine measures them."""

    def __init__(self, law: StepLaw) -> None:
        self._law = law
        self.steps: deque[tuple[StepLoad, float]] = deque(maxlen=KEPT_STEPS)

    @property
    def expected(self) -> StepLaw:
        return self._law.expected

    def step_s(self, items: Sequence[StepItem]) -> float:
        seconds = self._law.step_s(items)
        self.steps.append((StepLoad.of(items), seconds))
        return seconds


@dataclass(frozen=True, slots=True)
class Run:
    """What to run. `sources` are used up by it; a noisy `law` goes on drawing.

    `warm_up` is for a scheduler that learns; stock vLLM has no use for it.
    """

    scheduler_cls: type[Scheduler]
    scenario: Scenario
    shape: EngineShape
    sources: Sequence[TrafficSource]
    law: StepLaw = field(default_factory=A100Law)
    timing: Timing = DEFAULT_TIMING
    warm_up: WarmUp | None = None


def run(plan: Run) -> dict[str, object]:
    """The figures of the scenario's duration, with its name, the engine's shape and the SLOs."""
    engine = _build(plan)
    with _frozen_heap():
        engine.run_until(plan.scenario.duration_s)
    return _figures(plan, engine)


def run_watched(plan: Run) -> tuple[dict[str, object], dict[str, object]]:
    """The same figures, and the series of the run: the columns of a `Timeline` sampled once per
    virtual second, its `total_blocks`, and the percentiles of online latency."""
    engine = _build(plan)
    timeline = Timeline(engine, plan.warm_up.kv_samples if plan.warm_up else ())
    duration_s = plan.scenario.duration_s
    with _frozen_heap():
        for second in range(1, math.ceil(duration_s) + 1):
            engine.run_until(min(second, duration_s))
            timeline.sample()
    series = {
        "total_blocks": timeline.total_blocks,
        **timeline.columns,
        **online_percentiles(engine, _slo(plan.scenario)),
    }
    return _figures(plan, engine), series


def _build(plan: Run) -> VirtualEngine:
    engine = VirtualEngine(plan.scheduler_cls, plan.shape, plan.law, plan.sources, plan.timing)
    if plan.warm_up is not None and isinstance(engine.scheduler, Learner):
        engine.scheduler.warm_up(plan.warm_up.kv_samples, plan.warm_up.steps)
    return engine


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Long prompts are lists that every full collection would walk; none of them is garbage."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _slo(scenario: Scenario) -> Slo:
    return Slo(scenario.slo_ttft_s, scenario.slo_tpot_s)


def _figures(plan: Run, engine: VirtualEngine) -> dict[str, object]:
    return {
        "scenario": plan.scenario.name,
        "blocks": plan.shape.num_blocks,
        "budget": plan.shape.token_budget,
        "steps_in_flight": plan.timing.steps_in_flight,
        **summarize(engine, _slo(plan.scenario)),
    }
