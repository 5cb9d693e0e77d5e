"""Does the range of an ETA hold the truth, and how wide is it?

    python -m benchmarks.eta [--trials 40] [--first 100] [--json FILE]

Simulates jobs beside online load that varies (`eta_loads`) with the shipped scheduler on one
virtual A100, and asks every ten seconds, as `batchrun status` does, when each job will be done. A
range holds if the job's end lies in it. The constants of `pool.completion` were chosen on the
trials 0 to 39.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchrun.simulator.cluster import EnginePlan, Engines
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.offline_jobs import JobShape, JobTerms, OfflineJob, job_of_shape
from batchrun.simulator.online import OnlineRouter
from batchrun.simulator.traces.rates import RateSeries, draw_trace
from batchrun.simulator.traces.trace import Trace
from benchmarks.records import Bar, describe, finish, parser

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


ASK_EVERY_S = 10.0
LEAST_COVERAGE, MOST_WIDTH = 0.85, 0.4
PHASES = ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 0.9), (0.9, 1.0))
"""Parts of a job's time, for the table."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said of a job at one instant, and what was left in truth, in seconds."""

    job: str
    asked_at_s: float
    expected_s: float
    low_s: float
    high_s: float
    left_s: float

    @property
    def done_share(self) -> float:
        """How much of the job's time had passed."""
        return self.asked_at_s / (self.asked_at_s + self.left_s)


def main() -> int:
    """Run the trials, print, save."""
    made = parser(__doc__)
    made.add_argument("--trials", type=int, default=40)
    made.add_argument("--first", type=int, default=100)
    options = made.parse_args()
    records: list[dict[str, object]] = []
    everything: list[Answer] = []
    for number in range(options.first, options.first + options.trials):
        trial = draw_trial(number)
        answers = answers_of(trial)
        everything += answers
        records.append(_record(trial, answers))
        print(describe(records[-1]), flush=True)
    records += _phases(everything)
    print(*map(describe, records[-len(PHASES) - 1 :]), sep="\n")
    return finish(options.json, records, _bars(everything))


def answers_of(trial: EtaTrial) -> list[Answer]:
    """Run the trial until its jobs are done."""
    plan = EnginePlan()
    feed = RowFeed(trial.jobs, 1, trial.number, plan.shape.block_tokens)
    engines = Engines(plan, OnlineRouter(trial.calls, 1, trial.number), feed)
    asked: list[tuple[str, float, float, float, float]] = []
    now_s = 0.0
    while any(job.finished_at_s is None for job in feed.jobs) and now_s < LONGEST_S:
        now_s += ASK_EVERY_S
        engines.run_until(now_s)
        at_s = engines.engines[0].now_s
        asked += [(job, at_s, *said) for job, said in feed.turns.completions().items()]
    ends_s = {job.id: job.finished_at_s for job in feed.jobs}
    return [Answer(*each, left_s=end - each[1]) for each in asked if (end := ends_s[each[0]])]


def _figures(answers: list[Answer]) -> dict[str, object]:
    if not answers:
        return {"answers": 0}
    errors = [each.expected_s / each.left_s - 1 for each in answers]
    return {
        "answers": len(answers),
        "coverage": float(np.mean([each.low_s <= each.left_s <= each.high_s for each in answers])),
        "median_width": float(np.median([(a.high_s - a.low_s) / a.left_s for a in answers])),
        "median_error": float(np.median(np.abs(errors))),
        "median_bias": float(np.median(errors)),
    }


def _record(trial: EtaTrial, answers: list[Answer]) -> dict[str, object]:
    end_s = max((each.asked_at_s + each.left_s for each in answers), default=0.0)
    shape = {"trial": trial.number, "load": trial.kind, "jobs": len(trial.jobs), "end_s": end_s}
    return {**shape, **_figures(answers)}


def _phases(answers: list[Answer]) -> list[dict[str, object]]:
    """The same figures for parts of the jobs' time, and for all of it."""
    found: list[dict[str, object]] = []
    for begin, end in (*PHASES, (0.0, 1.0)):
        part = [each for each in answers if begin <= each.done_share < end]
        found.append({"phase": f"{begin:.0%} to {end:.0%}", **_figures(part)})
    return found


def _bars(answers: list[Answer]) -> list[Bar]:
    found = {key: float(str(value)) for key, value in _figures(answers).items()}
    return [
        Bar("ranges that hold the truth", found["coverage"], LEAST_COVERAGE),
        Bar("median width / what remains", found["median_width"], MOST_WIDTH, is_most=True),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
