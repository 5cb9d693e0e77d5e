"""Step 2: what jobs get co-located with a day of calls, when they end, and what they take alone.

Windows stand for the whole day. In each of them jobs begin at another offset of their order, since
the order begins with what serves most for its work, and its beginning is not like the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from batchrun.config import STOCK_POLICY, Deployment, SloConfig
from batchrun.daemon.plugin import OTHER_SETTINGS, existing_profile, online_slo
from batchrun.engine_config import EngineConfig
from batchrun.errors import InputError
from batchrun.home import Home
from batchrun.jobs.expected_answers import OutputEstimate
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.study import KvSize
from batchrun.jobs.submit import JobPlan
from batchrun.pool.radix_tree import PrefixOrder
from batchrun.quantities import count, duration
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import JobTerms, OfflineJob, job_of_plan, without_rows
from batchrun.simulator.online import Calls
from batchrun.simulator.planner.fleet import Fleet, context_tokens
from batchrun.simulator.planner.job_forecast import HOUR_S, EngineTime, Eta, Forecast, Price
from batchrun.simulator.planner.kinds import EngineKind, SloTarget, kind_of_profile, parse_kind
from batchrun.simulator.planner.peak import choose_part
from batchrun.simulator.planner.search import num_simulated
from batchrun.simulator.records import Slo
from batchrun.simulator.simulation import JobFigures, Simulated, SimulationPlan, simulate
from batchrun.simulator.traces.reading import read_trace
from batchrun.simulator.traces.trace import Floats, Trace, TraceWindow, stratified_windows
from batchrun.types import ProgressSink


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


def fitting(job: OfflineJob, engine: EnginePlan) -> OfflineJob:
    """The job without the rows that the engine refuses: they are longer than its context."""
    num_tokens = job.num_prompt_tokens + job.num_output_tokens
    return without_rows(job, np.flatnonzero(num_tokens > context_tokens(engine)))


def in_window(job: OfflineJob, number: int, num: int, engine: EnginePlan) -> OfflineJob:
    """The job as it runs in window `number` of `num`; rows name no `max_tokens`."""
    begun = begun_at(job, sample_offset(number, num), REACH / num)
    return replace(begun, context_tokens=engine.shape.max_model_len)


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
    """Run every window on the fleet, or on a part of a large one, with the jobs, each from another
    offset of their order.

    Calls that fit no engine are left out. Where all rows end within a window, the time until then
    counts.
    """
    engine = fleet.kind.engine
    assert fleet.num_engines is not None
    is_part = trace.prefix is None
    num_engines = num_simulated(fleet.num_engines) if is_part else fleet.num_engines
    scale = fleet.num_engines / num_engines
    fits = trace.take(np.flatnonzero(trace.num_tokens <= context_tokens(engine)))
    runs: list[Simulated] = []
    num = len(windows)
    for number, window in enumerate(windows):
        if progress is not None:
            progress("windows of the day", number, len(windows))
        calls = window.of(fits)
        plan = SimulationPlan(
            window.end_s - window.start_s,
            calls.take(choose_part(len(calls), 1 / scale, number)),
            [in_window(job, number, num, engine) for job in jobs],
            num_engines,
            engine,
            Slo(slo.ttft_s, slo.tpot_s),
            seed=number,
            router=fleet.kind.router,
        )
        runs.append(simulate(plan))
    shares = tuple(
        _computed_share([job], [run.jobs[i] for run in runs]) for i, job in enumerate(jobs)
    )
    pooled = _computed_share(jobs, [done for run in runs for done in run.jobs])
    found = tuple(_window(w, run, pooled, scale) for w, run in zip(windows, runs, strict=True))
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
        begun = in_window(job, number, NUM_ALONE, kind.engine)
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


def _window(
    window: TraceWindow, run: Simulated, computed_share: float, scale: float
) -> OfflineWindow:
    """`scale`: the fleet's engines over those that were simulated."""
    ends = [job.finished_at_s for job in run.jobs]
    all_done_s = max((end for end in ends if end is not None), default=math.inf)
    busy_s = min(run.duration_s, all_done_s) if None not in ends else run.duration_s
    rate = scale * run.offline.computed_tokens_per_s * run.duration_s / busy_s
    return OfflineWindow(
        window.start_s,
        window.end_s,
        rate,
        rate / computed_share,
        run.online.ttft_kept,
        run.online.tpot_kept,
    )


CONTEXT_TOKENS = 131_072
"""Of a simulated engine: so long that rows are left out for their KV and nothing else."""
NUM_WINDOWS = 6
WINDOW_S = 60.0
"""Of one engine, shared by all: half a minute of computing for all windows."""
LEAST_WINDOW_S = 20.0
NUM_STARTS = 48
"""Times of the trace, evenly spread, at which the job is taken to be submitted."""
NOT_COUNTED = ("late_calls", "slo_classes", "window")
"""Keys of batchrun.yaml that a simulation leaves out."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Engines of the deployment as they are simulated, and the calls beside a job, if any.

    `not_counted` are the keys of the deployment that are left out.
    """

    kind: EngineKind
    num_engines: int
    slo: SloTarget
    trace: Trace | None
    trace_name: str
    not_counted: Sequence[str] = ()

    @property
    def price(self) -> Price:
        """As `--profile` names it."""
        return Price(self.kind.price, self.kind.gpus)

    @property
    def kv(self) -> KvSize:
        """The KV of one simulated engine."""
        shape, source = self.kind.engine.shape, f"--profile {self.kind.name}"
        tokens = shape.num_blocks * shape.block_tokens
        return KvSize(tokens, source, shape.block_tokens, source, tokens)

    def job(self, spec: JobSpec, plan: JobPlan, outputs: OutputEstimate) -> OfflineJob:
        """The rows that a simulated engine can run."""
        return fitting(job_of_plan(spec, plan, JobTerms(), outputs), self.kind.engine)

    def forecast(
        self, job: OfflineJob, computed_tokens: int, measured: Eta, progress: ProgressSink
    ) -> Forecast:
        """The ETA beside the trace's calls, or the measured one without a trace; and the time on
        one engine of its own."""
        eta = measured
        if self.trace is not None:
            eta = self._eta(job, computed_tokens, self.trace, progress)
        hours = alone_s(job, computed_tokens, self.kind, progress) / HOUR_S
        source = f"simulated on one engine of {self.kind.name}"
        if num_left_out := len(job.num_prompt_tokens) - job.num_rows:
            source += f", without {count(num_left_out, 'row')} that it cannot run"
        return Forecast(eta, EngineTime(hours, "simulation", source))

    def _eta(
        self, job: OfflineJob, computed_tokens: int, trace: Trace, progress: ProgressSink
    ) -> Eta:
        """By a few short windows of the trace with the job co-located, and no other.

        The median, the least and the most over `NUM_STARTS`: the range is that of the load over the
        trace; the simulation's own error is not in it.
        """
        fleet = Fleet(self.kind, self.num_engines)
        window_s = max(LEAST_WINDOW_S, WINDOW_S / self.num_engines)
        windows = stratified_windows(trace, NUM_WINDOWS, window_s)
        pace = offline_day(trace, [job], fleet, self.slo, windows, progress).pace
        work = JobTokens(computed_tokens, job.weight)
        starts_s = np.linspace(0.0, trace.duration_s, NUM_STARTS, endpoint=False).tolist()
        takes_s = [ends_s([work], pace, start_s)[0] - start_s for start_s in starts_s]
        engines = f"{count(self.num_engines, 'engine')} of {self.kind.name}"
        rests_on = f"beside the calls of {self.trace_name} {engines} have no time left for it"
        if math.isfinite(median(takes_s)):
            rests_on = (
                f"{pace.tokens_per_s:,.0f} computed tokens/s, simulated beside the "
                f"{duration(trace.duration_s)} of {self.trace_name} on {engines}, with no other job"
            )
        if self.not_counted:
            rests_on += f"; not counted: {', '.join(self.not_counted)}"
        return Eta(median(takes_s), min(takes_s), max(takes_s), "simulation", rests_on)


def simulation_of(
    trace: Path | None, profile: str | None, deployment: Deployment, home: Home, model: str
) -> SimulatedFleet | None:
    """What `--trace` and `--profile` ask for, on the engines of the model; the profile of the first
    of them where none is named, None where that has none.

    Raises InputError and ConfigError, one line, where something cannot be used.
    """
    path, engines = None, deployment.serving(model).engines
    if profile is None:
        path = existing_profile(deployment, engines[0], home)
        if path is None:
            return None
    online = online_slo(deployment, home)
    slo = SloTarget(online.ttft_s, online.tpot_s)
    if path is not None:
        kind = kind_of_profile(path, slo)
    else:
        assert profile is not None
        kind = parse_kind(profile, slo, Path.cwd())
    calls = None if trace is None else read_trace(trace)
    if calls is not None and not calls.duration_s:
        raise InputError(f"--trace {trace}: has no calls")
    kind = _as_deployed(kind.with_context(CONTEXT_TOKENS), deployment, engines[0], online)
    num_engines = sum(1 if each.ray is None else each.ray.replicas.min for each in engines)
    not_counted = [key for key in NOT_COUNTED if key in deployment.model_fields_set]
    if profile is not None and any(each.vllm_args for each in engines):
        not_counted.append("vllm_args")
    name = "" if trace is None else trace.name
    return SimulatedFleet(kind, num_engines, slo, calls, name, not_counted)


def _as_deployed(
    kind: EngineKind, deployment: Deployment, config: EngineConfig, slo: SloConfig
) -> EngineKind:
    """With the router and the scheduler that an engine of the deployment has."""
    runs_scheduler = deployment.runs_scheduler and (
        config.may_be_calibrated or config.agent is not None
    )
    settings = deployment.model_dump(include=OTHER_SETTINGS, exclude_unset=True)
    return kind.with_router(deployment.router).with_scheduler(
        deployment.policy if runs_scheduler else STOCK_POLICY,
        settings | {"slo": slo.model_dump(exclude_none=True)},
        "priority" if runs_scheduler or config.uses_priority else "fcfs",
    )
