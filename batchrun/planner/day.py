"""Step 2: what a fleet serves offline beside a day of calls, and what jobs take alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchrun.planner.alone import context_tokens
from batchrun.planner.fleet import Fleet
from batchrun.planner.kinds import EngineKind
from batchrun.planner.pace import Pace
from batchrun.planner.places import begun_at, place_of
from batchrun.planner.promise import Promise
from batchrun.simulator import Calls, JobFigures, OfflineJob, Simulated, SimulationPlan, simulate
from batchrun.traces import Trace, Window, stratified_windows
from batchrun.types import ProgressSink
from batchrun.vllm_plugin.virtual import Slo

NUM_DAY_WINDOWS = 24
DAY_WINDOW_S = 300.0
LEAST_DAY_WINDOW_S = 60.0
NUM_ALONE, ALONE_S = 6, 60.0
REACH = 0.5
"""How far from a window's place a job may begin, as a share of the way to the next place."""


@dataclass(frozen=True, slots=True)
class OfflineWindow:
    """What jobs got in one window. Shares are of its calls, beside the jobs; None without calls."""

    start_s: float
    end_s: float
    computed_tokens_per_s: float
    served_tokens_per_s: float
    ttft_kept: float | None
    tpot_kept: float | None


@dataclass(frozen=True, slots=True)
class OfflineDay:
    """The windows, the pace they make, and the computed tokens per served one of each job."""

    windows: tuple[OfflineWindow, ...]
    pace: Pace
    computed_share: tuple[float, ...]


def default_window_s(num_engines: int) -> float:
    """Five minutes of one engine, shared by all: more engines see as many calls in less time."""
    return max(LEAST_DAY_WINDOW_S, DAY_WINDOW_S / num_engines)


def offline_day(
    trace: Trace,
    jobs: Sequence[OfflineJob],
    fleet: Fleet,
    promise: Promise,
    windows: Sequence[Window],
    progress: ProgressSink | None = None,
) -> OfflineDay:
    """Run every window on the fleet with the jobs beside its calls, each from another place of
    their order.

    Calls that fit no engine are left out. Where all rows end within a window, the time until then
    counts.
    """
    engine, num_engines = fleet.kind.engine, fleet.num_engines
    assert num_engines is not None
    fits = trace.take(np.flatnonzero(trace.num_tokens <= context_tokens(engine)))
    runs: list[Simulated] = []
    num = len(windows)
    for number, window in enumerate(windows):
        if progress is not None:
            progress("windows of the day", number, len(windows))
        plan = SimulationPlan(
            window.end_s - window.start_s,
            window.of(fits),
            [begun_at(job, place_of(number, num), REACH / num) for job in jobs],
            num_engines,
            engine,
            Slo(promise.ttft_s, promise.tpot_s),
            seed=number,
        )
        runs.append(simulate(plan))
    shares = tuple(
        _computed_share([job], [run.jobs[i] for run in runs]) for i, job in enumerate(jobs)
    )
    pooled = _computed_share(jobs, [done for run in runs for done in run.jobs])
    found = tuple(_window(w, run, pooled) for w, run in zip(windows, runs, strict=True))
    middles_s = [(each.start_s + each.end_s) / 2 for each in found]
    rates = [each.computed_tokens_per_s for each in found]
    return OfflineDay(found, Pace.through(middles_s, rates, trace.duration_s), shares)


def windows_of_day(trace: Trace, num: int, window_s: float) -> Sequence[Window]:
    """One in the middle of each of `num` equal parts; at most a part long."""
    return stratified_windows(trace, num, window_s)


def alone_s(
    job: OfflineJob, computed_tokens: float, kind: EngineKind, progress: ProgressSink | None = None
) -> float:
    """Seconds that so much work of the job takes on one engine of its own.

    A job that ends within a window takes that long; of a longer one each part has the pace that it
    has when the job begins there.
    """
    seconds_per_token = []
    for number in range(NUM_ALONE):
        if progress is not None:
            progress("the job alone", number, NUM_ALONE)
        begun = begun_at(job, place_of(number, NUM_ALONE), REACH / NUM_ALONE)
        figures = simulate(SimulationPlan(ALONE_S, Calls.of([]), [begun], engine=kind.engine))
        done_s = figures.jobs[0].finished_at_s
        if done_s is not None:
            return done_s
        seconds_per_token.append(1 / max(figures.offline.computed_tokens_per_s, 1e-9))
    return computed_tokens * float(np.mean(seconds_per_token))


def served_tokens(job: OfflineJob) -> int:
    """Prompt and answer tokens of the rows that can run, cached ones included."""
    return int((job.num_prompt_tokens + job.num_output_tokens)[job.order.rows].sum())


def _computed_share(jobs: Sequence[OfflineJob], done: Sequence[JobFigures]) -> float:
    """Computed over served tokens of the whole jobs: as the planned order has it, corrected by what
    the rows that ended computed."""
    planned = sum(int(job.expected_tokens()[job.order.rows].sum()) for job in jobs)
    share = planned / max(1, sum(served_tokens(job) for job in jobs))
    expected = sum(each.expected_tokens for each in done)
    return share * sum(each.computed_tokens for each in done) / expected if expected else share


def _window(window: Window, run: Simulated, computed_share: float) -> OfflineWindow:
    ends = [job.finished_at_s for job in run.jobs]
    all_done_s = max((end for end in ends if end is not None), default=math.inf)
    busy_s = min(run.duration_s, all_done_s) if None not in ends else run.duration_s
    rate = run.offline.computed_tokens_per_s * run.duration_s / busy_s
    return OfflineWindow(
        window.start_s,
        window.end_s,
        rate,
        rate / computed_share,
        run.online.ttft_kept,
        run.online.tpot_kept,
    )
