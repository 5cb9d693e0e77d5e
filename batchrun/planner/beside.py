"""One job by itself beside a trace's calls, whenever it comes."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from batchrun.planner.alone import context_tokens
from batchrun.planner.day import offline_day, windows_of_day
from batchrun.planner.fleet import Fleet
from batchrun.planner.job_times import JobWork, ends_s
from batchrun.planner.kinds import EngineKind
from batchrun.planner.promise import Promise
from batchrun.simulator import OfflineJob, without_rows
from batchrun.traces import Trace
from batchrun.types import ProgressSink

NUM_WINDOWS = 6
WINDOW_S = 60.0
"""Of one engine, shared by all as in `default_window_s`; half a minute of computing in all."""
LEAST_WINDOW_S = 20.0
NUM_STARTS = 48


@dataclass(frozen=True, slots=True)
class TimesBeside:
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


def times_beside(
    trace: Trace,
    job: OfflineJob,
    computed_tokens: float,
    fleet: Fleet,
    promise: Promise,
    progress: ProgressSink,
) -> TimesBeside:
    """Simulate a few short windows of the trace with the job beside its calls, and nothing else.

    `computed_tokens` is the work of the whole job. Raises InputError for a trace without a length.
    """
    window_s = max(LEAST_WINDOW_S, WINDOW_S / (fleet.num_engines or 1))
    windows = windows_of_day(trace, NUM_WINDOWS, window_s)
    pace = offline_day(trace, [job], fleet, promise, windows, progress).pace
    work = JobWork(computed_tokens, job.weight)
    takes_s = [
        ends_s([work], pace, start_s)[0] - start_s
        for start_s in np.linspace(0.0, trace.duration_s, NUM_STARTS, endpoint=False).tolist()
    ]
    return TimesBeside(median(takes_s), min(takes_s), max(takes_s), pace.tokens_per_s)
