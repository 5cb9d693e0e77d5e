"""Deadlines between jobs: the forecast of the capacity, what is claimed and what is announced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from heapq import heapreplace
from itertools import count, islice
from typing import Any

import numpy as np
import pytest

from batchrun.pool.deadlines import (
    MOST_SHARE,
    Deadlines,
    JobWork,
    Kept,
    Outlook,
    fair_finishes_s,
    needed_shares,
    tokens_ahead,
)
from batchrun.pool.job_shares import Owner
from batchrun.pool.pace import HALF_LIFE_S, CapacityForecast

CAPACITY = 1000.0


def make_work(tokens: float, *, weight: float = 1, doubt: float = 0.0) -> JobWork:
    return JobWork(weight, tokens, doubt)


def make_deadlines(**deadline_at: float) -> Deadlines:
    deadlines = Deadlines()
    for job_id, instant in deadline_at.items():
        deadlines.join(job_id, instant)
    return deadlines


def run_engine(forecast: CapacityForecast, start_s: int, end_s: int, tokens: int) -> None:
    """A busy engine that computes so many tokens in each second."""
    for second in range(start_s, end_s):
        forecast.observe(second, 0, is_saturated=True)
        forecast.add(tokens)
    forecast.observe(end_s, 0, is_saturated=False)


def test_the_forecast_is_what_was_computed_in_a_second() -> None:
    forecast = CapacityForecast()
    run_engine(forecast, 0, 60, 500)

    assert forecast.tokens_per_s == pytest.approx(500)


def test_there_is_no_forecast_from_a_few_seconds() -> None:
    forecast = CapacityForecast()
    run_engine(forecast, 0, 10, 500)

    assert forecast.tokens_per_s is None


def test_idle_time_does_not_lower_the_forecast() -> None:
    forecast = CapacityForecast()
    run_engine(forecast, 0, 60, 500)
    run_engine(forecast, 5000, 5060, 500)

    assert forecast.tokens_per_s == pytest.approx(500)


def test_the_forecast_follows_a_change_with_its_half_life() -> None:
    forecast = CapacityForecast()
    run_engine(forecast, 0, 5000, 1000)
    run_engine(forecast, 5000, 5000 + int(HALF_LIFE_S), 500)

    assert forecast.tokens_per_s == pytest.approx(750, rel=0.01)


def test_the_time_until_a_full_window_comes_back_is_not_counted() -> None:
    forecast = CapacityForecast()
    forecast.observe(0, 2, is_saturated=True)
    forecast.add(900)
    forecast.observe(20, 2, is_saturated=True)
    forecast.add(900)
    for second in range(20, 50):
        forecast.observe(second, 2, is_saturated=True)
        forecast.add(500)

    assert forecast.tokens_per_s == pytest.approx(500, rel=0.05)


@pytest.mark.parametrize("shortest_s", [100.0, 500.0])
def test_rows_that_take_minutes_bring_no_forecast_until_most_are_back(shortest_s: float) -> None:
    """Always 256 rows at 20 tokens/s, which take 500 s on average."""
    drawn_s = np.random.default_rng(0).uniform(shortest_s, 1000 - shortest_s, 2_000).tolist()
    rest_s = iter(drawn_s)
    ends = sorted((each_s, each_s) for each_s in islice(rest_s, 256))
    forecast = CapacityForecast()
    for second in range(3_000):
        while ends[0][0] <= second:
            next_s = next(rest_s)
            forecast.add(round(20 * heapreplace(ends, (second + next_s, next_s))[1]))
        forecast.observe(second, 256, is_saturated=True)
        found = forecast.tokens_per_s
        assert found is None or 0.45 < found / (256 * 20) < 1.55

    assert forecast.tokens_per_s is not None


def test_fair_shares_hand_on_what_a_finished_job_leaves() -> None:
    works = {"short": make_work(10_000), "long": make_work(50_000, weight=3)}

    finishes_s = fair_finishes_s(works, CAPACITY)

    assert finishes_s == {"short": pytest.approx(40), "long": pytest.approx(60)}


def test_a_claim_is_the_work_over_the_time_for_it() -> None:
    kept = [Kept(100, "due", 30_000), Kept(200, "later", 50_000)]

    shares = needed_shares(kept, [100, 200], CAPACITY)

    assert shares == {"due": pytest.approx(0.3), "later": pytest.approx(0.1)}


def test_a_later_deadline_that_can_wait_claims_nothing_yet() -> None:
    kept = [Kept(100, "due", 50_000), Kept(1000, "later", 100_000)]

    assert needed_shares(kept, [100, 1000], CAPACITY) == {"due": pytest.approx(0.5)}


def test_claims_leave_something_for_the_others() -> None:
    kept = [Kept(100, "due", 90_000), Kept(100, "later", 90_000)]

    shares = needed_shares(kept, [100, 100], CAPACITY)

    assert sum(shares.values()) == MOST_SHARE
    assert shares["due"] == pytest.approx(0.9)


def test_nothing_is_claimed_while_fair_shares_are_enough() -> None:
    works = {"due": make_work(20_000), "other": make_work(1_000_000)}

    assert make_deadlines(due=100).review(0, CAPACITY, 0, works) == {}


def test_a_job_that_its_fair_share_would_make_late_claims_what_it_needs() -> None:
    works = {"due": make_work(45_125), "other": make_work(1_000_000)}

    shares = make_deadlines(due=100).review(0, CAPACITY, 0, works)

    assert shares == {"due": pytest.approx(0.5)}


def test_an_estimate_in_doubt_is_not_trusted_to_be_in_time() -> None:
    other = make_work(1_000_000)
    sure = {"due": make_work(35_000), "other": other}
    unsure = {"due": make_work(35_000, doubt=0.3), "other": other}

    assert make_deadlines(due=100).review(0, CAPACITY, 0, sure) == {}
    assert make_deadlines(due=100).review(0, CAPACITY, 0, unsure) != {}


def test_a_deadline_that_nothing_can_keep_is_announced_once_and_claims_nothing() -> None:
    deadlines = make_deadlines(due=100)
    works = {"due": make_work(150_000)}
    shares = [deadlines.review(now_s, CAPACITY, 0, works) for now_s in range(5)]
    news = deadlines.take_news()

    assert shares == [{}] * 5
    assert [str(outlook) for outlook in news] == [
        "will miss its deadline by about 58 s; needs 1,500 tokens/s, the forecast is 950"
    ]
    assert deadlines.outlook("due") is not None


def test_an_estimate_in_doubt_does_not_announce_a_miss() -> None:
    deadlines = make_deadlines(due=100)
    deadlines.review(0, CAPACITY, 0, {"due": make_work(130_000, doubt=0.3)})

    assert deadlines.take_news() == []


def test_a_forecast_that_wavers_around_the_need_is_no_news() -> None:
    deadlines = make_deadlines(due=1000)
    works = {"due": make_work(900_000)}
    for second in range(40):
        deadlines.review(second, 850.0 if second % 2 else 950.0, 0, works)

    assert deadlines.take_news() == []


def test_a_small_lack_is_announced_once_it_lasts() -> None:
    deadlines = make_deadlines(due=1000)
    works = {"due": make_work(1_020_000)}
    told_at = [
        second
        for second in range(100)
        if deadlines.review(second, CAPACITY, 0, works) == {} and deadlines.take_news()
    ]

    assert told_at == [48]


def test_a_lack_that_stays_small_is_no_news() -> None:
    deadlines = make_deadlines(due=1000)
    for second in range(500):
        tokens = 1.04 * MOST_SHARE * CAPACITY * (1000 - second)
        deadlines.review(second, CAPACITY, 0, {"due": make_work(tokens)})

    assert deadlines.take_news() == []


def test_a_delay_that_grows_is_told_again_when_it_has_doubled() -> None:
    deadlines = make_deadlines(due=1000)
    delays_s: list[float] = []
    for tokens in range(1_400_000, 3_000_000, 10_000):
        deadlines.review(0, CAPACITY, 0, {"due": make_work(tokens)})
        delays_s += [-outlook.laxity_s for outlook in deadlines.take_news()]

    assert delays_s == [pytest.approx(474, abs=1), pytest.approx(947, abs=11), *delays_s[2:]]
    assert delays_s[2] == pytest.approx(1895, abs=11)


def test_a_deadline_that_can_be_kept_after_all_is_told_and_claimed_again() -> None:
    deadlines = make_deadlines(due=100)
    works = {"due": make_work(80_000), "other": make_work(80_000)}
    deadlines.review(0, 500, 0, works)
    shares = deadlines.review(1, 1200, 0, works)

    assert [outlook.is_kept for outlook in deadlines.take_news()] == [False, True]
    assert shares.keys() == {"due"}


def test_a_job_that_comes_later_does_not_take_a_kept_deadline() -> None:
    deadlines = make_deadlines(later=200, due=100)
    works = {"later": make_work(150_000), "due": make_work(90_000), "other": make_work(10_000)}
    shares = deadlines.review(0, CAPACITY, 0, works)

    assert shares.keys() == {"later"}
    assert [outlook.job_id for outlook in deadlines.take_news()] == ["due"]


def test_a_job_that_came_first_keeps_its_deadline_though_it_was_opened_last() -> None:
    deadlines = Deadlines()
    deadlines.join("second", 90, seq=2)
    deadlines.join("first", 100, seq=1)
    deadlines.review(0, CAPACITY, 0, {"second": make_work(40_000), "first": make_work(80_000)})

    assert [outlook.job_id for outlook in deadlines.take_news()] == ["second"]


def test_a_job_that_waits_takes_no_share_of_a_bounded_owner() -> None:
    key = Owner("key", is_bounded=True)
    works = {"plain": make_work(1e9), "batch": JobWork(1, 40_000, 0.0, key)}
    cheap = make_work(1e9, weight=10)
    deadlines = make_deadlines(batch=100)
    kept: list[bool] = []
    for is_waiting in (True, False):
        works["cheap"] = cheap._replace(is_waiting=is_waiting)
        deadlines.review(0, CAPACITY, 0, works)
        outlook = deadlines.outlook("batch")
        kept.append(outlook is not None and outlook.is_kept)

    assert kept == [True, False]
    all_wait = {job_id: work._replace(is_waiting=True) for job_id, work in works.items()}
    assert make_deadlines(batch=100).review(0, CAPACITY, 0, all_wait).keys() == {"batch"}


def test_the_earliest_deadline_claims_first_whoever_came_first() -> None:
    deadlines = make_deadlines(later=200, due=100)
    works = {"later": make_work(90_000), "due": make_work(40_000), "other": make_work(500_000)}

    assert list(deadlines.review(0, CAPACITY, 0, works)) == ["due", "later"]


def num_steps(call: Callable[..., object], *args: object) -> int:
    """How many lines of Python a call runs, each as often as it does."""
    lines, tracing = count(), sys.gettrace()

    def trace(*_: object) -> Any:
        next(lines)
        return trace

    sys.settrace(trace)
    try:
        call(*args)
    finally:
        sys.settrace(tracing)
    return next(lines)


def test_a_deadline_among_many_costs_no_more_than_one_among_few() -> None:
    num_lines: list[int] = []
    for num in (50, 400):
        works = {str(i): make_work(1_000 + i) for i in range(num)}
        claims = dict.fromkeys(works, 0.5 / num) | {"0": 0.3}
        deadlines = make_deadlines(**{job_id: 1_000.0 + int(job_id) for job_id in works})
        num_lines += [
            num_steps(deadlines.review, 0, CAPACITY, 0, works),
            num_steps(tokens_ahead, works, claims),
        ]
        assert all(deadlines.outlook(job_id) for job_id in works)

    assert num_lines[2] < 16 * num_lines[0]
    assert num_lines[3] < 16 * num_lines[1]


def test_news_of_a_job_that_left_are_not_told() -> None:
    deadlines = make_deadlines(due=100)
    deadlines.review(0, CAPACITY, 0, {"due": make_work(150_000)})
    deadlines.leave("due")

    assert deadlines.take_news() == []


def test_what_is_short_of_a_second_late_reads_as_a_second() -> None:
    outlook = Outlook("job", False, 1_559.0, 100.0, 90.0)

    assert "by about 1 s;" in str(outlook)
