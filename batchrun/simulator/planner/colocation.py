"""Step 2: what jobs get co-located with a day of calls, when they end, and what they take alone.

Windows stand for the whole day. In each of them jobs begin at another offset of their order, since
the order begins with what serves most for its work, and its beginning is not like the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from batchrun.pool.radix_tree import PrefixOrder
from batchrun.simulator.offline_jobs import OfflineJob, without_rows
from batchrun.simulator.online import Calls
from batchrun.simulator.planner.fleet import Fleet, context_tokens
from batchrun.simulator.planner.kinds import EngineKind
from batchrun.simulator.planner.peak import SloTarget
from batchrun.simulator.records import Slo
from batchrun.simulator.simulation import JobFigures, Simulated, SimulationPlan, simulate
from batchrun.simulator.traces.trace import Trace, TraceWindow, stratified_windows
from batchrun.types import ProgressSink

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenCurve:
    """Tokens done by each of `at_s`, which run from 0 to the length of the day; linear between.

    After the day it begins again.
    """

    at_s: Floats
    done_tokens: Floats

    @classmethod
    def through(
        cls, middles_s: Sequence[float], tokens_per_s: Sequence[float], day_s: float
    ) -> TokenCurve:
        """Straight lines through the rates at the middles of windows, the last joined to the first.

        `middles_s` rise within [0, `day_s`].
        """
        at_s = np.linspace(0.0, day_s, 1_441)
        rates = np.interp(at_s, middles_s, tokens_per_s, period=day_s)
        steps = (rates[1:] + rates[:-1]) / 2 * np.diff(at_s)
        return cls(at_s, np.concatenate([[0.0], np.cumsum(steps)]))

    @property
    def day_s(self) -> float:
        """The length of the day."""
        return float(self.at_s[-1])

    @property
    def tokens_per_s(self) -> float:
        """On average over the day."""
        return float(self.done_tokens[-1]) / self.day_s

    def done_by(self, at_s: float) -> float:
        """Tokens done in [0, `at_s`)."""
        days, rest_s = divmod(at_s, self.day_s)
        return days * float(self.done_tokens[-1]) + float(
            np.interp(rest_s, self.at_s, self.done_tokens)
        )

    def reached_at_s(self, from_s: float, tokens: float) -> float:
        """When so many tokens are done that begin at `from_s`; infinity where none ever are."""
        whole = float(self.done_tokens[-1])
        if whole <= 0:
            return np.inf if tokens > 0 else from_s
        days, rest = divmod(self.done_by(from_s) + tokens, whole)
        return days * self.day_s + float(np.interp(rest, self.done_tokens, self.at_s))


@dataclass(frozen=True, slots=True)
class JobTokens:
    """Tokens that a job has to compute, and its weight among others."""

    computed_tokens: float
    weight: float = 1.0


def ends_s(work: Sequence[JobTokens], pace: TokenCurve, submit_s: float = 0.0) -> list[float]:
    """When each job ends, on the pace's clock; all are submitted at `submit_s`.

    Jobs that run get the pace by their weights, as the daemon's turns give it in computed tokens;
    what a deadline presses the daemon takes earlier, which is not counted here. Infinity for a job
    that never ends.
    """
    ends = [submit_s] * len(work)
    left = {i: each.computed_tokens for i, each in enumerate(work)}
    now_s = submit_s
    while left:
        weights = sum(work[i].weight for i in left)
        first = min(left, key=lambda i: left[i] / work[i].weight)
        per_weight = left[first] / work[first].weight
        now_s = max(now_s, pace.reached_at_s(now_s, per_weight * weights))
        left = {i: rest - per_weight * work[i].weight for i, rest in left.items()}
        for i in [i for i, rest in left.items() if i == first or rest <= 0]:
            ends[i] = now_s
            del left[i]
    return ends


GOLDEN = (math.sqrt(5) - 1) / 2


def sample_offset(number: int, num: int) -> float:
    """A share of the order for each of `num` windows: evenly spread, and no neighbours for
    neighbours, since hours and offsets must not be confounded."""
    step = max(1, round(GOLDEN * num))
    while math.gcd(step, num) != 1:
        step += 1
    return number * step % num / num


def begun_at(job: OfflineJob, offset: float, reach: float) -> OfflineJob:
    """The job as if it began at the share `offset` of its order, and what was before came last.

    It begins with the row within `reach` of the order that shares least with the one before it.
    Nothing presses it, and it is there from the start.
    """
    shared, num = job.order.shared_chunks, job.num_rows
    start = int(offset * num)
    end = min(num, max(start + 1, int((offset + reach) * num)))
    first = start + int(np.argmin(shared[start:end])) if num else 0
    now_shared = np.roll(shared, -first)
    now_shared[:1] = 0
    order = PrefixOrder(np.roll(job.order.rows, -first), now_shared, job.order.by_chain)
    return replace(job, order=order, submit_s=0.0, deadline_s=math.inf)


NUM_DAY_WINDOWS = 24
DAY_WINDOW_S = 300.0
LEAST_DAY_WINDOW_S = 60.0
NUM_ALONE, ALONE_S = 6, 60.0
REACH = 0.5
"""How far from a window's offset a job may begin, as a share of the way to the next offset."""


@dataclass(frozen=True, slots=True)
class OfflineWindow:
    """What jobs got in one window. Shares are of the calls beside them; None without calls."""

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
    pace: TokenCurve
    computed_share: tuple[float, ...]


def default_window_s(num_engines: int) -> float:
    """Five minutes of one engine, shared by all: more engines see as many calls in less time."""
    return max(LEAST_DAY_WINDOW_S, DAY_WINDOW_S / num_engines)


def offline_day(
    trace: Trace,
    jobs: Sequence[OfflineJob],
    fleet: Fleet,
    slo: SloTarget,
    windows: Sequence[TraceWindow],
    progress: ProgressSink | None = None,
) -> OfflineDay:
    """Run every window on the fleet with the jobs, each from another offset of their order.

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
            [begun_at(job, sample_offset(number, num), REACH / num) for job in jobs],
            num_engines,
            engine,
            Slo(slo.ttft_s, slo.tpot_s),
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
    return OfflineDay(found, TokenCurve.through(middles_s, rates, trace.duration_s), shares)


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
        begun = begun_at(job, sample_offset(number, NUM_ALONE), REACH / NUM_ALONE)
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


def _window(window: TraceWindow, run: Simulated, computed_share: float) -> OfflineWindow:
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


NUM_WINDOWS = 6
WINDOW_S = 60.0
"""Of one engine, shared by all as in `default_window_s`; half a minute of computing in all."""
LEAST_WINDOW_S = 20.0
NUM_STARTS = 48


@dataclass(frozen=True, slots=True)
class ColocatedTimes:
    """Seconds from a job's submission to its end: the median, the least and the most over
    `NUM_STARTS` times of the trace, evenly spread. Infinity where it never ends.

    The range is that of the load over the trace; the simulation's own error is not in it.
    """

    median_s: float
    least_s: float
    most_s: float
    computed_tokens_per_s: float


def fitting(job: OfflineJob, kind: EngineKind) -> OfflineJob:
    """The job without the rows that are longer than an engine's context: engines refuse them."""
    tokens = job.num_prompt_tokens + job.num_output_tokens
    return without_rows(job, np.flatnonzero(tokens > context_tokens(kind.engine)))


def colocated_times(
    trace: Trace,
    job: OfflineJob,
    computed_tokens: float,
    fleet: Fleet,
    slo: SloTarget,
    progress: ProgressSink,
) -> ColocatedTimes:
    """Simulate a few short windows of the trace with the job co-located, and no other.

    `computed_tokens` is the work of the whole job. Raises InputError for a trace without a length.
    """
    window_s = max(LEAST_WINDOW_S, WINDOW_S / (fleet.num_engines or 1))
    windows = stratified_windows(trace, NUM_WINDOWS, window_s)
    pace = offline_day(trace, [job], fleet, slo, windows, progress).pace
    work = JobTokens(computed_tokens, job.weight)
    takes_s = [
        ends_s([work], pace, start_s)[0] - start_s
        for start_s in np.linspace(0.0, trace.duration_s, NUM_STARTS, endpoint=False).tolist()
    ]
    return ColocatedTimes(median(takes_s), min(takes_s), max(takes_s), pace.tokens_per_s)
