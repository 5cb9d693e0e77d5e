"""The plan: how many engines of which kind, what jobs get beside the calls, and how it reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from batchrun.quantities import count, duration, seconds, share
from batchrun.simulator.offline_jobs import OfflineJob
from batchrun.simulator.planner.colocation import (
    NUM_DAY_WINDOWS,
    JobTokens,
    OfflineDay,
    alone_s,
    default_window_s,
    ends_s,
    offline_day,
    served_tokens,
)
from batchrun.simulator.planner.fleet import (
    MAX_ENGINES,
    PEAK_S,
    Attainment,
    Fleet,
    InfeasibleCalls,
    PeakLoad,
    peak_load,
    size_fleet,
)
from batchrun.simulator.planner.job_forecast import HOUR_S
from batchrun.simulator.planner.kinds import EngineKind, SloTarget
from batchrun.simulator.traces.trace import Trace, stratified_windows
from batchrun.types import ProgressSink


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan for. `window_s` None: by the number of engines (`default_window_s`)."""

    trace: Trace
    kinds: Sequence[EngineKind]
    slo: SloTarget
    jobs: Sequence[OfflineJob] = ()
    peak_s: float = PEAK_S
    most_engines: int = MAX_ENGINES
    num_windows: int = NUM_DAY_WINDOWS
    window_s: float | None = None
    submit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One job co-located with the calls, and alone. Seconds are from when it is submitted.

    `takes_s` is None for a job that never ends; `is_deadline_kept` is None without a deadline.
    `gpu_hours_alone` are those of engines that run nothing else, and `cost_alone` their price;
    co-located it takes no GPU-hour more than the calls do.
    """

    name: str
    num_rows: int
    served_tokens: int
    computed_tokens: int
    takes_s: float | None
    deadline_s: float | None
    is_deadline_kept: bool | None
    gpu_hours_alone: float
    cost_alone: float | None


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Step 1 for each kind, and step 2 on `chosen`. `chosen` is None where nothing holds."""

    request: PlanRequest
    load: PeakLoad
    fleets: tuple[Fleet, ...]
    chosen: Fleet | None
    day: OfflineDay | None
    jobs: tuple[PlannedJob, ...]


def plan_capacity(request: PlanRequest, progress: ProgressSink | None = None) -> CapacityPlan:
    """Both steps. Raises DataError when a row fits no engine, InputError for an empty trace."""
    load = peak_load(request.trace, request.peak_s, request.slo)
    fleets = tuple(
        size_fleet(load, kind, request.slo, request.most_engines, progress)
        for kind in request.kinds
    )
    able = [fleet for fleet in fleets if fleet.num_engines is not None]
    chosen = min(able, key=lambda each: (each.price_per_hour or 0, each.num_engines), default=None)
    if chosen is None or not request.jobs:
        return CapacityPlan(request, load, fleets, chosen, None, ())
    assert chosen.num_engines is not None
    window_s = request.window_s or default_window_s(chosen.num_engines)
    windows = stratified_windows(request.trace, request.num_windows, window_s)
    day = offline_day(request.trace, request.jobs, chosen, request.slo, windows, progress)
    jobs = _jobs(request, chosen.kind, day, progress)
    return CapacityPlan(request, load, fleets, chosen, day, jobs)


def _jobs(
    request: PlanRequest, kind: EngineKind, day: OfflineDay, progress: ProgressSink | None
) -> tuple[PlannedJob, ...]:
    work = [
        JobTokens(served_tokens(job) * share, job.weight)
        for job, share in zip(request.jobs, day.computed_share, strict=True)
    ]
    plans = []
    ends = ends_s(work, day.pace, request.submit_s)
    for number, (job, each, end_s) in enumerate(zip(request.jobs, work, ends, strict=True)):
        if progress is not None:
            progress("jobs alone", number, len(work))
        takes_s = end_s - request.submit_s
        gpu_hours = alone_s(job, each.computed_tokens, kind) / HOUR_S * kind.gpus
        has_deadline = job.deadline_s != math.inf
        plans.append(
            PlannedJob(
                job.name,
                job.num_rows,
                served_tokens(job),
                round(each.computed_tokens),
                takes_s if math.isfinite(takes_s) else None,
                job.deadline_s if has_deadline else None,
                takes_s <= job.deadline_s if has_deadline else None,
                gpu_hours,
                None if kind.price is None else gpu_hours * kind.price,
            )
        )
    return tuple(plans)


def paragraph(plan: CapacityPlan) -> str:
    """What the tables do not say, in a few sentences; why there is no plan, where there is none."""
    if plan.chosen is None:
        return " ".join(no_answer(fleet) for fleet in plan.fleets)
    infeasible = [infeasible_line(each) for each in plan.chosen.infeasible]
    return " ".join([_bounds_kept(plan, plan.chosen), *_job_sentences(plan), *infeasible])


def no_answer(fleet: Fleet) -> str:
    """Why a kind of engine has no answer."""
    name = fleet.kind.name
    if fleet.is_impossible:
        reasons = " ".join(infeasible_line(each) for each in fleet.infeasible if each.is_too_many)
        return f"Impossible on {name}, however many engines: {reasons}"
    last = fleet.tried[-1].num_engines
    return f"{last:,} engines of {name} do not hold; --max-engines sets how many are tried."


def infeasible_line(calls: InfeasibleCalls) -> str:
    """Which calls no engine serves in time, and the heaviest of them."""
    part = share(calls.num_calls / calls.num_judged)
    allowed = "more than" if calls.is_too_many else "which"
    why, took = f"are longer than the context of {calls.context_tokens:,}", ""
    if calls.took_s is not None and calls.bound_s is not None:
        why = f"miss the {calls.bound} of {seconds(calls.bound_s)} on an idle engine"
        took = f", which takes {seconds(calls.took_s)}"
    return (
        f"{calls.num_calls:,} of {calls.num_judged:,} calls ({part}, {allowed} the target allows) "
        f"{why}, such as call {calls.number:,} of the trace with {calls.num_prompt_tokens:,} "
        f"prompt and {calls.num_output_tokens:,} answer tokens{took}."
    )


def _bounds_kept(plan: CapacityPlan, fleet: Fleet) -> str:
    slo, window, num = plan.request.slo, plan.load.window, fleet.num_engines
    assert num is not None
    return (
        f"{count(num, 'engine')} of {fleet.kind.name} ({count(num * fleet.kind.gpus, 'GPU')}) "
        f"{'keeps' if num == 1 else 'keep'} a TTFT of {seconds(slo.ttft_s)} and a TPOT of "
        f"{seconds(slo.tpot_s)} for {slo.target * 100:g} % of the calls in the busiest "
        f"{duration(window.end_s - window.start_s)} of the trace."
    )


def _job_sentences(plan: CapacityPlan) -> Iterator[str]:
    if plan.day is None:
        return
    served = [each.served_tokens_per_s for each in plan.day.windows]
    yield (
        f"Co-located jobs get {sum(served) / len(served):,.0f} tokens/s on average over the trace, "
        f"{min(served):,.0f} in its busiest part."
    )
    for job in plan.jobs:
        if job.takes_s is None:
            yield f"{job.name} never ends: the engines have no time left for it."
        elif job.is_deadline_kept is False:
            late = duration(job.takes_s - (job.deadline_s or 0.0))
            yield f"{job.name} misses its deadline by {late}."


def record_of(plan: CapacityPlan) -> dict[str, object]:
    """One JSON object: seconds, tokens, shares from 0 to 1."""
    slo, day, chosen = plan.request.slo, plan.day, plan.chosen
    costs = [job.cost_alone for job in plan.jobs if job.cost_alone is not None]
    return {
        "promise": asdict(slo),
        "peak": {
            "start_s": plan.load.window.start_s,
            "end_s": plan.load.window.end_s,
            "num_calls": plan.load.num_judged,
        },
        "kinds": [_fleet(fleet, slo) for fleet in plan.fleets],
        "chosen": None
        if chosen is None
        else {
            "name": chosen.kind.name,
            "num_engines": chosen.num_engines,
            "num_gpus": (chosen.num_engines or 0) * chosen.kind.gpus,
            "price_per_hour": chosen.price_per_hour,
        },
        "windows": [] if day is None else [asdict(each) for each in day.windows],
        "jobs": [asdict(job) for job in plan.jobs],
        "gpu_hours_alone": sum(job.gpu_hours_alone for job in plan.jobs) if plan.jobs else None,
        "cost_alone": sum(costs) if costs else None,
        "paragraph": paragraph(plan),
    }


def _fleet(fleet: Fleet, slo: SloTarget) -> dict[str, object]:
    return {
        "name": fleet.kind.name,
        "price_per_gpu_hour": fleet.kind.price,
        "gpus_per_engine": fleet.kind.gpus,
        "num_engines": fleet.num_engines,
        "price_per_hour": fleet.price_per_hour,
        "is_impossible": fleet.is_impossible,
        "why_not": None if fleet.num_engines is not None else no_answer(fleet),
        "tried": [_tried(each, slo) for each in fleet.tried],
        "hopeless_calls": [asdict(each) for each in fleet.infeasible],
    }


def _tried(each: Attainment, slo: SloTarget) -> dict[str, object]:
    return {
        "num_engines": each.num_engines,
        "holds": each.holds(slo),
        "num_calls": each.num_calls,
        "ttft_kept": each.ttft_share,
        "tpot_kept": each.tpot_share,
        "ttft_p99_s": each.ttft_p99_s,
        "tpot_p99_s": each.tpot_p99_s,
    }
