"""A scenario file: strict YAML, every problem with file, line and key, and what it means.

The traces, jobs and profiles that it names are read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from batchrun.cache.eviction import EVICTIONS
from batchrun.config import STOCK_POLICY, OnlineCostFactor, Reserve
from batchrun.daemon.plugin import read_profile
from batchrun.errors import ConfigError, DataError, known_name
from batchrun.estimator.forecast import ForecastRule
from batchrun.estimator.profile import CalibrationProfile
from batchrun.files import absolute
from batchrun.jobs.spec import Weight
from batchrun.pool.prefix_keys import IntArray
from batchrun.quantities import parse_duration_s
from batchrun.routing.routers import DEFAULT_ROUTER, ROUTERS
from batchrun.scheduling.policies import POLICIES
from batchrun.simulator.cluster import EnginePlan, FrontEndTimes
from batchrun.simulator.offline_jobs import (
    JobShape,
    JobTerms,
    LogNormalTokens,
    OfflineJob,
    job_of_file,
    job_of_shape,
)
from batchrun.simulator.online import Calls, CallTrace, OnlineTraffic, windows_of
from batchrun.simulator.records import Slo
from batchrun.simulator.simulation import SimulationPlan
from batchrun.simulator.traces.reading import Drawing, read_trace
from batchrun.simulator.virtual.engine import Timing
from batchrun.simulator.virtual.setup import EngineShape, ModelLaw
from batchrun.strict import Strict, read_document, validate_document

REFERENCE = "a100-8b"
"""Llama-3.1-8B in bf16 on an A100-40GB, by its data sheet: steps without a profile."""

PolicyName = Annotated[str, AfterValidator(partial(known_name, known=(STOCK_POLICY, *POLICIES)))]
RouterName = Annotated[str, AfterValidator(partial(known_name, known=ROUTERS))]
EvictionName = Annotated[str, AfterValidator(partial(known_name, known=EVICTIONS))]
RuleName = Annotated[str, AfterValidator(partial(known_name, known=[*ForecastRule]))]
Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Seconds = Annotated[float, BeforeValidator(parse_duration_s)]
Count = Annotated[int, Field(ge=1, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1)]


def _ordered(pair: tuple[int, int]) -> tuple[int, int]:
    if pair[0] > pair[1]:
        raise ValueError(f"the first bound is above the second ({pair[0]} > {pair[1]})")
    return pair


Pair = Annotated[tuple[Count, Count], AfterValidator(_ordered)]


MAX_ENGINES = 1024


class _Strict(Strict):
    model_config = ConfigDict(allow_inf_nan=False)


class EnginesSpec(_Strict):
    """Engines that are alike. `steps`: a profile of `batchrun calibrate`, or `a100-8b`.

    `kv_blocks`, `block_tokens`, `token_budget` and `max_num_seqs` are the profile's unless given;
    else 8,600 blocks of 16 tokens, 2,048 and 256.
    `eviction`, `reserve`, `forecast_rule` and `online_cost` are those of batchrun.yaml.
    `steps_in_flight`: 2 where vLLM schedules a step ahead, as on a GPU, 1 on a CPU; None: what
    the profile was measured with, 2 without one.
    """

    count: Annotated[Count, Field(le=MAX_ENGINES)] = 1
    steps: Text = REFERENCE
    policy: PolicyName = "echo"
    eviction: EvictionName = "next-use"
    reserve: Reserve = "forecast"
    forecast_rule: RuleName = "growth"
    online_cost: OnlineCostFactor | None = None
    kv_blocks: Annotated[int, Field(ge=2, le=100_000_000, strict=True)] | None = None
    block_tokens: Annotated[Count, Field(le=4096)] | None = None
    token_budget: Annotated[Count, Field(le=1_000_000)] | None = None
    max_num_seqs: Annotated[Count, Field(le=100_000)] | None = None
    steps_in_flight: Literal[1, 2] | None = None
    max_model_len: Annotated[int, Field(ge=2, le=131_072, strict=True)] = 32_768


def _not_empty(kinds: tuple[EnginesSpec, ...]) -> tuple[EnginesSpec, ...]:
    if not kinds:
        raise ValueError("must not be empty")
    return kinds


EngineKinds = Annotated[
    Annotated[EnginesSpec, Tag("alike")]
    | Annotated[tuple[EnginesSpec, ...], AfterValidator(_not_empty), Tag("kinds")],
    Discriminator(lambda value: "kinds" if isinstance(value, list | tuple) else "alike"),
]

SCHEDULER_KEYS = {"eviction", "reserve", "forecast_rule", "online_cost"}
"""Those that reach the scheduler as they are."""


class SloSpec(_Strict):
    """The SLOs of online calls."""

    ttft: Seconds = 1.0
    tpot: Seconds = 0.05


class LengthSpec(_Strict):
    """Log-normal lengths around `median`, within `least` and `most`."""

    median: Annotated[float, Field(gt=0)]
    sigma: Annotated[float, Field(ge=0, le=5)]
    least: Count = 1
    most: Count

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> LengthSpec:
        if self.least > self.most:
            raise ValueError(f"least is above most ({self.least} > {self.most})")
        return self


class GeneratorSpec(_Strict):
    """Poisson arrivals: `rate` a second, swinging by the share `swing` once every `swing_period`,
    and `burst_factor` times as many in the first `burst_length` of every `burst_period`."""

    rate: Annotated[float, Field(gt=0, le=100_000)]
    swing: Share = 0.0
    swing_period: Seconds = 86_400.0
    burst_factor: Annotated[float, Field(ge=1, le=1000)] = 1.0
    burst_length: Seconds = 8.0
    burst_period: Seconds = 90.0
    prompt_tokens: LengthSpec = LengthSpec(median=200, sigma=1.0, least=8, most=2000)
    output_tokens: LengthSpec = LengthSpec(median=148, sigma=0.8, least=4, most=800)

    @model_validator(mode="after")
    def _a_burst_ends(self) -> GeneratorSpec:
        if self.burst_length > self.burst_period:
            raise ValueError("burst_length is more than burst_period")
        return self


class OnlineSpec(_Strict):
    """The online calls: a `trace` file, or a `generator`."""

    trace: Text | None = None
    generator: GeneratorSpec | None = None


class WindowsSpec(_Strict):
    """Run the duration in short: `count` windows of this length, one from each part of it."""

    count: Annotated[Count, Field(le=10_000)]
    length: Seconds = 300.0


class ShapeSpec(_Strict):
    """Questions about documents; each pair is the bounds of a uniform draw."""

    documents: Annotated[Count, Field(le=1_000_000)]
    document_tokens: Pair
    questions: Pair = (1, 1)
    question_tokens: Pair = (15, 60)
    output_tokens: Pair = (4, 32)


class SimulatedJob(_Strict):
    """A job: a job `file`, or a `shape`. `after`: when it is submitted, in simulated time.

    `weight` and `deadline` are the file's unless given. `output_tokens` are bounds of the answers
    of a file's rows; without them every answer has the length that the daemon expects.
    """

    name: Text | None = None
    file: Text | None = None
    shape: ShapeSpec | None = None
    after: Annotated[float, Field(ge=0)] | Seconds = 0.0
    weight: Weight | None = None
    deadline: Seconds | None = None
    output_tokens: Pair | None = None


class ScenarioFile(_Strict):
    """The keys of a scenario file; durations as in job files (`90s`, `10m`, `24h`)."""

    name: Text
    duration: Seconds
    seed: Annotated[int, Field(ge=0, le=2**31, strict=True)] = 0
    engines: EngineKinds = EnginesSpec()
    slo: SloSpec = SloSpec()
    online: OnlineSpec | None = None
    windows: WindowsSpec | None = None
    router: RouterName = DEFAULT_ROUTER
    jobs: tuple[SimulatedJob, ...] = ()

    @property
    def simulated_s(self) -> float:
        """What of the duration is simulated: all of it, or its windows."""
        windows = self.windows
        return self.duration if windows is None else windows.count * windows.length

    @property
    def kinds(self) -> tuple[EnginesSpec, ...]:
        """Of engines, one at least."""
        return self.engines if isinstance(self.engines, tuple) else (self.engines,)


def load_scenario(path: Path) -> ScenarioFile:
    """Reads a scenario file. Raises ConfigError with one line: file, line, key, what is wrong."""
    document = read_document(path, ConfigError)
    scenario = validate_document(document, ScenarioFile, ConfigError)
    for key, text in _problems(scenario):
        raise ConfigError(f"{document.where(key)}: {text}")
    return scenario


def _problems(scenario: ScenarioFile) -> Iterator[tuple[str, str]]:
    num_engines = sum(kind.count for kind in scenario.kinds)
    if num_engines > MAX_ENGINES:
        yield "engines", f"{num_engines:,} in all, more than {MAX_ENGINES:,}"
    online = scenario.online
    if online is not None and (online.trace is None) == (online.generator is None):
        yield "online", "needs one of 'trace' and 'generator'"
    if online is None and not scenario.jobs:
        yield "", "nothing to simulate: give 'online', 'jobs' or both"
    if scenario.simulated_s > scenario.duration:
        yield "windows", "its windows are longer than the duration together"
    for index, job in enumerate(scenario.jobs):
        key = f"jobs[{index}]"
        if (job.file is None) == (job.shape is None):
            yield key, "needs one of 'file' and 'shape'"
        if job.shape is not None and job.output_tokens is not None:
            yield f"{key}.output_tokens", "is for a job file; a shape has its own"
        if job.after >= scenario.simulated_s:
            yield f"{key}.after", f"must be less than the {scenario.simulated_s:g} s simulated"


def plan_of(scenario: ScenarioFile, base: Path) -> SimulationPlan:
    """What the file means, its engines kind after kind; paths in it are relative to `base`.

    Raises DataError, JobSpecError or ConfigError, one line, when a file in it cannot be used.
    """
    calls = _calls(scenario, base)
    windows = scenario.windows
    if windows is not None:
        calls = windows_of(calls, scenario.duration, windows.count, windows.length, scenario.seed)
    kinds = [engine_of(kind, scenario.slo, base) for kind in scenario.kinds]
    counts = [kind.count for kind in scenario.kinds]
    engines = [plan for plan, num in zip(kinds, counts, strict=True) for _ in range(num)]
    return SimulationPlan(
        scenario.simulated_s,
        calls,
        [_job(job, index, scenario.seed, base) for index, job in enumerate(scenario.jobs)],
        len(engines),
        engines[0],
        Slo(scenario.slo.ttft, scenario.slo.tpot),
        scenario.seed,
        router=scenario.router,
        engines=engines,
    )


LEAST_SHARE = 0.99
"""A trace of a day ends a little before the day does."""


def _calls(scenario: ScenarioFile, base: Path) -> CallTrace:
    online = scenario.online
    if online is None:
        return Calls.of([])
    if online.trace is not None:
        drawing = Drawing(scenario.seed, to_s=scenario.duration)
        trace = read_trace(Path(absolute(base, online.trace)), drawing=drawing)
        if trace.duration_s < LEAST_SHARE * scenario.duration:
            raise DataError(
                f"{online.trace}: lasts {trace.duration_s:,.6g} s, less than the duration of the "
                f"scenario, {scenario.duration:,.6g} s"
            )
        return trace.between(0, min(scenario.duration, trace.duration_s))
    assert online.generator is not None
    return Calls.of(_traffic(online.generator).draw(scenario.duration, scenario.seed))


def _traffic(spec: GeneratorSpec) -> OnlineTraffic:
    return OnlineTraffic(
        rate_per_s=spec.rate,
        burst_factor=spec.burst_factor,
        burst_length_s=spec.burst_length,
        burst_period_s=spec.burst_period,
        prompt=_lengths(spec.prompt_tokens),
        output=_lengths(spec.output_tokens),
        swing=spec.swing,
        swing_s=spec.swing_period / math.tau,
    )


def _lengths(spec: LengthSpec) -> LogNormalTokens:
    return LogNormalTokens(math.log(spec.median), spec.sigma, (spec.least, spec.most))


def _job(spec: SimulatedJob, index: int, seed: int, base: Path) -> OfflineJob:
    deadline_s = math.inf if spec.deadline is None else spec.after + spec.deadline
    if spec.shape is not None:
        given = spec.shape
        shape = JobShape(
            given.documents,
            given.document_tokens,
            given.questions,
            given.question_tokens,
            given.output_tokens,
        )
        terms = JobTerms(spec.weight or 1.0, spec.after, deadline_s)
        return job_of_shape(spec.name or f"job {index + 1}", shape, seed + index, terms)
    assert spec.file is not None
    bounds = spec.output_tokens

    def draw(num_rows: int) -> IntArray:
        assert bounds is not None
        rng = np.random.default_rng([seed, index])
        return rng.integers(bounds[0], bounds[1], num_rows, endpoint=True)

    return job_of_file(
        Path(absolute(base, spec.file)),
        JobTerms(spec.weight, spec.after, deadline_s),
        draw_output_tokens=None if bounds is None else draw,
        name=spec.name,
    )


def engine_of(spec: EnginesSpec, slo: SloSpec, base: Path) -> EnginePlan:
    """An engine as described; a profile's path is relative to `base`.

    Raises DataError or ConfigError, one line, when the profile cannot be used.
    """
    profile = None if spec.steps == REFERENCE else read_profile(Path(absolute(base, spec.steps)))
    defaults = EngineShape()
    blocks, tokens = defaults.num_blocks, defaults.block_tokens
    budget, max_running = defaults.token_budget, defaults.max_num_seqs
    steps_in_flight = 2
    if profile is not None:
        steps_in_flight = 2 if profile.gap is None else 1
        blocks, tokens = profile.kv_blocks, profile.engine.block_tokens
        budget, max_running = profile.token_budget or budget, profile.max_running or max_running
    budget = spec.token_budget or budget
    shape = EngineShape(
        num_blocks=spec.kv_blocks or blocks,
        token_budget=budget,
        max_num_seqs=min(spec.max_num_seqs or max_running, budget),
        block_tokens=spec.block_tokens or tokens,
        max_model_len=spec.max_model_len,
    )
    plan = EnginePlan(
        shape,
        spec.policy,
        settings={
            "slo": {"ttft_s": slo.ttft, "tpot_s": slo.tpot},
            **spec.model_dump(include=SCHEDULER_KEYS),
        },
        timing=Timing(steps_in_flight=spec.steps_in_flight or steps_in_flight),
    )
    if profile is None:
        return plan
    return calibrated(plan, profile)


def calibrated(plan: EnginePlan, profile: CalibrationProfile) -> EnginePlan:
    """The plan with steps that take as long as the profile says, the gaps between them, and what
    requests take before them.

    Gaps count for engines with one step in flight; a step ahead hides them.
    """
    timing, gap, front_end = plan.timing, profile.gap, plan.front_end
    if gap is not None and timing.steps_in_flight == 1:
        timing = replace(timing, planning_s=gap.base_s, request_s=gap.request_s)
    if profile.online is not None and (outside_s := profile.online.outside_s) is not None:
        front_end = replace(front_end or FrontEndTimes(), latency_s=outside_s)
    law = ModelLaw(profile.models[0])
    return replace(plan, law=law, believed=profile.models, timing=timing, front_end=front_end)
