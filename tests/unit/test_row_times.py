"""How long rows in flight will still take, from those that have ended."""

from __future__ import annotations

import numpy as np
import pytest

from batchrun.pool.deadlines import JobWork
from batchrun.pool.fair_share import JobTurns, Turn
from batchrun.pool.pace import Completions, LastRows
from batchrun.pool.row_times import LEAST_ROWS, LastEnd, RowTimes


def after(took_s: list[float]) -> RowTimes:
    """What is known when rows that were sent at 0 have taken so long."""
    times = RowTimes()
    for row, each_s in enumerate(took_s):
        times.sent(row, 0.0)
        times.ended(row, each_s)
    return times


def left(times: RowTimes, now_s: float) -> LastEnd:
    """The end of the last one, which is known."""
    found = times.last_end_s(now_s)
    assert found is not None
    return found


def test_nothing_is_said_from_few_rows_or_of_none() -> None:
    few = after([10.0] * (LEAST_ROWS - 1))
    few.sent(100, 0.0)

    assert few.last_end_s(1.0) is None
    assert after([10.0] * LEAST_ROWS).last_end_s(1.0) is None


def test_rows_that_all_take_as_long_have_the_rest_of_that_left() -> None:
    times = after([20.0] * 200)
    for row in range(1_000, 1_005):
        times.sent(row, 100.0)

    assert left(times, 100.0).expected_s == pytest.approx(20.0, rel=0.2)
    assert left(times, 110.0).expected_s == pytest.approx(10.0, rel=0.3)


def test_the_last_of_many_takes_longer_than_one() -> None:
    rng = np.random.default_rng(0)
    times = after(np.exp(rng.normal(2.0, 0.8, 400)).tolist())
    times.sent(1_000, 0.0)
    one = left(times, 0.0)
    for row in range(1_001, 1_100):
        times.sent(row, 0.0)
    many = left(times, 0.0)

    assert one.low_s < one.expected_s < one.high_s
    assert many.expected_s > 3 * one.expected_s
    assert many.high_s - many.low_s < 3 * many.expected_s


def test_the_last_of_rows_like_those_seen_ends_within_the_range() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        took_s = np.exp(rng.normal(2.0, 0.8, 500))
        times = after(took_s[:400].tolist())
        running_s = took_s[400:][took_s[400:] > 10.0]
        for row in range(len(running_s)):
            times.sent(1_000 + row, 100.0)
        found = left(times, 110.0)
        held += found.low_s <= running_s.max() - 10.0 <= found.high_s

    assert held >= 70


def test_rows_that_took_longer_than_any_before_still_have_an_end() -> None:
    times = after([1.0] * 100)
    times.sent(1_000, 0.0)

    assert 0 < left(times, 500.0).expected_s < 1_000


def test_a_row_that_came_back_unfinished_is_forgotten() -> None:
    times = after([10.0] * 100)
    times.sent(1_000, 0.0)
    times.lost(1_000)

    assert times.last_end_s(5.0) is None


def test_a_job_is_not_done_before_its_last_rows_are() -> None:
    completions = Completions()
    completions.add(600.0, 600_000.0)
    works = {"a": JobWork(1.0, 10_000.0, 0.0)}
    last = LastRows(LastEnd(50.0, 60.0, 70.0), 10_000.0, are_sent=True)

    alone = completions.predict(works, {}, {})["a"]
    found = completions.predict(works, {}, {"a": last})["a"]

    assert alone.expected_s == pytest.approx(10.0)
    assert alone.high_s < found.low_s < found.expected_s < found.high_s < 70


def test_rows_in_flight_of_a_job_that_left_and_came_back_are_nobodys() -> None:
    turns = JobTurns()
    turns.join("a", 1.0, 1_000)
    turns.observe(1.0, is_saturated=True)
    turns.charge(Turn("a", is_urgent=False), 0, 100, ends_subtree=False)
    turns.leave("a")

    turns.settle("a", 0, 100)
    turns.join("a", 1.0, 1_000)

    turns.check()
