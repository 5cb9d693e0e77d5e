"""What planning costs: the part of our `schedule()` that is not vLLM's own.

    python -m benchmarks.planning_cost [--steps N] [--json FILE]

`echo` drives a virtual engine. In every step the whole call is timed, and within it the call of
vLLM's scheduler; their difference is the planning. Times do not repeat exactly; what is planned
does. Each load has a process of its own. In `full-calls` 200 to 300 calls with promises wait under
the order `on-time`, beside 512 rows that wait and 256 requests that run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import polars as pl
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.virtual.engine import TrafficSource, VirtualEngine
from batchrun.simulator.virtual.setup import A100Law, EngineShape
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.queue_calls import (
    Promise,
    PromisedCall,
    PromisedCalls,
    classed_calls,
    synthetic_steps,
)
from benchmarks.records import Bar, Record, Spent, finish, in_own_process, parser, shown
from benchmarks.row_feeds import RowSource, callers, planned_order
from benchmarks.scenarios import CHATS, Order, Scenario, a100_8b, draw_calls, draw_job
from benchmarks.warm_up import observe

NUM_ROWS = 256 + 512
"""Running and waiting."""
CALLS_PER_S, CALLS_S, LONG_ANSWER_TOKENS = 12.0, 300.0, 900
WINDOW = 256
"""Rows in the engine of the reference scenario."""
WARM_UP_S = 300.0
FULL_RUNNING, FULL_CANDIDATES = 240, 480
"""Steps with fewer running or waiting requests than these do not count as full."""
WAITING_CALLS = range(200, 300)
"""Of the steps of `full-calls` those with so many waiting calls count."""
MOST_MS, MOST_STEP_SHARE = 1.0, 0.03


class TimedVllm(AsyncScheduler):
    """vLLM's own scheduler; `stock` is what its last `schedule()` took."""

    stock = Spent()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM does."""
        with Spent() as self.stock:
            return super().schedule(*args, **kwargs)


class TimedScheduler(ColocatedScheduler, TimedVllm):
    """Ours, which plans before vLLM's schedules; `cost` is that of the last step."""

    cost: Record

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As ours does."""
        num_waiting = len(self.waiting)
        with Spent() as ours:
            output = super().schedule(*args, **kwargs)
        self.cost = {
            "running": len(self.running),
            "candidates": num_waiting,
            "ours_ms": 1e3 * ours.wall_s,
            "stock_ms": 1e3 * self.stock.wall_s,
            "planning_ms": 1e3 * (ours.wall_s - self.stock.wall_s),
            "planning_cpu_ms": 1e3 * (ours.cpu_s - self.stock.cpu_s),
        }
        return output


def loads() -> Iterator[tuple[Scenario, int, EngineShape]]:
    """Scenarios, the rows that are in the engine at once, and the engine: 256 running and 512
    waiting requests, of short documents and of long ones; and the reference scenario as it is."""
    online = replace(CHATS, rate_per_s=6.0, burst_factor=1.0, swing=0.0)
    short = JobShape(1_000, (200, 800), (6, 18), (15, 60), (100, 400))
    long = JobShape(120, (8_000, 28_000), (30, 60), (15, 60), (100, 400))
    settings = {"batchrun": {"slo": {"ttft_s": 60.0, "tpot_s": 2.0}}}
    shape = EngineShape(num_blocks=40_000, additional_config={"batchrun": {}})
    loose = EngineShape(num_blocks=120_000, additional_config=settings)
    yield Scenario("full-short", 600.0, online, short), NUM_ROWS, shape
    yield Scenario("full-long", 600.0, online, long), NUM_ROWS, loose
    yield a100_8b(), WINDOW, EngineShape(additional_config={"batchrun": {}})


def measure_calls(num_steps: int) -> Record:
    """Medians over the first steps in which 256 requests run and 200 to 300 calls wait."""
    law = A100Law()
    long = Promise("chat", 1.5, 0.1)
    calls = [
        PromisedCall(call.arrival_at_s, call.num_prompt_tokens, LONG_ANSWER_TOKENS, promise)
        for call in classed_calls(CALLS_PER_S, CALLS_S, 0)
        for promise in (call.promise if call.promise.jct_s is None else long,)
    ]
    settings = {"batchrun": {"online_queue": "on-time"}}
    shape = EngineShape(num_blocks=120_000, additional_config=settings)
    short = JobShape(1_000, (200, 800), (6, 18), (15, 60), (100, 400))
    job = planned_order(draw_job(short, 0, Order.SHUFFLED))
    sources: list[TrafficSource] = [PromisedCalls(calls, 0), RowSource(job, NUM_ROWS)]
    engine = VirtualEngine(TimedScheduler, shape, law, sources)
    scheduler = engine.scheduler
    assert isinstance(scheduler, TimedScheduler)
    for load, seconds in synthetic_steps(law, 0):
        scheduler.state.estimates.observe(load, seconds)
    steps: list[Record] = []
    while len(steps) < num_steps and engine.now_s < CALLS_S:
        num_waiting = len(scheduler.state.queue.online)
        is_full = len(scheduler.running) >= FULL_RUNNING and num_waiting in WAITING_CALLS
        busy_s = engine.totals.busy_s
        engine.step()
        if is_full and (step_ms := 1e3 * (engine.totals.busy_s - busy_s)):
            steps.append(_with_share({**scheduler.cost, "waiting_calls": num_waiting}, step_ms))
    return _medians("full-calls", steps)


def measure(scenario: Scenario, num_rows: int, shape: EngineShape, num_steps: int) -> Record:
    """Medians over the first `num_steps` steps that count; a share is that of a step's virtual
    time. CPU time is what other programs disturb less."""
    law = A100Law()
    job = planned_order(draw_job(scenario.job, 0, Order.SHUFFLED))
    online = callers(draw_calls(scenario, 0), 0)
    sources: list[TrafficSource] = [online, RowSource(job, num_rows)]
    engine = VirtualEngine(TimedScheduler, shape, law, sources)
    scheduler = engine.scheduler
    assert isinstance(scheduler, TimedScheduler)
    observe(scenario, 0, shape, law, online_s=WARM_UP_S).tell(scheduler)
    steps: list[Record] = []
    while len(steps) < num_steps and engine.now_s < scenario.duration_s:
        busy_s = engine.totals.busy_s
        engine.step()
        step_ms = 1e3 * (engine.totals.busy_s - busy_s)
        cost = scheduler.cost
        is_full = cost["running"] >= FULL_RUNNING and cost["candidates"] >= FULL_CANDIDATES
        if step_ms and (is_full or num_rows != NUM_ROWS):
            steps.append(_with_share(cost, step_ms))
    return _medians(scenario.name, steps)


def _with_share(cost: Record, step_ms: float) -> Record:
    return {**cost, "step_ms": step_ms, "planning_step_share": cost["planning_ms"] / step_ms}


def _medians(load: str, steps: Sequence[Record]) -> Record:
    figures = pl.DataFrame(steps).select(
        pl.all().median(),
        planning_cpu_p10_ms=pl.col("planning_cpu_ms").quantile(0.1),
        planning_cpu_p90_ms=pl.col("planning_cpu_ms").quantile(0.9),
    )
    return {"load": load, "steps": len(steps), **figures.row(0, named=True)}


def main() -> int:
    """Measure, print, save; 1 when planning takes longer than it may."""
    options = parser(__doc__, steps=1_500).parse_args()
    records = shown(
        chain(
            (in_own_process(measure, *load, options.steps) for load in loads()),
            (in_own_process(measure_calls, options.steps) for _ in range(1)),
        )
    )
    bars = [
        bar
        for record in records
        for bar in (
            Bar(f"{record['load']}: ms of CPU", record["planning_cpu_ms"], MOST_MS, is_most=True),
            Bar(
                f"{record['load']}: share of step time",
                record["planning_step_share"],
                MOST_STEP_SHARE,
                is_most=True,
            ),
        )
    ]
    return finish(options.json, records, bars)


if __name__ == "__main__":
    raise SystemExit(main())
