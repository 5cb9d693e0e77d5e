"""The plan: how many engines of which kind, what jobs get beside the calls, and how it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain

from batchrun.quantities import count, duration, seconds, share
from batchrun.simulator.offline_jobs import OfflineJob
from batchrun.simulator.planner.colocation import (
    NUM_DAY_WINDOWS,
    JobTokens,
    OfflineDay,
    alone_s,
    default_window_s,
    ends_s,
    fitting,
    in_window,
    offline_day,
    served_tokens,
)
from batchrun.simulator.planner.fleet import (
    MAX_ENGINES,
    Attainment,
    Fleet,
    InfeasibleCalls,
    beside_jobs,
    have_room,
    size_fleet,
)
from batchrun.simulator.planner.job_forecast import HOUR_S
from batchrun.simulator.planner.kinds import EngineKind, SloTarget
from batchrun.simulator.planner.peak import PEAK_S, PeakLoad, peak_load
from batchrun.simulator.planner.search import num_simulated
from batchrun.simulator.traces.trace import Trace, redrawn, stratified_windows
from batchrun.types import ProgressSink

NUM_DRAWS = 20
NUM_HARDEST = 4
"""Of the draws other than the trace so many are simulated."""
FEW_MISSES = 5
"""Where fewer calls may miss, whether the target is kept is a matter of chance."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan for. `window_s` None: by the number of engines (`default_window_s`).

    The trace is one draw of its traffic, `redraw` makes the `num_draws` - 1 others, each from a
    seed of its own; None: `redrawn` from the trace.
    """

    trace: Trace
    kinds: Sequence[EngineKind]
    slo: SloTarget
    jobs: Sequence[OfflineJob] = ()
    peak_s: float = PEAK_S
    most_engines: int = MAX_ENGINES
    num_windows: int = NUM_DAY_WINDOWS
    window_s: float | None = None
    submit_s: float = 0.0
    num_draws: int = NUM_DRAWS
    seed: int = 0
    redraw: Callable[[int], Trace] | None = None


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
    """Step 1 for each kind, and step 2 on `chosen`. `chosen` is None where nothing holds.

    `loads` are the peaks of the trace and of the hardest other draws.
    """

    request: PlanRequest
    loads: tuple[PeakLoad, ...]
    fleets: tuple[Fleet, ...]
    chosen: Fleet | None
    day: OfflineDay | None
    jobs: tuple[PlannedJob, ...]


def plan_capacity(request: PlanRequest, progress: ProgressSink | None = None) -> CapacityPlan:
    """Both steps, without rows too long for the engines. Raises InputError for an empty trace."""
    loads = tuple(peak_loads(request))
    fleets = [
        size_fleet(loads, kind, request.slo, request.most_engines, progress)
        for kind in request.kinds
    ]
    chosen = _cheapest(fleets)
    while chosen is not None and request.jobs and chosen.is_beside_kept is None:
        engine = chosen.kind.engine
        jobs = [in_window(fitting(job, engine), 1, 2, engine) for job in request.jobs]
        checked = beside_jobs(chosen, loads, jobs, request.slo, request.most_engines, progress)
        fleets = [checked if fleet is chosen else fleet for fleet in fleets]
        chosen = _cheapest(fleets)
    if chosen is None or not request.jobs:
        return CapacityPlan(request, loads, tuple(fleets), chosen, None, ())
    assert chosen.num_engines is not None
    window_s = request.window_s or default_window_s(chosen.num_engines)
    windows = stratified_windows(request.trace, request.num_windows, window_s)
    able = replace(request, jobs=[fitting(job, chosen.kind.engine) for job in request.jobs])
    day = offline_day(request.trace, able.jobs, chosen, request.slo, windows, progress)
    planned = _jobs(able, chosen.kind, day, progress)
    return CapacityPlan(request, loads, tuple(fleets), chosen, day, planned)


def peak_loads(request: PlanRequest) -> Iterator[PeakLoad]:
    """The peak of the trace, and of the hardest of the other draws that have calls at all."""
    yield peak_load(request.trace, request.peak_s, request.slo)
    others = []
    for draw in range(1, request.num_draws):
        seed = request.seed + draw
        drawn = request.redraw(seed) if request.redraw else redrawn(request.trace, seed)
        if len(drawn):
            others.append(peak_load(drawn, request.peak_s, request.slo, draw))
    yield from hardest(others)


def hardest(loads: Sequence[PeakLoad]) -> list[PeakLoad]:
    """Those with the most tokens in the peak, or in one burst of it, by turns."""
    by_peak = sorted(loads, key=lambda load: -load.num_judged_tokens)
    by_burst = sorted(loads, key=lambda load: -load.num_burst_tokens)
    by_turns = chain.from_iterable(zip(by_peak, by_burst, strict=True))
    return list(dict.fromkeys(by_turns))[:NUM_HARDEST]


def _cheapest(fleets: Sequence[Fleet]) -> Fleet | None:
    able = [fleet for fleet in fleets if fleet.num_engines is not None]
    return min(able, key=lambda each: (each.price_per_hour or 0, each.num_engines), default=None)


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
    sentences = *_bounds_kept(plan, plan.chosen), *_job_sentences(plan), *infeasible
    return " ".join(sentences)


def no_answer(fleet: Fleet) -> str:
    """Why a kind of engine has no answer."""
    name = fleet.kind.name
    if fleet.is_impossible:
        reasons = " ".join(infeasible_line(each) for each in fleet.infeasible if each.is_too_many)
        return f"Impossible on {name}, however many engines: {reasons}"
    last = fleet.tried[-1]
    where = "" if fleet.num_as_given is None else f" on draw {last.draw}"
    return (
        f"{last.num_engines:,} engines of {name} do not hold{where}; --max-engines sets how many "
        "are tried."
    )


def infeasible_line(calls: InfeasibleCalls) -> str:
    """Which calls no engine serves in time, and the heaviest of them."""
    part = share(calls.num_calls / calls.num_judged)
    allowed = f"{'more than' if calls.is_too_many else 'which'} the target allows"
    if calls.num_refused:
        allowed += f" with the {calls.num_refused:,} too long for an engine"
    why, took = f"are longer than the context of {calls.context_tokens:,}", ""
    if calls.took_s is not None and calls.bound_s is not None:
        why = f"miss the {calls.bound} of {seconds(calls.bound_s)} on an idle engine"
        took = f", which takes {seconds(calls.took_s)}"
    return (
        f"{calls.num_calls:,} of {calls.num_judged:,} calls ({part}, {allowed}) {why}, such as "
        f"call {calls.number:,} of the trace with {calls.num_prompt_tokens:,} prompt and "
        f"{calls.num_output_tokens:,} answer tokens{took}."
    )


def _bounds_kept(plan: CapacityPlan, fleet: Fleet) -> Iterator[str]:
    """What the number keeps, on how many draws, beside the jobs or not; and what it costs."""
    slo, window, num = plan.request.slo, plan.loads[0].window, fleet.num_engines
    assert num is not None and fleet.num_for_calls is not None and fleet.num_as_given is not None
    beside = " beside the jobs" if fleet.is_beside_kept else ""
    others = count(plan.request.num_draws - 1, "other draw")
    draws = f" and of the {fleet.num_draws - 1} hardest of {others}" if fleet.num_draws > 1 else ""
    given = fleet.num_as_given
    needs = "" if given == num else f"; as given the trace needs {given:,}"
    yield (
        f"{count(num, 'engine')} of {fleet.kind.name} ({count(num * fleet.kind.gpus, 'GPU')}) "
        f"{'keeps' if num == 1 else 'keep'} a TTFT of {seconds(slo.ttft_s)} and a TPOT of "
        f"{seconds(slo.tpot_s)} for {slo.target * 100:g} % of the calls{beside} in the busiest "
        f"{duration(window.end_s - window.start_s)} of the trace{draws}{needs}."
    )
    yield from _margin(plan, fleet)
    if num_hopeless := len(plan.loads) - fleet.num_draws:
        yield (
            f"On {count(num_hopeless, 'more draw')} too many calls miss a bound on an idle engine."
        )
    if num > fleet.num_for_calls:
        yield f"Without the jobs {count(fleet.num_for_calls, 'engine')} would do."
    if fleet.is_beside_kept is False:
        most = fleet.tried[-1].num_engines
        yield (
            f"Beside the jobs they do not, nor do {most:,}: switch offline work off for the peak "
            "(`batchrun offline off`)."
        )
    if fleet.price_per_hour is not None:
        price = fleet.price_per_hour
        yield f"That costs {price:,.2f} an hour, {24 * price:,.2f} a day."


def _margin(plan: CapacityPlan, fleet: Fleet) -> Iterator[str]:
    """How well the target is kept, and what that says of another draw."""
    slo, num = plan.request.slo, fleet.num_engines
    assert num is not None
    tried = fleet.tried_on(num, has_jobs=bool(fleet.is_beside_kept))
    num_calls = sum(each.num_calls for each in tried)
    missed = max(sum(e.num_ttft_missed for e in tried), sum(e.num_tpot_missed for e in tried))
    more = "with room for chance" if _has_room(fleet, slo) else "another draw may miss the target"
    where = "there" if num_simulated(num) == num else "in the part that was simulated"
    yield f"Of {count(num_calls, 'call')} {where} {missed:,} missed a bound: {more}."
    judged = plan.loads[0].num_judged
    if slo.may_miss(judged) < FEW_MISSES:
        yield (
            f"In a peak of {count(judged, 'call')} {slo.may_miss(judged):,} may miss, so a few "
            "decide: a longer --peak says more."
        )


def _job_sentences(plan: CapacityPlan) -> Iterator[str]:
    if plan.day is None:
        return
    served = [each.served_tokens_per_s for each in plan.day.windows]
    yield (
        f"Co-located jobs get {sum(served) / len(served):,.0f} tokens/s on average over the trace, "
        f"{min(served):,.0f} in its busiest part."
    )
    for given, job in zip(plan.request.jobs, plan.jobs, strict=True):
        if given.answers_source:
            tokens = f"{given.expected_output_tokens:,} tokens a row"
            yield f"The answers of {job.name} have {tokens}, from {given.answers_source}."
        if given.is_estimated:
            yield f"The prompts of {job.name} are estimated at four bytes a token."
        if num_left_out := given.num_rows - job.num_rows:
            yield f"{job.name} runs without {count(num_left_out, 'row')} too long for an engine."
        if job.takes_s is None:
            yield f"{job.name} never ends: the engines have no time left for it."
        elif job.is_deadline_kept is False:
            late = duration(job.takes_s - (job.deadline_s or 0.0))
            yield f"{job.name} misses its deadline by {late}."
    if len(plan.jobs) > 1:
        gpu_hours, cost = _totals(plan)
        paid = "" if cost is None else f", which cost {cost:,.2f}"
        yield f"Alone the {len(plan.jobs)} jobs would take {gpu_hours:,.2f} GPU-hours{paid}."


def _totals(plan: CapacityPlan) -> tuple[float, float | None]:
    """GPU-hours of all jobs alone, and their price."""
    costs = [job.cost_alone for job in plan.jobs if job.cost_alone is not None]
    return sum(job.gpu_hours_alone for job in plan.jobs), sum(costs) if costs else None


def record_of(plan: CapacityPlan) -> dict[str, object]:
    """One JSON object: seconds, tokens, shares from 0 to 1."""
    slo, day, chosen = plan.request.slo, plan.day, plan.chosen
    gpu_hours, cost = _totals(plan) if plan.jobs else (None, None)
    return {
        "promise": asdict(slo),
        "peak": _peak(plan.loads[0]),
        "seed": plan.request.seed,
        "draws": [_peak(load) for load in plan.loads],
        "kinds": [_fleet(fleet, slo) for fleet in plan.fleets],
        "chosen": None
        if chosen is None
        else {
            "name": chosen.kind.name,
            "num_engines": chosen.num_engines,
            "num_engines_for_calls": chosen.num_for_calls,
            "num_engines_as_given": chosen.num_as_given,
            "num_draws": chosen.num_draws,
            "has_room_for_chance": _has_room(chosen, slo),
            "is_kept_beside_jobs": chosen.is_beside_kept,
            "num_gpus": (chosen.num_engines or 0) * chosen.kind.gpus,
            "price_per_hour": chosen.price_per_hour,
        },
        "windows": [] if day is None else [asdict(each) for each in day.windows],
        "jobs": [asdict(job) for job in plan.jobs],
        "gpu_hours_alone": gpu_hours,
        "cost_alone": cost,
        "paragraph": paragraph(plan),
    }


def _has_room(fleet: Fleet, slo: SloTarget) -> bool:
    assert fleet.num_engines is not None
    return have_room(fleet.tried_on(fleet.num_engines, has_jobs=bool(fleet.is_beside_kept)), slo)


def _peak(load: PeakLoad) -> dict[str, object]:
    start_s, end_s = load.window.start_s, load.window.end_s
    return {
        "start_s": start_s,
        "end_s": end_s,
        "num_calls": load.num_judged,
        "calls_per_s": load.num_judged / (end_s - start_s),
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
        "draw": each.draw,
        "has_jobs": each.has_jobs,
        "holds": each.holds(slo),
        "num_calls": each.num_calls,
        "ttft_kept": each.ttft_share,
        "tpot_kept": each.tpot_share,
        "ttft_p99_s": each.ttft_p99_s,
        "tpot_p99_s": each.tpot_p99_s,
    }
