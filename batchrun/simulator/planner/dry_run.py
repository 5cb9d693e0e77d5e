"""What a dry run tells of a job: when it would be done, what it would cost, by their JSON names.

What the planner foretells of a job: beside a trace's calls, and on an engine of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchrun.config import Deployment
from batchrun.daemon.plugin import existing_profile, online_slo
from batchrun.errors import InputError
from batchrun.home import Home
from batchrun.jobs.job_plan import JobPlan
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.study import KvSize, OutputEstimate
from batchrun.quantities import count, duration
from batchrun.simulator.offline_jobs import JobTerms, OfflineJob, job_of_plan
from batchrun.simulator.planner.colocation import alone_s, fitting, times_beside
from batchrun.simulator.planner.fleet import Fleet
from batchrun.simulator.planner.kinds import EngineKind, kind_of_profile, parse_kind
from batchrun.simulator.planner.peak import Promise
from batchrun.simulator.traces.reading import read_trace
from batchrun.simulator.traces.trace import Trace
from batchrun.types import ProgressSink

HOUR_S = 3600.0
_PRICE = re.compile(r"(\d+(?:\.\d+)?)(?:x([1-9]\d{0,2}))?")


@dataclass(frozen=True, slots=True)
class Eta:
    """Seconds from a submission now to the job's end: the best guess, and a range around it.

    All None while unknown, infinity for a job that never ends. `source` is `daemon`, `simulation`
    or None; `rests_on` says in words what the guess rests on, or what to do for one.
    """

    expected_s: float | None
    low_s: float | None
    high_s: float | None
    source: str | None
    rests_on: str

    def keeps(self, deadline_s: float | None) -> bool | None:
        """Whether the best guess is within the deadline; None where either is unknown."""
        if deadline_s is None or self.expected_s is None:
            return None
        return self.expected_s <= deadline_s


@dataclass(frozen=True, slots=True)
class Price:
    """Of a GPU-hour, in any currency, None where it was not given; and the GPUs of one engine."""

    per_gpu_hour: float | None = None
    gpus: int = 1

    @classmethod
    def parse(cls, text: str) -> Price:
        """From `PRICE[xGPUS]`. Raises InputError."""
        match = _PRICE.fullmatch(text.strip())
        if match is None:
            raise InputError(
                f"--price {text!r}: must be PRICE or PRICExGPUS, such as 1.80 or 2.50x2"
            )
        return cls(float(match[1]), int(match[2] or 1))


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Engine-hours that the job's work takes; None while unknown.

    `source` is `simulation` (engines of its own), `daemon` (the pace beside the calls, so an upper
    bound) or None; `rests_on` as in `Eta`.
    """

    hours: float | None
    source: str | None
    rests_on: str

    def gpu_hours(self, price: Price) -> float | None:
        """With the GPUs of one engine."""
        return None if self.hours is None else self.hours * price.gpus

    def cost(self, price: Price) -> float | None:
        """What they cost; None without a price."""
        gpu_hours = self.gpu_hours(price)
        if gpu_hours is None or price.per_gpu_hour is None:
            return None
        return gpu_hours * price.per_gpu_hour


@dataclass(frozen=True, slots=True)
class Forecast:
    """Both at once."""

    eta: Eta
    engine_time: EngineTime

    @classmethod
    def unknown(cls, no_eta: str, no_cost: str) -> Forecast:
        """Neither is known; what to do about it."""
        return cls(Eta(None, None, None, None, no_eta), EngineTime(None, None, no_cost))


@dataclass(frozen=True, slots=True)
class Foretold:
    """All that a dry run says: `study` are figures of `inspect`, and the tokens that follow."""

    study: Mapping[str, Any]
    deadline_s: float | None
    forecast: Forecast
    price: Price

    def record(self) -> dict[str, Any]:
        """One flat object: seconds, tokens, hours, shares from 0 to 1; null for what is unknown."""
        eta, spent = self.forecast.eta, self.forecast.engine_time
        return {
            **self.study,
            "eta_s": _finite(eta.expected_s),
            "eta_low_s": _finite(eta.low_s),
            "eta_high_s": _finite(eta.high_s),
            "eta_source": eta.source,
            "eta_rests_on": eta.rests_on,
            "deadline_s": self.deadline_s,
            "is_deadline_kept": eta.keeps(self.deadline_s),
            "engine_hours": spent.hours,
            "engine_hours_source": spent.source,
            "engine_hours_rest_on": spent.rests_on,
            "gpus_per_engine": self.price.gpus,
            "gpu_hours": spent.gpu_hours(self.price),
            "price_per_gpu_hour": self.price.per_gpu_hour,
            "cost_alone": spent.cost(self.price),
        }


def study_figures(
    inspected: Mapping[str, Any], prompt_tokens: float, output_tokens: float
) -> dict[str, Any]:
    """The figures of `inspect` that a submission is about, with `computed_tokens`: the answers, and
    the part of the prompts that is expected not to be found in the cache."""
    expected, best = inspected["expected_hit_rate"], inspected["best_hit_rate"]
    hit_rate = best if expected is None else expected
    return {
        "name": inspected["name"],
        "endpoint": inspected["endpoint"],
        "rows": inspected["rows"],
        "rows_that_cannot_run": inspected["rows_with_template_errors"],
        "first_error": inspected["first_error"],
        "prefix_groups": inspected["prefix_groups"],
        "prompt_tokens": round(prompt_tokens),
        "output_tokens": round(output_tokens),
        "output_tokens_a_row": inspected["output_tokens_mean"],
        "output_tokens_source": inspected["output_tokens_source"],
        "max_output_tokens_a_row": inspected["max_output_tokens"],
        "computed_tokens": round(prompt_tokens * (1 - hit_rate) + output_tokens),
        "expected_hit_rate": expected,
        "best_hit_rate": best,
        "kv_tokens": inspected["kv_tokens"],
        "kv_tokens_source": inspected["kv_tokens_source"],
        "rows_larger_than_kv": inspected["rows_larger_than_kv"],
        "output_path": inspected["output_path"],
    }


def _finite(value_s: float | None) -> float | None:
    return value_s if value_s is not None and math.isfinite(value_s) else None


CONTEXT_TOKENS = 131_072
"""Of a simulated engine: so long that rows are left out for their KV and nothing else."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """Engines of the deployment as they are simulated, and the calls beside a job, if any."""

    kind: EngineKind
    num_engines: int
    promise: Promise
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
        found = times_beside(trace, job, computed_tokens, fleet, self.promise, progress)
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
) -> Simulation | None:
    """What `--trace` and `--profile` ask for; the profile of the deployment's first engine where
    none is named, None where that has none.

    Raises InputError and ConfigError, one line, where something cannot be used.
    """
    if profile is not None:
        promise = _promise(deployment, home)
        kind = parse_kind(profile, promise, Path.cwd())
    else:
        path = existing_profile(deployment, deployment.engines[0], home)
        if path is None:
            return None
        promise = _promise(deployment, home)
        kind = kind_of_profile(path, promise)
    calls = None if trace is None else _calls(trace)
    name = "" if trace is None else trace.name
    kind = kind.with_context(CONTEXT_TOKENS)
    return Simulation(kind, len(deployment.engines), promise, calls, name)


def _promise(deployment: Deployment, home: Home) -> Promise:
    slo = online_slo(deployment, home)
    return Promise(slo.ttft_s, slo.tpot_s)


def _calls(path: Path) -> Trace:
    calls = read_trace(path)
    if not len(calls) or not calls.duration_s:
        raise InputError(f"--trace {path}: has no calls")
    return calls
