"""The trials of `benchmarks.eta`: a job each, and a load of online calls that varies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchrun.simulator.offline_jobs import JobShape, JobTerms, OfflineJob, job_of_shape
from batchrun.simulator.traces.rates import RateSeries, draw_trace
from batchrun.simulator.traces.trace import Trace

KINDS = ("tide", "walk", "steps", "bursts")
LONGEST_S = 3 * 3600.0
WINDOW_S = 10.0
MEAN_CALLS_PER_S = (0.8, 3.5)

Rates = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class EtaTrial:
    """One job beside one load; the same number gives the same trial."""

    number: int
    kind: str
    calls: Trace
    jobs: list[OfflineJob]


def draw_trial(number: int) -> EtaTrial:
    """Kinds of load take turns; every third trial has a second job beside the first."""
    rng = np.random.default_rng([17, number])
    kind = KINDS[number % len(KINDS)]
    starts_s = np.arange(0.0, LONGEST_S, WINDOW_S, dtype=np.float64)
    course = _course(kind, starts_s, rng)
    rates = np.clip(course / course.mean() * rng.uniform(*MEAN_CALLS_PER_S), 0.0, 9.0)
    series = RateSeries.steady(starts_s, LONGEST_S, rates)
    jobs = [_job("first", number, rng, JobTerms())]
    if number % 3 == 2:
        jobs.append(_job("second", number + 1_000, rng, JobTerms(weight=float(rng.integers(1, 4)))))
    return EtaTrial(number, kind, draw_trace([series], seed=number), jobs)


def _job(name: str, seed: int, rng: np.random.Generator, terms: JobTerms) -> OfflineJob:
    """Long documents or short ones, some minutes to an hour of work."""
    if rng.random() < 0.5:
        shape = JobShape(int(np.exp(rng.uniform(np.log(80), np.log(900)))))
    else:
        num_documents = int(np.exp(rng.uniform(np.log(300), np.log(3_000))))
        shape = JobShape(num_documents, (800, 4_000), (3, 9), (15, 60), (20, 160))
    return job_of_shape(name, shape, seed, terms)


def _course(kind: str, starts_s: Rates, rng: np.random.Generator) -> Rates:
    """Calls per second over time, up to a factor."""
    num = len(starts_s)
    if kind == "tide":
        period_s = np.exp(rng.uniform(np.log(180), np.log(3_600)))
        phase = rng.uniform(0, 2 * np.pi)
        swing = rng.uniform(0.4, 0.9)
        return np.asarray(1 + swing * np.sin(2 * np.pi * starts_s / period_s + phase), np.float64)
    if kind == "walk":
        correlation_s = np.exp(rng.uniform(np.log(60), np.log(1_200)))
        walk = _autoregressive(num, WINDOW_S / correlation_s, rng)
        return np.asarray(np.exp(walk * 0.5), np.float64)
    if kind == "steps":
        each = int(np.exp(rng.uniform(np.log(12), np.log(120))))
        return np.repeat(rng.uniform(0.2, 2.0, num // each + 1), each)[:num]
    is_burst = rng.random(num) < rng.uniform(0.05, 0.2)
    return np.asarray(1 + is_burst * rng.uniform(1.0, 4.0), np.float64)


def _autoregressive(num: int, rate: float, rng: np.random.Generator) -> Rates:
    """A series of variance 1 that forgets with `rate` per step."""
    keep = np.exp(-rate)
    values = np.empty(num, np.float64)
    value = rng.standard_normal()
    for i, noise in enumerate(rng.standard_normal(num) * np.sqrt(1 - keep**2)):
        value = keep * value + noise
        values[i] = value
    return values
