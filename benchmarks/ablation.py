"""Every policy against stock vLLM on the virtual engine, with the bars it must clear.

    python -m benchmarks.ablation [--scenario NAME] [--seeds N ...] [--blocks N ...] [--law NAME]
                                  [--only PATTERN ...] [--cold] [--to-end] [--json FILE]

Prints the means over the seeds as a table, and below it each bar: met or missed. With `--json` the
steps of Echo's ladder are watched in the first seed: NAME.jsonl gets the records, NAME-series.jsonl
what `benchmarks.plots` draws.

All run two steps ahead, as on a GPU; `bs` to `echo` are our scheduler class. Whoever schedules, the
daemon of `batchrun.simulator` sends the rows and keeps at most 256 of them waiting.
Policies that learn start from 20 observed minutes of other traffic of the same generator and from
one of offline work, never from the step law; with `--cold` they know nothing. All figures but
`plan_ms` repeat exactly.

With `--to-end`, and in `many-jobs` always, a run goes on until the jobs have ended (`job_s`): a
window favours whoever begins with the cheap rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from batchrun.config import STOCK_POLICY
from batchrun.estimator.forecast import ForecastRule
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.online import Calls
from batchrun.simulator.records import OnlineTotals, Tables
from batchrun.simulator.simulation import Simulation, SimulationPlan, own_heap
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.ablation_configs import (
    CONTEXTS,
    FORECAST,
    LADDER,
    STOCK,
    Config,
    configs,
    judge,
    means_of,
    with_costs,
)
from benchmarks.job_shapes import joined, picked
from benchmarks.laws import LAWS
from benchmarks.records import Record, markdown, parser, write_records
from benchmarks.row_feeds import (
    BLOCK_TOKENS,
    daemon_in_order,
    daemon_in_turns,
    daemon_of,
    drawn_job,
    flex_calls,
)
from benchmarks.scenarios import (
    LONGEST_S,
    SCENARIOS,
    Job,
    Order,
    Scenario,
    draw_calls,
    draw_jobs,
    hit_optimum,
)
from benchmarks.warm_up import SEED_OFFSET, WarmUp, observe

NUM_PROCESSES = 2

COLUMNS = (
    *("offline_tokens_per_s", "offline_computed_tokens_per_s", "prefix_hit_rate"),
    *("ttft_p50_s", "ttft_p99_s", "slo_ttft", "slo_tpot", "slo_deadline"),
    *("online_longest_wait_s", "offline_longest_wait_s", "plan_ms"),
    *("offline_longest_overtaken_s", "offline_preemptions", "online_hit_rate", "job_s"),
)
WARM_UP_S = 1200.0
ALONE_S = 180.0
"""What a run to the end of the jobs takes where there are none."""
CHECK_S = 1.0
"""How often such a run looks whether they have ended."""
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
    """One run. Policies that learn watched `warm_up_s` seconds of online traffic before; 0: nothing
    at all."""

    scenario: Scenario
    law_name: str
    config: Config
    seed: int
    blocks: int
    warm_up_s: float = WARM_UP_S


def main() -> int:
    """Run, print and save."""
    options = _parser().parse_args()
    scenario = SCENARIOS[options.scenario]
    if options.to_end:
        scenario = replace(scenario, duration_s=LONGEST_S, is_to_end=True)
    sizes = options.blocks or scenario.blocks
    chosen = [
        config
        for config in configs(options.scenario)
        if any(fnmatchcase(config.name, pattern) for pattern in options.only)
    ]
    trials = [
        Trial(scenario, options.law, config, seed, blocks, 0.0 if options.cold else WARM_UP_S)
        for seed in options.seeds
        for blocks in sizes
        for config in chosen
    ]
    run = partial(_run, watched_seed=None if options.json is None else options.seeds[0])
    records: list[Record] = []
    series: list[Record] = []
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        # The trials of a chunk start from one warm-up.
        for record, columns in pool.imap(run, trials, chunksize=len(chosen) or 1):
            print(
                *(record[key] for key in ("seed", "blocks", "config")), file=sys.stderr, flush=True
            )
            records.append(record)
            series += [] if columns is None else [columns]
    records = with_costs(records)
    if options.json is not None:
        write_records(options.json, records)
        write_records(series_path(options.json), series)
    for blocks in sizes:
        of_size = [record for record in records if record["blocks"] == blocks]
        _print_size(options.scenario, options.law, blocks, of_size)
    return 0


def series_path(path: Path) -> Path:
    """Where the series beside a file of records stand."""
    return path.with_name(f"{path.stem}-series.jsonl")


def _run(trial: Trial, watched_seed: int | None) -> tuple[Record, Record | None]:
    """The record, and the series of a step of the ladder in the seed that is watched."""
    if trial.seed == watched_seed and trial.config.name in LADDER:
        return measure_watched(trial)
    return measure(trial), None


def _print_size(scenario_name: str, law: str, blocks: int, records: Sequence[Record]) -> None:
    means = means_of(records)
    num_seeds = len({record["seed"] for record in records})
    print(f"\n{scenario_name}, law {law}, {blocks:,} blocks, means of {num_seeds} seeds\n")
    rows = [[name, *map(figures.get, COLUMNS)] for name, figures in means.items()]
    print(markdown(["config", *COLUMNS], rows), end="\n\n")
    for bar in judge(scenario_name, blocks, means):
        print(f"- {bar}")


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__, seeds=(0, 1, 2, 3, 4))
    made.add_argument("--scenario", choices=SCENARIOS, default="a100-8b")
    made.add_argument("--law", choices=LAWS, default="a100")
    made.add_argument("--blocks", type=int, nargs="+", help="KV sizes; by default the scenario's")
    made.add_argument("--cold", action="store_true", help="policies have learnt nothing before")
    made.add_argument("--to-end", action="store_true", help="run until the jobs have ended")
    made.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="configurations")
    return made


def measure(trial: Trial) -> Record:
    """A flat record: one configuration, figures with units in their names."""
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
        "ttft_percentiles_s": _percentiles(latencies.ttft_s),
        "tpot_percentiles_s": _percentiles(latencies.tpot_s),
    }
    return record, series


def figures_of(simulation: Simulation) -> Record:
    """The figures of one engine's run, with units in their names. Call it once."""
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
        "ttft_max_s": max(watch.online.ttft_s, default=None),
        "longest_gap_s": watch.online.longest_gap_s if online.num_judged else None,
        "tpot_p50_s": online.tpot_p50_s,
        "tpot_p99_s": online.tpot_p99_s,
        "slo_ttft": online.ttft_kept,
        "slo_tpot": online.tpot_kept,
        "slo_deadline": online.deadline_kept,
        "computed_tokens_per_s": computed / found.duration_s,
        "offline_computed_tokens_per_s": offline.computed_tokens_per_s,
        "prefix_hit_rate": offline.hit_rate,
        "online_hit_rate": watch.online.hit_tokens / max(watch.online.prompt_tokens, 1),
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
    with own_heap():
        return _simulated(trial, tables)


def _simulated(trial: Trial, tables: Tables | None) -> tuple[Record, OnlineTotals]:
    """A call of its own, so that nobody holds the engine once it returns."""
    config, scenario = trial.config, trial.scenario
    is_stock = config.policy == STOCK
    jobs = [] if config.order is None else draw_jobs(scenario, trial.seed, config.order)
    plan = _plan(trial)
    simulation = Simulation(plan, tables, _feed(config, jobs, trial.seed))
    scheduler = simulation.engines.engines[0].scheduler
    if trial.warm_up_s and config.policy not in {STOCK, "bs"}:
        seen = _observed(scenario, trial.law_name, trial.seed, trial.blocks, trial.warm_up_s)
        (seen if config.is_online else seen.without_online_use()).tell(scheduler)
    planning_s = timed(scheduler)
    overtaken = Overtaken(scheduler)
    if scenario.is_to_end and jobs:
        run_to_end(simulation, scenario.duration_s)
    else:
        simulation.engines.run_until(ALONE_S if scenario.is_to_end else scenario.duration_s)
    record = {
        "config": config.name,
        "law": trial.law_name,
        "policy": config.policy,
        "order": config.order,
        "planned": config.is_planned,
        "seed": trial.seed,
        "warm": trial.warm_up_s > 0,
        "online": config.is_online,
        "reserve": None if is_stock else config.reserve,
        "eviction": None if is_stock else config.eviction,
        "scenario": scenario.name,
        "blocks": trial.blocks,
        "budget": config.budget,
        "steps_in_flight": plan.engine.timing.steps_in_flight,
        **figures_of(simulation),
        "plan_ms": 1e3 * median(planning_s),
        "offline_longest_overtaken_s": overtaken.longest_s,
        "is_flex": config.is_flex,
        "job_s": _end_s(simulation),
    }
    if jobs:
        job = joined(jobs)
        mean_tokens = fmean(len(document) for document in job.documents)
        record["prefix_hit_optimum"] = hit_optimum(job, BLOCK_TOKENS)
        record["documents_that_fit"] = trial.blocks * BLOCK_TOKENS / mean_tokens
    return record, simulation.watch.online


def _feed(config: Config, jobs: Sequence[Job], seed: int) -> RowFeed:
    """Rows that nobody planned come in the one order that the input has; where each of several
    jobs is grouped, its documents take turns with those of the others."""
    if config.is_planned or not jobs:
        return daemon_of([
            replace(drawn_job(job, number=number), context_tokens=config.context)
            for number, job in enumerate(jobs)
        ])
    if len(jobs) > 1 and config.order is Order.GROUPED:
        return daemon_in_turns(jobs)
    rows = joined(jobs)
    if len(jobs) > 1:
        rows = picked(rows, np.random.default_rng(seed).permutation(len(rows.rows)))
    return flex_calls(rows) if config.is_flex else daemon_in_order(rows)


def run_to_end(simulation: Simulation, most_s: float) -> None:
    """Run one engine until all jobs have ended, or the clock has come to `most_s`."""
    (engine,) = simulation.engines.engines
    while _end_s(simulation) is None and engine.now_s < most_s:
        simulation.engines.run_until(min(engine.now_s + CHECK_S, most_s))


def _end_s(simulation: Simulation) -> float | None:
    """When the last job ended; None: it has not, or there is none."""
    ends = [job.finished_at_s for job in simulation.feed.jobs]
    known = [at_s for at_s in ends if at_s is not None]
    return max(known, default=None) if len(known) == len(ends) else None


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


class Overtaken:
    """The longest that an offline row waited while one behind it in the order ran; preempted rows
    wait too. None where vLLM's own scheduler keeps no such order."""

    def __init__(self, scheduler: Any) -> None:
        self.longest_s: float | None = None
        self._since_s: dict[str, float] = {}
        self._schedule, self._scheduler = scheduler.schedule, scheduler
        if getattr(scheduler, "step_policy", None) is not None:
            self.longest_s = 0.0
            scheduler.schedule = self.schedule

    def schedule(self, *args: object) -> Any:
        """The scheduler's own step, and a look at who waits after it."""
        output = self._schedule(*args)
        state = self._scheduler.state
        views = [state.views[request.request_id] for request in self._scheduler.running]
        last = max(((view.epoch, view.rank) for view in views if view.is_offline), default=(0, 0))
        now_s, before, self._since_s = state.clock(), self._since_s, {}
        for view in state.queue.offline:
            if (view.epoch, view.rank) > last:
                break
            since_s = self._since_s[view.request_id] = before.get(view.request_id, now_s)
            self.longest_s = max(self.longest_s or 0.0, now_s - since_s)
        return output


def _plan(trial: Trial) -> SimulationPlan:
    """Every step is vLLM's own, so that `plan_ms` is what it would take."""
    config = trial.config
    calls = draw_calls(trial.scenario, trial.seed) if config.is_online else []
    settings: dict[str, object] = {
        "reserve": config.reserve,
        "eviction": config.eviction,
        "online_cost": config.online_cost,
    }
    if config.reserve in set(ForecastRule):
        settings |= {"reserve": FORECAST, "forecast_rule": config.reserve}
    is_stock = config.policy == STOCK
    engine = EnginePlan(
        EngineShape(trial.blocks, config.budget, max_model_len=config.context or CONTEXTS[0]),
        STOCK_POLICY if is_stock else config.policy,
        {} if is_stock else settings,
        LAWS[trial.law_name](trial.seed),
        steps_one_by_one=True,
    )
    return SimulationPlan(
        trial.scenario.duration_s, Calls.of(calls), engine=engine, seed=trial.seed
    )


@lru_cache(maxsize=1)
def _observed(
    scenario: Scenario, law_name: str, seed: int, blocks: int, warm_up_s: float
) -> WarmUp:
    """The noise of the warm-up is not that of the run."""
    law = LAWS[law_name](seed + SEED_OFFSET)
    return observe(scenario, seed, EngineShape(blocks), law, online_s=warm_up_s)


def _percentiles(values: Sequence[float]) -> list[float]:
    return np.percentile(values, np.arange(101)).tolist() if len(values) else []


if __name__ == "__main__":
    raise SystemExit(main())
