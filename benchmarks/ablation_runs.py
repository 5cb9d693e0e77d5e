"""One measurement of `benchmarks.ablation`: a configuration through a scenario."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from batchrun.config import STOCK_POLICY
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.online import Calls
from batchrun.simulator.records import OnlineTotals, Tables
from batchrun.simulator.simulation import Simulation, SimulationPlan, own_heap
from batchrun.simulator.virtual.engine import Timing
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.ablation_configs import FORECAST, OTHER_RULES, STOCK, Config
from benchmarks.job_shapes import picked
from benchmarks.laws import LAWS
from benchmarks.row_feeds import BLOCK_TOKENS, daemon_in_order, daemon_of, drawn_job
from benchmarks.scenarios import Job, Scenario, draw_calls, draw_job, hit_optimum
from benchmarks.warm_up import SEED_OFFSET, WarmUp, observe

Record = dict[str, object]

WARM_UP_S = 1200.0
TRIAL_TIMING = Timing(steps_in_flight=1, planning_s=0.0)
SERIES = (
    "at_s",
    "online_active",
    "offline_active",
    "online_running_blocks",
    "offline_running_blocks",
    "online_cached_blocks",
    "offline_cached_blocks",
    "forecast_blocks",
)
SUMMED = ("offline_prompt_tokens", "offline_hit_tokens")
"""Columns of the simulator's records, by second, that `benchmarks.plots` draws."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. Policies that learn watched `warm_up_s` seconds of online traffic before."""

    scenario: Scenario
    law_name: str
    config: Config
    seed: int
    blocks: int
    warm_up_s: float = WARM_UP_S


def measure(trial: Trial) -> Record:
    """A flat record with the keys of design 11."""
    return _measured(trial, None)[0]


def measure_watched(trial: Trial) -> tuple[Record, Record]:
    """The same, and the series of the run as a record of columns: those of `SERIES`, tokens summed
    up, and the percentiles 0 to 100 of TTFT and TPOT."""
    config = trial.config
    with TemporaryDirectory() as folder:
        with Tables(Path(folder)) as tables:
            record, latencies = _measured(trial, tables)
        seconds = pq.read_table(Path(folder) / "seconds.parquet", columns=[*SERIES, *SUMMED])
    series = {
        "scenario": trial.scenario.name,
        "config": config.name,
        "law": trial.law_name,
        "seed": trial.seed,
        "blocks": trial.blocks,
        "total_blocks": trial.blocks - 1,
        **seconds.to_pydict(),
        **{name: np.cumsum(seconds[name].to_numpy()).tolist() for name in SUMMED},
        **_percentiles(latencies),
    }
    return record, series


def figures_of(simulation: Simulation) -> Record:
    """The figures of one engine's run, by the names of design 11. Call it once."""
    found = simulation.figures()
    online, offline, watch = found.online, found.offline, simulation.watch
    (engine,) = simulation.engines.engines
    totals = engine.totals
    computed = totals.num_online_computed_tokens + totals.num_offline_computed_tokens
    return {
        "duration_s": found.duration_s,
        "offline_tokens_per_s": offline.served_tokens_per_s,
        "offline_rows_per_s": offline.num_ended / found.duration_s,
        "offline_rows": offline.num_ended,
        "online_requests": online.num_judged,
        "ttft_p50_s": online.ttft_p50_s,
        "ttft_p99_s": online.ttft_p99_s,
        "tpot_p50_s": online.tpot_p50_s,
        "tpot_p99_s": online.tpot_p99_s,
        "slo_ttft": online.ttft_kept,
        "slo_tpot": online.tpot_kept,
        "slo_deadline": online.deadline_kept,
        "computed_tokens_per_s": computed / found.duration_s,
        "offline_computed_tokens_per_s": offline.computed_tokens_per_s,
        "prefix_hit_rate": offline.hit_rate,
        "online_longest_wait_s": watch.online.longest_wait_s if online.num_arrived else None,
        "offline_longest_wait_s": watch.offline.longest_wait_s if offline.num_rows else None,
        "online_preemptions": watch.online.num_preemptions,
        "offline_preemptions": offline.num_preemptions,
        "steps": found.num_steps,
        "empty_steps": totals.num_empty_steps,
        "busy_share": found.busy_share,
        "online_step_share": totals.online_share_sum / found.num_steps,
    }


def _measured(trial: Trial, tables: Tables | None) -> tuple[Record, OnlineTotals]:
    config, scenario = trial.config, trial.scenario
    is_stock = config.policy == STOCK
    job = None if config.order is None else draw_job(scenario.job, trial.seed, config.order)
    simulation = Simulation(
        _plan(trial), tables, daemon_of([]) if job is None else _feed(config, job)
    )
    scheduler = simulation.engines.engines[0].scheduler
    if config.policy not in {STOCK, "bs"}:
        _warm_up(trial).tell(scheduler)
    planning_s = timed(scheduler)
    with own_heap():
        simulation.engines.run_until(scenario.duration_s)
    record = {
        "config": config.name,
        "law": trial.law_name,
        "policy": config.policy,
        "order": config.order,
        "planned": config.is_planned,
        "seed": trial.seed,
        "online": config.is_online,
        "reserve": None if is_stock else config.reserve,
        "eviction": None if is_stock else config.eviction,
        "scenario": scenario.name,
        "blocks": trial.blocks,
        "budget": config.budget,
        "steps_in_flight": 1 if config.is_trial else 2,
        **figures_of(simulation),
        "plan_ms": 1e3 * median(planning_s),
        **({} if job is None else _job_figures(job, trial.blocks)),
    }
    return record, simulation.watch.online


def timed(scheduler: Any) -> list[float]:
    """The seconds that each `schedule()` which computes anything will have taken."""
    schedule, planning_s = scheduler.schedule, []

    def timed_schedule(*args: object) -> Any:
        begin_s = time.perf_counter()
        output = schedule(*args)
        if output.total_num_scheduled_tokens:
            planning_s.append(time.perf_counter() - begin_s)
        return output

    scheduler.schedule = timed_schedule
    return planning_s


def _job_figures(job: Job, blocks: int) -> Record:
    """The best hit rate that the job allows, and how many of its documents KV can hold."""
    mean_tokens = fmean(len(document) for document in job.documents)
    return {
        "prefix_hit_optimum": hit_optimum(job, BLOCK_TOKENS),
        "documents_that_fit": blocks * BLOCK_TOKENS / mean_tokens,
    }


def _plan(trial: Trial) -> SimulationPlan:
    """Every step is vLLM's own, so that `plan_ms` is what it would take."""
    config = trial.config
    is_stock = config.policy == STOCK
    calls = draw_calls(trial.scenario, trial.seed) if config.is_online else []
    engine = EnginePlan(
        EngineShape(trial.blocks, config.budget),
        STOCK_POLICY if is_stock else config.policy,
        {} if is_stock else _settings(config),
        LAWS[trial.law_name](trial.seed),
        TRIAL_TIMING if config.is_trial else Timing(),
        steps_one_by_one=True,
    )
    return SimulationPlan(
        trial.scenario.duration_s, Calls.of(calls), engine=engine, seed=trial.seed
    )


def _settings(config: Config) -> Mapping[str, object]:
    settings: dict[str, object] = {"reserve": config.reserve, "eviction": config.eviction}
    if config.reserve in OTHER_RULES:
        settings |= {"reserve": FORECAST, "forecast_rule": config.reserve}
    return settings


def _feed(config: Config, job: Job) -> RowFeed:
    """The rows in the order of the pool, or as they stand; those of the design's trial as their
    numbers sort as text."""
    if config.is_planned:
        return daemon_of([drawn_job(job)])
    if config.is_trial:
        job = picked(job, sorted(range(len(job.rows)), key=str))
    return daemon_in_order(job, is_all_at_once=config.is_trial)


def _warm_up(trial: Trial) -> WarmUp:
    seen = _observed(trial.scenario, trial.law_name, trial.seed, trial.blocks, trial.warm_up_s)
    return seen if trial.config.is_online else seen.without_online_use()


@lru_cache(maxsize=1)
def _observed(
    scenario: Scenario, law_name: str, seed: int, blocks: int, warm_up_s: float
) -> WarmUp:
    """The noise of the warm-up is not that of the run."""
    law = LAWS[law_name](seed + SEED_OFFSET)
    return observe(scenario, seed, EngineShape(blocks), law, online_s=warm_up_s)


def _percentiles(totals: OnlineTotals) -> dict[str, list[float]]:
    series = {"ttft_percentiles_s": totals.ttft_s, "tpot_percentiles_s": totals.tpot_s}
    return {
        name: np.percentile(values, np.arange(101)).tolist() if values else []
        for name, values in series.items()
    }
