"""The plan: how many engines of which kind, and what jobs get co-located with the calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchrun.simulator.offline_jobs import OfflineJob
from batchrun.simulator.planner.colocation import (
    NUM_DAY_WINDOWS,
    JobWork,
    OfflineDay,
    alone_s,
    default_window_s,
    ends_s,
    offline_day,
    served_tokens,
)
from batchrun.simulator.planner.fleet import MAX_ENGINES, Fleet, cheapest, size_fleet
from batchrun.simulator.planner.kinds import EngineKind
from batchrun.simulator.planner.peak import PEAK_S, PeakLoad, SloTarget, peak_load
from batchrun.simulator.traces.trace import Trace, stratified_windows
from batchrun.types import ProgressSink

HOUR_S = 3600.0


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
class JobPlan:
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
    jobs: tuple[JobPlan, ...]

    @property
    def gpu_hours_alone(self) -> float:
        """Of all jobs on engines of their own."""
        return sum(job.gpu_hours_alone for job in self.jobs)

    @property
    def cost_alone(self) -> float | None:
        """Of all jobs on engines of their own."""
        costs = [job.cost_alone for job in self.jobs if job.cost_alone is not None]
        return sum(costs) if self.jobs and len(costs) == len(self.jobs) else None


def plan_capacity(request: PlanRequest, progress: ProgressSink | None = None) -> CapacityPlan:
    """Both steps. Raises DataError when a row fits no engine, InputError for an empty trace."""
    load = peak_load(request.trace, request.peak_s, request.slo)
    fleets = tuple(
        size_fleet(load, kind, request.slo, request.most_engines, progress)
        for kind in request.kinds
    )
    chosen = cheapest(fleets)
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
) -> tuple[JobPlan, ...]:
    work = [
        JobWork(served_tokens(job) * share, job.weight)
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
            JobPlan(
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
