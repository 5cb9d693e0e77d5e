"""One measurement of `benchmarks.hit_rates`: the rows of a job, in an order, to their end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.online import Calls, OnlineCall
from batchrun.simulator.simulation import Simulation, SimulationPlan
from batchrun.simulator.virtual.engine import RequestRecord
from batchrun.simulator.virtual.laws import A100Law
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.ablation_runs import figures_of
from benchmarks.hit_jobs import JOBS
from benchmarks.hit_lru import hit_blocks_in_turn
from benchmarks.hit_plans import planned, pool_job
from benchmarks.job_shapes import joined
from benchmarks.optimal_hits import RowBlocks, most_hit_blocks
from benchmarks.orders import BASELINES, BLOCK_TOKENS, OURS, Setting, row_blocks, shuffled
from benchmarks.row_feeds import daemon_in_order, daemon_of
from benchmarks.scenarios import Job, Order, a100_8b, draw_calls, draw_job
from benchmarks.warm_up import WarmUp, observe

Record = dict[str, Any]

KV_BLOCKS = (8600, 4300)
QUICK_JOBS = ("toolbench", "nextqa")
RIVALS = ("submission", "lexicographic", "lpm")
"""These also run with vLLM's own eviction, all but the first beside online calls."""
SHIPPED, LRU = "next-use", "lru"
LONGEST_S, STALLED_S, CHECK_S = 7_200.0, 60.0, 5.0
"""The clock ends a run there, or when no row has ended for so long; it looks every `CHECK_S`."""
WARM_UP_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `job` is a name of `JOBS`."""

    job: str
    blocks: int
    order: str
    eviction: str = SHIPPED
    is_online: bool = False
    seed: int = 0


def cases(seed: int, *, is_quick: bool) -> list[Case]:
    """What a run of `benchmarks.hit_rates` measures."""
    sizes = KV_BLOCKS[1:] if is_quick else KV_BLOCKS
    settings = [
        (SHIPPED, False, (OURS, *(RIVALS if is_quick else BASELINES))),
        (LRU, False, (OURS, *RIVALS)),
        (SHIPPED, True, (OURS, *RIVALS[1:])),
    ]
    return [
        Case(job, blocks, order, eviction, is_online, seed)
        for blocks in sizes
        for job in (QUICK_JOBS if is_quick else JOBS)
        for eviction, is_online, orders in settings
        for order in orders
    ]


def measure(case: Case) -> Record:
    """A flat record: what was run, the hit rate, the optimum, and the engine's other figures.

    `in_turn_share_of_optimum` is the order's with rows one at a time (`benchmarks.hit_lru`).
    `job_s` is when the last row ended; a run that stalls has fewer `offline_rows` than `rows`.
    """
    jobs = _jobs(case.job, case.seed)
    job, feed = _ordered(case, jobs)
    simulation, job_s = _run(case, feed, len(job.rows))
    figures = figures_of(simulation)
    prompt_tokens = sum(job.num_prompt_tokens(row) for row in job.rows)
    best_tokens = most_hit_blocks(_row_blocks(case.job, case.seed), case.blocks) * BLOCK_TOKENS
    in_turn_tokens = hit_blocks_in_turn(row_blocks(job), case.blocks) * BLOCK_TOKENS
    hit_tokens = simulation.watch.offline.hit_tokens
    return {
        "job": case.job,
        "blocks": case.blocks,
        "order": case.order,
        "eviction": case.eviction,
        "online": case.is_online,
        "seed": case.seed,
        "rows": len(job.rows),
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "prefix_hit_optimum": best_tokens / prompt_tokens,
        "share_of_optimum": hit_tokens / best_tokens,
        "in_turn_share_of_optimum": in_turn_tokens / best_tokens,
        "job_s": job_s,
        **figures,
        "prefix_hit_rate": hit_tokens / prompt_tokens,
    }


@lru_cache(maxsize=2)
def _jobs(name: str, seed: int) -> list[Job]:
    """The jobs that run together, their rows as they arrive."""
    return [draw_job(source, seed, Order.SHUFFLED) for source in JOBS[name]()]


@lru_cache(maxsize=2)
def _row_blocks(name: str, seed: int) -> RowBlocks:
    return row_blocks(joined(_jobs(name, seed)))


@lru_cache(maxsize=1)
def _warm_up(blocks: int, seed: int) -> WarmUp:
    return observe(a100_8b(), seed, EngineShape(num_blocks=blocks), A100Law(), online_s=WARM_UP_S)


def _ordered(case: Case, jobs: Sequence[Job]) -> tuple[Job, RowFeed]:
    """The rows in the order of the case, and the daemon that sends them so."""
    if case.order == OURS:
        return planned(jobs).job, daemon_of([pool_job(job) for job in jobs])
    setting = Setting(case.seed, case.blocks)
    job = BASELINES[case.order](shuffled(joined(jobs), setting), setting)
    return job, daemon_in_order(job)


def _run(case: Case, feed: RowFeed, num_rows: int) -> tuple[Simulation, float]:
    """The simulation after the last row, and when that ended."""
    warm_up = _warm_up(case.blocks, case.seed)
    calls: Sequence[OnlineCall] = []
    if case.is_online:
        calls = draw_calls(replace(a100_8b(), duration_s=LONGEST_S), case.seed)
    else:
        warm_up = warm_up.without_online_use()
    engine = EnginePlan(EngineShape(case.blocks), settings={"eviction": case.eviction})
    simulation = fed(engine, feed, calls, case.seed)
    warm_up.tell(simulation.engines.engines[0].scheduler)
    return simulation, run_to_end(simulation, num_rows)


def fed(
    engine: EnginePlan, feed: RowFeed, calls: Sequence[OnlineCall] = (), seed: int = 0
) -> Simulation:
    """One engine with the rows of `feed`, before its first step."""
    plan = SimulationPlan(math.inf, Calls.of(calls), engine=engine, seed=seed)
    return Simulation(plan, feed=feed)


def run_to_end(simulation: Simulation, num_rows: int) -> float:
    """Run until so many rows have ended, or the run stalls; the instant of the last end."""
    engines = simulation.engines
    (engine,) = engines.engines
    ends_s: list[float] = [0.0]

    def note(record: RequestRecord) -> None:
        if not record.is_online:
            ends_s.append(engine.now_s)

    engine.end_listeners.append(note)
    while len(ends_s) <= num_rows and engine.now_s < min(ends_s[-1] + STALLED_S, LONGEST_S):
        engines.run_until(engine.now_s + CHECK_S)
    return ends_s[-1]
