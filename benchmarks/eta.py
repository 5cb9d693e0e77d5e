"""Does the range of an ETA hold the truth, and how wide is it?

    python -m benchmarks.eta [--trials 40] [--first 100] [--json FILE]

Simulates jobs beside online load that varies, with the shipped scheduler on one virtual A100, and
asks every ten seconds, as `batchrun status` does, when each job will be done. A range holds if the
job's end lies in it. Rows have no `max_tokens`, and nobody is told how long their answers will be:
jobs have short answers about documents, longer ones, or chat prompts with the lengths of real
chats. The constants of `pool.pace` were chosen on the trials 0 to 39.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from batchrun.simulator.cluster import EnginePlan, Engines
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.offline_jobs import (
    JobShape,
    JobTerms,
    LogNormalTokens,
    OfflineJob,
    job_of_shape,
)
from batchrun.simulator.online import OnlineRouter
from batchrun.simulator.traces.rates import RateSeries, draw_trace
from batchrun.simulator.traces.trace import Trace
from batchrun.simulator.virtual.setup import EngineShape
from batchrun.types import USUAL_OUTPUT_TOKENS
from benchmarks.records import Bar, Record, finish, parser, shown

KINDS = ("tide", "walk", "steps", "bursts")
LONGEST_S = 3 * 3600.0
WINDOW_S = 10.0
MEAN_CALLS_PER_S = (0.8, 3.5)

SHAPES = (
    (80, 900, JobShape()),
    (300, 3_000, JobShape(0, (800, 4_000), (3, 9), (15, 60), (20, 160))),
    (
        1_000,
        8_000,
        JobShape(
            0,
            LogNormalTokens(math.log(200), 1.0, (16, 4_000)),
            (1, 1),
            (5, 40),
            LogNormalTokens(math.log(148), 0.8, (1, 2_048)),
        ),
    ),
)
"""The fewest and the most documents, and their shape: the last is chats, a prompt each, with the
lengths of the scenario a100-8b."""

Rates = NDArray[np.floating]


def draw_trial(number: int) -> tuple[str, Trace, list[OfflineJob]]:
    """The kind of load, its calls, and jobs; the same number gives the same trial.

    Kinds of load take turns; every third trial has a second job beside the first.
    """
    rng = np.random.default_rng([17, number])
    kind = KINDS[number % len(KINDS)]
    starts_s = np.arange(0.0, LONGEST_S, WINDOW_S, dtype=np.float64)
    course = _course(kind, starts_s, rng)
    rates = np.clip(course / course.mean() * rng.uniform(*MEAN_CALLS_PER_S), 0.0, 9.0)
    series = RateSeries.steady(starts_s, LONGEST_S, rates)
    jobs = [_job("first", number, rng, JobTerms())]
    if number % 3 == 2:
        jobs.append(_job("second", number + 1_000, rng, JobTerms(weight=float(rng.integers(1, 4)))))
    return kind, draw_trace([series], seed=number), jobs


def _job(name: str, seed: int, rng: np.random.Generator, terms: JobTerms) -> OfflineJob:
    """Long documents, short ones or chats, some minutes to an hour of work."""
    least_documents, most_documents, shape = SHAPES[int(rng.integers(len(SHAPES)))]
    num_documents = int(np.exp(rng.uniform(np.log(least_documents), np.log(most_documents))))
    job = job_of_shape(name, replace(shape, num_documents=num_documents), seed, terms)
    return replace(
        job, expected_output_tokens=USUAL_OUTPUT_TOKENS, context_tokens=EngineShape().max_model_len
    )


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
        forgets = 1 - np.exp(-WINDOW_S / correlation_s)
        # Each step keeps the rest of the one before it; the variance is 1.
        noise = rng.standard_normal(num + 1)
        noise[1:] *= np.sqrt((2 - forgets) / forgets)
        walk = pl.Series(noise).ewm_mean(alpha=forgets, adjust=False)[1:].to_numpy()
        return np.asarray(np.exp(walk * 0.5), np.float64)
    if kind == "steps":
        each = int(np.exp(rng.uniform(np.log(12), np.log(120))))
        return np.repeat(rng.uniform(0.2, 2.0, num // each + 1), each)[:num]
    is_burst = rng.random(num) < rng.uniform(0.05, 0.2)
    return np.asarray(1 + is_burst * rng.uniform(1.0, 4.0), np.float64)


ASK_EVERY_S = 10.0
LEAST_COVERAGE, MOST_WIDTH = 0.85, 0.4
PHASES = ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 0.9), (0.9, 1.0))
"""Parts of a job's time, for the table."""
SECONDS = ("asked_at_s", "expected_s", "low_s", "high_s", "left_s")
ANSWER = {"job": pl.String, **dict.fromkeys(SECONDS, pl.Float64)}
"""What was said of a job at one instant, and what was left in truth."""


def main() -> int:
    """Run the trials, print, save."""
    options = parser(__doc__, trials=40, first=100).parse_args()
    answers: list[pl.DataFrame] = []
    records = shown(_record(options.first + nth, answers) for nth in range(options.trials))
    everything = pl.concat(answers)
    done = pl.col("asked_at_s") / (pl.col("asked_at_s") + pl.col("left_s"))
    records += shown(
        {
            "phase": f"{begin:.0%} to {end:.0%}",
            **_figures(everything.filter(done >= begin, done < end)),
        }
        for begin, end in (*PHASES, (0.0, 1.0))
    )
    found = _figures(everything)
    bars = [
        Bar("ranges that hold the truth", found["coverage"], LEAST_COVERAGE),
        Bar("median width / what remains", found["median_width"], MOST_WIDTH, is_most=True),
    ]
    return finish(options.json, records, bars)


def _record(number: int, answers: list[pl.DataFrame]) -> Record:
    kind, calls, jobs = draw_trial(number)
    found = answers_of(number, calls, jobs)
    answers.append(found)
    end_s = found.select(pl.sum_horizontal("asked_at_s", "left_s").max()).item()
    shape = {"trial": number, "load": kind, "jobs": len(jobs), "end_s": end_s}
    return {**shape, **_figures(found)}


def answers_of(number: int, calls: Trace, jobs: list[OfflineJob]) -> pl.DataFrame:
    """Run the trial until its jobs are done; a row of `ANSWER` for each time that one was asked."""
    plan = EnginePlan()
    feed = RowFeed(jobs, [plan.shape.block_tokens], number)
    engines = Engines(
        [plan], OnlineRouter(calls, [plan.traits], number, plan.shape.max_model_len), feed
    )
    asked: list[tuple[str, float, float, float, float]] = []
    now_s = 0.0
    while any(job.finished_at_s is None for job in feed.jobs) and now_s < LONGEST_S:
        now_s += ASK_EVERY_S
        engines.run_until(now_s)
        at_s = engines.engines[0].now_s
        asked += [(job, at_s, *said) for job, said in feed.turns.completions().items()]
    ends_s = {job.id: job.finished_at_s for job in feed.jobs}
    rows = [(*each, end - each[1]) for each in asked if (end := ends_s[each[0]])]
    return pl.DataFrame(rows, ANSWER, orient="row")


def _figures(answers: pl.DataFrame) -> dict[str, Any]:
    left = pl.col("left_s")
    error = pl.col("expected_s") / left - 1
    figures = answers.select(
        coverage=left.is_between("low_s", "high_s").mean(),
        median_width=((pl.col("high_s") - pl.col("low_s")) / left).median(),
        median_error=error.abs().median(),
        median_bias=error.median(),
    )
    return {"answers": len(answers), **(figures.row(0, named=True) if len(answers) else {})}


if __name__ == "__main__":
    raise SystemExit(main())
