"""What the planner predicts for a job: beside a trace's calls, and on an engine of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchrun.config import Deployment
from batchrun.daemon.plugin import existing_profile, online_slo
from batchrun.errors import InputError
from batchrun.home import Home
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.study import KvSize, OutputEstimate
from batchrun.jobs.submit import JobPlan
from batchrun.quantities import count, duration
from batchrun.simulator.offline_jobs import JobTerms, OfflineJob, job_of_plan
from batchrun.simulator.planner.colocation import alone_s, colocated_times, fitting
from batchrun.simulator.planner.fleet import Fleet
from batchrun.simulator.planner.job_forecast import HOUR_S, EngineTime, Eta, Forecast, Price
from batchrun.simulator.planner.kinds import EngineKind, kind_of_profile, parse_kind
from batchrun.simulator.planner.peak import SloTarget
from batchrun.simulator.traces.reading import read_trace
from batchrun.simulator.traces.trace import Trace
from batchrun.types import ProgressSink

CONTEXT_TOKENS = 131_072
"""Of a simulated engine: so long that rows are left out for their KV and nothing else."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Engines of the deployment as they are simulated, and the calls beside a job, if any."""

    kind: EngineKind
    num_engines: int
    slo: SloTarget
    trace: Trace | None
    trace_name: str

    @property
    def price(self) -> Price:
        """As `--profile` names it."""
        return Price(self.kind.price, self.kind.gpus)

    @property
    def kv(self) -> KvSize:
        """The KV of one simulated engine."""
        shape, source = self.kind.engine.shape, f"--profile {self.kind.name}"
        return KvSize(shape.num_blocks * shape.block_tokens, source, shape.block_tokens, source)

    def job(self, spec: JobSpec, plan: JobPlan, outputs: OutputEstimate) -> OfflineJob:
        """The rows that a simulated engine can run."""
        tokens = np.maximum(1, np.rint(outputs.filled)).astype(np.int64)
        return fitting(job_of_plan(spec, plan, JobTerms(), num_output_tokens=tokens), self.kind)

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
        fleet = Fleet(self.kind, self.num_engines, (), ())
        found = colocated_times(trace, job, computed_tokens, fleet, self.slo, progress)
        engines = f"{count(self.num_engines, 'engine')} of {self.kind.name}"
        if not math.isfinite(found.median_s):
            why = f"beside the calls of {self.trace_name} {engines} have no time left for it"
            return Eta(math.inf, math.inf, math.inf, "simulation", why)
        return Eta(
            found.median_s,
            found.least_s,
            found.most_s,
            "simulation",
            f"{found.computed_tokens_per_s:,.0f} computed tokens/s, simulated beside the "
            f"{duration(trace.duration_s)} of {self.trace_name} on {engines}, with no other job",
        )


def simulation_of(
    trace: Path | None, profile: str | None, deployment: Deployment, home: Home
) -> SimulatedFleet | None:
    """What `--trace` and `--profile` ask for; the profile of the deployment's first engine where
    none is named, None where that has none.

    Raises InputError and ConfigError, one line, where something cannot be used.
    """
    if profile is not None:
        slo = _slo_target(deployment, home)
        kind = parse_kind(profile, slo, Path.cwd())
    else:
        path = existing_profile(deployment, deployment.engines[0], home)
        if path is None:
            return None
        slo = _slo_target(deployment, home)
        kind = kind_of_profile(path, slo)
    calls = None if trace is None else _calls(trace)
    name = "" if trace is None else trace.name
    kind = kind.with_context(CONTEXT_TOKENS)
    return SimulatedFleet(kind, len(deployment.engines), slo, calls, name)


def _slo_target(deployment: Deployment, home: Home) -> SloTarget:
    slo = online_slo(deployment, home)
    return SloTarget(slo.ttft_s, slo.tpot_s)


def _calls(path: Path) -> Trace:
    calls = read_trace(path)
    if not len(calls) or not calls.duration_s:
        raise InputError(f"--trace {path}: has no calls")
    return calls
