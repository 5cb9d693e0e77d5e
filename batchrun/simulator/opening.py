"""From a scenario file to what is simulated: traces, jobs and profiles are read here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchrun.errors import DataError
from batchrun.estimator import CalibrationProfile, profile_from_json
from batchrun.pool import IntArray
from batchrun.simulator.engines import EnginePlan, ModelLaw
from batchrun.simulator.offline_jobs import JobTerms, OfflineJob, job_of_file, job_of_shape
from batchrun.simulator.online import Calls, CallTrace, windows_of
from batchrun.simulator.scenario_file import (
    REFERENCE,
    EnginesSpec,
    GeneratorSpec,
    LengthSpec,
    ScenarioFile,
    SimulatedJob,
    SloSpec,
)
from batchrun.simulator.simulation import SimulationPlan
from batchrun.traces import read_trace
from batchrun.vllm_plugin.virtual import EngineShape, Slo, Timing
from batchrun.vllm_plugin.virtual.workload import JobShape, LogNormalTokens, OnlineTraffic

MAX_PROFILE_BYTES = 1 << 20


def plan_of(scenario: ScenarioFile, base: Path) -> SimulationPlan:
    """What the file means; paths in it are relative to `base`.

    Raises DataError, JobSpecError or ConfigError, one line, when a file in it cannot be used.
    """
    calls = _calls(scenario, base)
    duration_s = scenario.duration
    windows = scenario.windows
    if windows is not None:
        calls = windows_of(calls, duration_s, windows.count, windows.length, scenario.seed)
        duration_s = windows.count * windows.length
    return SimulationPlan(
        duration_s,
        calls,
        [_job(job, index, scenario.seed, base) for index, job in enumerate(scenario.jobs)],
        scenario.engines.count,
        engine_of(scenario.engines, scenario.slo, base),
        Slo(scenario.slo.ttft, scenario.slo.tpot),
        scenario.seed,
    )


def _calls(scenario: ScenarioFile, base: Path) -> CallTrace:
    online = scenario.online
    if online is None:
        return Calls.of([])
    if online.trace is not None:
        trace = read_trace(base / Path(online.trace).expanduser())
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
        shape = JobShape(
            spec.shape.documents,
            spec.shape.document_tokens,
            spec.shape.questions,
            spec.shape.question_tokens,
            spec.shape.output_tokens,
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
        base / Path(spec.file).expanduser(),
        JobTerms(spec.weight, spec.after, deadline_s),
        draw_output_tokens=None if bounds is None else draw,
        name=spec.name,
    )


def engine_of(spec: EnginesSpec, slo: SloSpec, base: Path) -> EnginePlan:
    """An engine as described; a profile's path is relative to `base`.

    Raises DataError or ConfigError, one line, when the profile cannot be used.
    """
    profile = None if spec.steps == REFERENCE else _profile(base / Path(spec.steps).expanduser())
    defaults = EngineShape()
    blocks, tokens = defaults.num_blocks, defaults.block_tokens
    if profile is not None:
        blocks, tokens = profile.kv_blocks, profile.engine.block_tokens
    shape = EngineShape(
        num_blocks=spec.kv_blocks or blocks,
        token_budget=spec.token_budget,
        max_num_seqs=spec.max_num_seqs,
        block_tokens=spec.block_tokens or tokens,
        max_model_len=spec.max_model_len,
    )
    plan = EnginePlan(
        shape,
        spec.policy,
        settings={"slo": {"ttft_s": slo.ttft, "tpot_s": slo.tpot}},
        timing=Timing(steps_in_flight=spec.steps_in_flight),
    )
    if profile is None:
        return plan
    return calibrated(plan, profile)


def calibrated(plan: EnginePlan, profile: CalibrationProfile) -> EnginePlan:
    """The plan with steps that take as long as the profile says, and the gaps between them.

    Gaps count for engines with one step in flight; a step ahead hides them.
    """
    timing, gap = plan.timing, profile.gap
    if gap is not None and timing.steps_in_flight == 1:
        timing = replace(timing, planning_s=gap.base_s, request_s=gap.request_s)
    return replace(plan, law=ModelLaw(profile.models[0]), believed=profile.models, timing=timing)


def _profile(path: Path) -> CalibrationProfile:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_PROFILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: the profile cannot be read: {reason}") from error
    return profile_from_json(text, str(path))
