"""Windows stand for all of a job: where in its order it begins in them, and what that predicts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from batchrun.simulator.offline_jobs import JobShape, JobTerms, OfflineJob, job_of_shape
from batchrun.simulator.online import Calls
from batchrun.simulator.planner.colocation import (
    alone_s,
    begun_at,
    offline_day,
    sample_offset,
    served_tokens,
)
from batchrun.simulator.planner.fleet import Fleet
from batchrun.simulator.planner.kinds import SloTarget, parse_kind
from batchrun.simulator.simulation import SimulationPlan, simulate
from batchrun.simulator.traces.rates import RateSeries, draw_trace
from batchrun.simulator.traces.trace import stratified_windows

SLO = SloTarget(1.0, 0.05)
SHAPE = JobShape(100, (4_000, 12_000), (2, 18), (15, 60), (4, 16))
"""Rows at the order's beginning share far more than those at its end."""


@pytest.fixture(scope="module")
def job() -> OfflineJob:
    """Several minutes of work for one engine."""
    return job_of_shape("docs", SHAPE, 0, JobTerms(deadline_s=5.0))


@pytest.mark.parametrize("num", [1, 2, 3, 6, 24, 97])
def test_windows_begin_at_offsets_spread_over_the_order(num: int) -> None:
    offsets = sorted(sample_offset(number, num) for number in range(num))

    assert offsets == pytest.approx([i / num for i in range(num)])


def test_neighbouring_windows_are_far_apart_in_the_order() -> None:
    offsets = [sample_offset(number, 24) for number in range(24)]

    assert min(np.abs(np.diff(offsets))) > 0.2


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.99])
def test_a_job_that_begins_elsewhere_keeps_all_its_rows(job: OfflineJob, offset: float) -> None:
    begun = begun_at(job, offset, 0.1)

    assert sorted(begun.order.rows) == sorted(job.order.rows)
    assert begun.order.shared_chunks[0] == 0
    assert begun.deadline_s == math.inf
    assert served_tokens(begun) == served_tokens(job)
    # It begins with a document, so no more than the first row of the order is computed again.
    most = job.expected_tokens().sum() + begun.num_prompt_tokens[begun.order.rows[0]]
    assert begun.expected_tokens().sum() <= most


@pytest.mark.nightly
def test_what_a_job_takes_alone_is_what_a_whole_run_takes(job: OfflineJob) -> None:
    kind = parse_kind("a100-8b", SLO, Path())
    plan = SimulationPlan(math.inf, Calls.of([]), [job], engine=kind.engine)
    (whole,) = simulate(plan).jobs

    predicted_s = alone_s(job, whole.computed_tokens, kind)

    assert whole.finished_at_s is not None
    assert predicted_s == pytest.approx(whole.finished_at_s, rel=0.07)


@pytest.mark.nightly
def test_the_work_of_a_job_is_that_of_a_whole_run_though_windows_see_parts(
    job: OfflineJob,
) -> None:
    kind = parse_kind("a100-8b", SLO, Path())
    series = RateSeries.steady([0.0], 1_200.0, [1.0])
    trace = draw_trace([series], seed=0)
    whole = SimulationPlan(math.inf, Calls.of([]), [job], engine=kind.engine)
    windows = stratified_windows(trace, 6, 20.0)

    day = offline_day(trace, [job], Fleet(kind, 1, (), ()), SLO, windows)

    (done,) = simulate(whole).jobs
    assert day.computed_share[0] == pytest.approx(
        done.computed_tokens / served_tokens(job), rel=0.03
    )
