"""One simulation: what is given, and the figures of what happened."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import numpy as np

from batchrun.errors import DataError
from batchrun.routing.routers import DEFAULT_ROUTER
from batchrun.simulator.cluster import EnginePlan, Engines
from batchrun.simulator.feeding import ActiveRows, RowFeed
from batchrun.simulator.offline_jobs import OfflineJob
from batchrun.simulator.online import CallTrace, OnlineRouter, first_too_long
from batchrun.simulator.records import OnlineTotals, Slo, Tables, Watch
from batchrun.simulator.virtual.engine import StepTotals
from batchrun.types import ProgressSink

COLLECT_EVERY = 50_000
"""Objects made between two searches for garbage: what grows in a simulation is no cycle."""
PROGRESS_S = 1.0


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """What to simulate: `duration_s` of online `calls` and offline `jobs` on `num_engines`.

    The same plan gives the same figures and the same records to the last bit. Only calls that
    arrive in the seconds [from, to) of `judged_s` are judged; those around them are the load.
    `router` names who chooses their engines. `engines` are the plans of engines that are not all
    like `engine`.
    """

    duration_s: float
    calls: CallTrace
    jobs: Sequence[OfflineJob] = ()
    num_engines: int = 1
    engine: EnginePlan = field(default_factory=EnginePlan)
    slo: Slo = field(default_factory=Slo)
    seed: int = 0
    judged_s: tuple[float, float] = (0.0, math.inf)
    router: str = DEFAULT_ROUTER
    engines: Sequence[EnginePlan] = ()

    @property
    def engine_plans(self) -> Sequence[EnginePlan]:
        """The plan of each engine."""
        return self.engines or [self.engine] * self.num_engines

    @property
    def max_model_len(self) -> int:
        """The shortest context of the engines, in tokens: any of them may get any request."""
        return min(each.shape.max_model_len for each in self.engine_plans)

    @property
    def kv_tokens(self) -> int:
        """Of the engine that has the least KV cache."""
        return min(each.traits.kv_tokens for each in self.engine_plans)


@dataclass(frozen=True, slots=True)
class OnlineFigures:
    """Calls whose first token was due by the end are judged; one without it by then is a miss.

    `num_arrived` = `num_ended` + `num_unfinished`. Shares are of the judged calls (`tpot_kept`: of
    the `num_timed` with two tokens or more); None where there are none.
    """

    num_arrived: int
    num_ended: int
    num_unfinished: int
    num_judged: int
    num_timed: int
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    tpot_p99_s: float | None
    ttft_kept: float | None
    tpot_kept: float | None
    deadline_kept: float | None


@dataclass(frozen=True, slots=True)
class OfflineFigures:
    """Served tokens count cached prompt tokens, computed ones do not.

    `num_rows` = `num_ended` + `num_in_engines` + `num_to_come`.
    """

    num_rows: int
    num_ended: int
    num_in_engines: int
    num_to_come: int
    served_tokens_per_s: float
    computed_tokens_per_s: float
    hit_rate: float | None
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class JobFigures:
    """One job. `expected_tokens` is what the rows that ended were expected to compute, by the whole
    order and the daemon's guess of an answer. `finished_at_s` and `is_deadline_kept` are None
    while that is not known."""

    name: str
    num_rows: int
    num_done: int
    served_tokens: int
    computed_tokens: int
    expected_tokens: int
    finished_at_s: float | None
    is_deadline_kept: bool | None


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine: tokens that it computed for calls, and for rows."""

    num_steps: int
    busy_share: float
    online_computed_tokens: int
    offline_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """The figures of a simulation. `duration_s` is the time of the engine that ended first."""

    duration_s: float
    num_engines: int
    num_steps: int
    num_quick_steps: int
    busy_share: float
    online: OnlineFigures
    offline: OfflineFigures
    jobs: tuple[JobFigures, ...]
    engines: tuple[EngineFigures, ...]

    def record(self) -> dict[str, object]:
        """The figures as plain values."""
        return asdict(self)


def simulate(
    plan: SimulationPlan, tables: Tables | None = None, progress: ProgressSink | None = None
) -> Simulated:
    """Run the plan; records go to `tables`. Raises DataError when a request fits no engine."""
    _check(plan)
    with own_heap():
        return _simulated(plan, tables, progress)


class Simulation:
    """A plan before it runs, and what its figures are read from.

    Whoever wants the engines to know something before the first step tells them here; `simulate`
    does the rest. `feed` takes the place of the daemon that the plan's jobs would get.
    """

    def __init__(
        self, plan: SimulationPlan, tables: Tables | None = None, feed: RowFeed | None = None
    ) -> None:
        traits = [each.traits for each in plan.engine_plans]
        block_tokens = [each.shape.block_tokens for each in plan.engine_plans]
        self.feed = feed or RowFeed(plan.jobs, block_tokens, plan.seed)
        self.router = OnlineRouter(plan.calls, traits, plan.seed, plan.max_model_len, plan.router)
        self.engines = Engines(plan.engine_plans, self.router, self.feed)
        self.watch = Watch(
            self.engines, self.router, self.feed, tables, slo=plan.slo, judged_s=plan.judged_s
        )

    def figures(self) -> Simulated:
        """The figures, once the clock stands. Ends the records: call it once."""
        self.watch.close()
        engines = self.engines.engines
        end_s = min(engine.now_s for engine in engines)
        totals = [engine.totals for engine in engines]
        num_computed = sum(each.num_offline_computed_tokens for each in totals)
        return Simulated(
            end_s,
            len(engines),
            sum(each.num_steps for each in totals),
            self.engines.num_quick_steps,
            sum(each.busy_s for each in totals) / (len(engines) * end_s),
            _online(self.watch.online, self.router.num_arrived),
            _offline(self.watch, self.feed, num_computed, end_s),
            tuple(_job(job, end_s) for job in self.feed.jobs),
            tuple(_engine(each.totals, each.now_s) for each in engines),
        )


def _simulated(
    plan: SimulationPlan, tables: Tables | None, progress: ProgressSink | None
) -> Simulated:
    """A call of its own, so that nobody holds the engines once it returns."""
    simulation = Simulation(plan, tables)
    _run(simulation.engines, plan.duration_s, progress)
    return simulation.figures()


def _check(plan: SimulationPlan) -> None:
    longest = min(plan.max_model_len, plan.kv_tokens)
    is_context = longest == plan.max_model_len
    what = "the context" if is_context else "the KV cache"
    bound = f"{what} of {longest:,}{' (max_model_len)' if is_context else ''}"
    bound += " of one of the engines" if plan.engines else ""
    index = first_too_long(plan.calls, longest)
    if index is not None:
        raise DataError(f"online call {index + 1} has more tokens than {bound}")
    for job in plan.jobs:
        tokens = (job.num_prompt_tokens + job.num_output_tokens)[job.order.rows]
        if tokens.size and tokens.max() > longest:
            row = int(job.order.rows[np.argmax(tokens)])
            raise DataError(
                f"job {job.name}: row {row} has {tokens.max():,} tokens, more than {bound}"
            )


def _run(engines: Engines, duration_s: float, progress: ProgressSink | None) -> None:
    if progress is None or duration_s == math.inf:
        engines.run_until(duration_s)
        return
    for second in range(1, math.ceil(duration_s / PROGRESS_S) + 1):
        engines.run_until(min(second * PROGRESS_S, duration_s))
        progress("simulating", second, math.ceil(duration_s / PROGRESS_S))


@contextmanager
def own_heap() -> Iterator[None]:
    """Long prompts are lists that every full collection would walk, and few of them are garbage
    before the end; then engines, which hold each other in circles, go at once."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.collect()
        gc.set_threshold(*before)
        gc.unfreeze()


def _online(totals: OnlineTotals, num_arrived: int) -> OnlineFigures:
    ttft, tpot, num = totals.ttft_s, totals.tpot_s, totals.num_calls
    return OnlineFigures(
        num_arrived,
        totals.num_ended,
        num_arrived - totals.num_ended,
        num,
        len(tpot),
        *_percentiles(ttft),
        *_percentiles(tpot),
        _share(totals.num_ttft_kept, num),
        _share(totals.num_tpot_kept, len(tpot)),
        _share(totals.num_all_kept, num),
    )


def _offline(watch: Watch, feed: RowFeed, num_computed: int, end_s: float) -> OfflineFigures:
    totals = watch.offline
    num_rows = sum(each.plan.num_rows for each in feed.jobs)
    num_ended = sum(each.num_done for each in feed.jobs)
    return OfflineFigures(
        num_rows,
        num_ended,
        len(feed.sent),
        num_rows - num_ended - len(feed.sent),
        sum(each.served_tokens for each in feed.jobs) / end_s,
        num_computed / end_s,
        _share(totals.hit_tokens, totals.prompt_tokens),
        totals.num_preemptions,
    )


def _job(active: ActiveRows, end_s: float) -> JobFigures:
    job, done_s = active.plan, active.finished_at_s
    is_kept: bool | None = None
    if job.deadline_s != math.inf:
        is_late = (end_s if done_s is None else done_s) > job.deadline_s
        is_kept = False if is_late else None if done_s is None else True
    return JobFigures(
        job.name,
        job.num_rows,
        active.num_done,
        active.served_tokens,
        active.computed_tokens,
        active.expected_tokens,
        done_s,
        is_kept,
    )


def _engine(totals: StepTotals, now_s: float) -> EngineFigures:
    return EngineFigures(
        totals.num_steps,
        totals.busy_s / now_s,
        totals.num_online_computed_tokens,
        totals.num_offline_computed_tokens,
    )


def _percentiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    if not len(values):
        return None, None, None
    p50, p90, p99 = np.percentile(np.asarray(values), (50, 90, 99)).tolist()
    return p50, p90, p99


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
