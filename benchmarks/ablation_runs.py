"""One measurement of `benchmarks.ablation`: a configuration through a scenario."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from batchrun.simulator.virtual.engine import Timing, TrafficSource
from batchrun.simulator.virtual.feeder import DAEMON_WINDOW, JobFeeder, OnlineSource
from batchrun.simulator.virtual.laws import A100Law, NoisyLaw, PoolingLaw, StepLaw
from batchrun.simulator.virtual.run import Run, WarmUp, observe, run, run_watched
from batchrun.simulator.virtual.scenarios import (
    Job,
    Scenario,
    draw_calls,
    draw_job,
    hit_optimum,
    planned_order,
)
from batchrun.simulator.virtual.setup import EngineShape, stock_scheduler
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.ablation_configs import FORECAST, OTHER_RULES, STOCK, Config
from benchmarks.stock_baseline import Record

LAWS: dict[str, Callable[[int], StepLaw]] = {
    "a100": lambda seed: A100Law(),
    "pooling": lambda seed: PoolingLaw(),
    "noisy": lambda seed: NoisyLaw(A100Law(), random.Random(seed)),
}

WARM_UP_S = 1200.0
SEED_OFFSET = 1_000
"""The noise of the warm-up is not that of the run."""


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
    job = _job(trial)
    return _record(trial, job, run(_plan(trial, job)))


def measure_watched(trial: Trial) -> tuple[Record, Record]:
    """The same, and the series of the run (see `run_watched`) as a record of columns."""
    job = _job(trial)
    figures, series = run_watched(_plan(trial, job))
    key = {
        "scenario": trial.scenario.name,
        "config": trial.config.name,
        "law": trial.law_name,
        "seed": trial.seed,
        "blocks": trial.blocks,
    }
    return _record(trial, job, figures), {**key, **series}


def _record(trial: Trial, job: Job | None, figures: dict[str, object]) -> Record:
    config = trial.config
    is_stock = config.policy == STOCK
    return {
        "config": config.name,
        "law": trial.law_name,
        "policy": config.policy,
        "order": config.order,
        "planned": config.is_planned,
        "seed": trial.seed,
        "online": config.is_online,
        "reserve": None if is_stock else config.reserve,
        "eviction": None if is_stock else config.eviction,
        **figures,
        **({} if job is None else _job_figures(job, trial.blocks)),
    }


def _job_figures(job: Job, blocks: int) -> dict[str, object]:
    """The best hit rate that the job allows, and how many of its documents KV can hold."""
    block_tokens = EngineShape().block_tokens
    mean_tokens = fmean(len(document) for document in job.documents)
    return {
        "prefix_hit_optimum": hit_optimum(job, block_tokens),
        "documents_that_fit": blocks * block_tokens / mean_tokens,
    }


def _plan(trial: Trial, job: Job | None) -> Run:
    config = trial.config
    is_stock = config.policy == STOCK
    is_one_ahead = not config.is_trial
    settings = {"policy": config.policy, "reserve": config.reserve, "eviction": config.eviction}
    if config.reserve in OTHER_RULES:
        settings |= {"reserve": FORECAST, "forecast_rule": config.reserve}
    return Run(
        stock_scheduler(1 + is_one_ahead) if is_stock else ColocatedScheduler,
        trial.scenario,
        EngineShape(
            num_blocks=trial.blocks,
            token_budget=config.budget,
            additional_config={} if is_stock else {"batchrun": settings},
        ),
        _sources(trial, job),
        law=LAWS[trial.law_name](trial.seed),
        timing=Timing() if is_one_ahead else Timing(steps_in_flight=1, planning_s=0.0),
        warm_up=_warm_up(trial),
    )


def _job(trial: Trial) -> Job | None:
    order = trial.config.order
    return None if order is None else draw_job(trial.scenario.job, trial.seed, order)


def _sources(trial: Trial, job: Job | None) -> list[TrafficSource]:
    config, seed = trial.config, trial.seed
    sources: list[TrafficSource] = []
    if config.is_online:
        sources.append(OnlineSource(draw_calls(trial.scenario, seed), seed))
    if job is not None:
        window = None if config.is_trial else DAEMON_WINDOW
        digits = 0 if config.is_trial else 7
        ordered = planned_order(job) if config.is_planned else job
        sources.append(JobFeeder(ordered, window=window, id_digits=digits))
    return sources


def _warm_up(trial: Trial) -> WarmUp | None:
    if trial.config.policy in {STOCK, "bs"}:
        return None
    seen = _observed(trial.scenario, trial.law_name, trial.seed, trial.blocks, trial.warm_up_s)
    return seen if trial.config.is_online else seen.without_online_use()


@lru_cache(maxsize=1)
def _observed(
    scenario: Scenario, law_name: str, seed: int, blocks: int, warm_up_s: float
) -> WarmUp:
    law = LAWS[law_name](seed + SEED_OFFSET)
    return observe(scenario, seed, EngineShape(num_blocks=blocks), law, online_s=warm_up_s)
