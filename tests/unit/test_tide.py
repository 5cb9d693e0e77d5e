"""How many replicas a fleet needs: forecast, what engines hold, and a reason for each number."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from batchrun.estimator.engine_capacity import (
    CallLengths,
    EngineRoom,
    EngineTrial,
    FleetCapacity,
    Promise,
    fleet_capacity,
)
from batchrun.estimator.step_time import RooflineModel
from batchrun.estimator.tide import (
    DAY,
    CapacityCorrection,
    Cause,
    FleetNeeds,
    FleetSizer,
    JobNeed,
    LoadForecast,
    LoadRule,
    TideForecast,
    TideSettings,
    needed_work,
)

A100 = RooflineModel(
    base_s=0.003, token_s=7.3e-5, pair_s=2.4e-9, weights_s=0.0114, context_s=9.4e-8, unhidden=0.25
)
ALIKE = FleetCapacity({1: 1.0})
"""Each engine holds 1."""


def lengths(prompt: int, output: int, cached: int = 0) -> CallLengths:
    return CallLengths(*(np.array([tokens]) for tokens in (prompt, cached, output)))


def trial(calls: CallLengths, **room: int) -> EngineTrial:
    return EngineTrial(A100, EngineRoom(**room), calls, Promise())


def test_a_lone_call_on_an_engine_keeps_what_the_model_allows() -> None:
    calm = trial(lengths(1_000, 100))
    assert calm.kept(0.05, 1) == 1.0
    assert trial(lengths(30_000, 100)).kept(0.05, 1) == 0.0, "its prompt alone takes over a second"


def test_answers_that_take_longer_than_the_trial_are_judged_by_their_pace() -> None:
    reasoning = trial(lengths(1_000, 3_000))
    assert [reasoning.kept(0.1, num_engines) for num_engines in (1, 4, 16)] == [1.0] * 3
    one, sixteen = reasoning.rate_per_s(1), reasoning.rate_per_s(16)
    assert 16 * one < sixteen < 24 * one


def test_what_an_engine_holds_falls_with_the_work_of_calls_and_rises_with_what_is_cached() -> None:
    usual = trial(lengths(1_000, 100)).rate_per_s(1)
    longer = trial(lengths(2_000, 100)).rate_per_s(1)
    cached = trial(lengths(2_000, 100, cached=1_500)).rate_per_s(1)
    assert longer < usual < cached


def test_calls_that_no_engine_serves_in_time_are_load_and_not_judged() -> None:
    prompts = np.where(np.arange(1_000) < 20, 12_000, 600)
    mixed = trial(CallLengths(prompts, np.zeros_like(prompts), np.full(1_000, 150)))
    one = fleet_capacity(mixed, 1.0, 1)
    assert one.hopeless == pytest.approx((0.02, 0.0))
    assert one.work(1) > 1.5 * mixed.rate_per_s(1)
    assert fleet_capacity(trial(lengths(30_000, 100)), 1.0, 1).hopeless == (1.0, 0.0)


def test_engines_without_room_for_kv_hold_less() -> None:
    calls = lengths(1_000, 400)
    assert trial(calls, kv_tokens=10_000).rate_per_s(1) < 0.7 * trial(calls).rate_per_s(1)


def test_many_engines_hold_more_each_than_one() -> None:
    found = trial(lengths(1_000, 100))
    assert found.rate_per_s(4) > 4 * found.rate_per_s(1)


def test_of_short_calls_as_many_are_tried_as_show_a_queue_and_no_more() -> None:
    short = trial(lengths(60, 1, cached=45))
    capacity = fleet_capacity(short, short.least_s, 16)
    assert set(capacity.work_by_size) == {1}
    assert capacity.work(1) == pytest.approx(1.096, rel=0.05), "as 960 s of it give"
    patient = replace(short, promise=Promise(ttft_s=5.0))
    assert short.least_s * patient.rate_per_s(1) == pytest.approx(1.096, rel=0.05)


def test_the_capacity_of_sizes_between_is_read_from_a_line() -> None:
    capacity = FleetCapacity({1: 0.5, 4: 2.4})
    assert capacity.work(1) == 0.5
    assert capacity.work(2) == pytest.approx(2 * 0.55)
    assert capacity.work(8) == pytest.approx(8 * 0.6)
    assert [capacity.fewest(work, 1, 16) for work in (0.0, 0.5, 0.51, 2.4, 99.0)] == [
        1,
        1,
        2,
        4,
        16,
    ]


def wave(minute: int, scale: float = 1.0) -> float:
    """A day's tide between 2 and 10."""
    return scale * (6 - 4 * math.cos(2 * math.pi * minute / DAY))


def test_a_forecast_without_minutes_is_none_and_the_first_leaves_much_room() -> None:
    forecast = TideForecast(4)
    assert forecast.forecast() is None
    forecast.add(5.0)
    first = forecast.forecast()
    assert first is not None
    assert first.expected == 5.0
    assert first.high > 1.3 * first.expected


def test_the_margin_is_learnt_from_the_forecasts_own_errors() -> None:
    rng = np.random.default_rng(0)
    covered, margins = {}, {}
    for spread in (0.02, 0.2):
        forecast, hits = TideForecast(4, 0.9), []
        ahead: list[LoadForecast] = []
        for minute in range(2_000):
            load = wave(minute) * math.exp(rng.normal(0, spread))
            if len(ahead) == 4 and minute > 500:
                hits.append(load <= ahead[0].high)
                margins[spread] = ahead[0].high / ahead[0].expected
            forecast.add(load)
            told = forecast.forecast()
            assert told is not None
            ahead = [*ahead, told][-4:]
        covered[spread] = np.mean(hits)
    assert margins[0.02] < margins[0.2]
    assert all(0.8 < share < 0.97 for share in covered.values())


def test_a_jump_at_the_same_time_of_every_day_is_foreseen_from_the_second_day_on() -> None:
    forecast = TideForecast(4)
    for minute in range(3 * DAY + 600 - 3):
        hour = minute % DAY // 60
        forecast.add(9.0 if 10 <= hour < 12 else 5.0)
    told = forecast.forecast()
    assert told is not None
    assert told.high > 6.5


def test_what_is_ahead_is_as_yesterday_times_what_today_is_of_it() -> None:
    forecast = TideForecast(4)
    assert forecast.mean_ahead(60) is None
    for minute in range(2 * DAY):
        forecast.add(wave(minute, 1.0 if minute < DAY else 1.2))
    night = forecast.mean_ahead(120)
    assert night == pytest.approx(1.44 * np.mean([wave(minute) for minute in range(120)]), rel=0.05)


def test_a_day_of_another_size_is_as_now_by_the_course_of_the_day_before() -> None:
    forecast = TideForecast(4)
    for load, minutes in ((0.5, DAY), (5.0, DAY // 2)):
        for _ in range(minutes):
            forecast.add(load)
    assert forecast.mean_ahead(360) == pytest.approx(5.0)
    for load, minutes in ((5.0, DAY), (0.5, 100)):
        for _ in range(minutes):
            forecast.add(load)
    assert forecast.mean_ahead(360) == pytest.approx(2.5), "it may come back as it was"


def test_what_engines_are_believed_to_hold_is_corrected_by_what_callers_feel() -> None:
    correction = CapacityCorrection()
    correction.learn(0.5, 1000, 0)
    assert correction.factor == 1.0, "engines with little to do tell nothing"
    for _ in range(50):
        correction.learn(0.9, 1000, 0)
    assert 1.05 < correction.factor < 1.15
    for _ in range(20):
        correction.learn(0.9, 1000, 50)
    assert correction.factor < 1.0


def test_a_late_call_among_few_says_nothing_of_what_engines_hold() -> None:
    """0.5 % of calls are late, of 1 % that may be, and engines are half filled."""
    correction, rng = CapacityCorrection(), np.random.default_rng(1)
    for num_calls in rng.poisson(20, 1_440):
        correction.learn(0.5, int(num_calls), int(rng.binomial(num_calls, 0.005)))
    assert correction.factor == 1.0
    for _ in range(100):
        correction.learn(0.5, 20, 1)
    assert correction.factor < 0.8, "engines that hold less than is believed are never filled"
    after_a_night = CapacityCorrection()
    for _ in range(480):
        after_a_night.learn(0.1, 1, 0)
    after_a_night.learn(0.9, 300, 60)
    assert after_a_night.factor > 0.85


def ask(expected: float, high: float, *jobs: JobNeed, has_rows: bool = False) -> FleetNeeds:
    return FleetNeeds(LoadForecast(expected, high, LoadRule.LEVEL), jobs, has_rows)


def test_the_number_goes_up_at_once_and_down_after_a_while() -> None:
    sizer = FleetSizer(TideSettings(1, 10, down_after_s=300))
    number, numbers = 1, []
    for minute, high in enumerate([3.5, 6.5, 2.5, 2.5, 4.5, 2.5, 2.5, 2.5, 2.5, 2.5]):
        decision = sizer.decide(60.0 * minute, number, ask(high - 1, high), ALIKE)
        number = decision.replicas
        numbers.append(number)
    assert numbers == [4, 7, 7, 7, 7, 7, 5, 5, 5, 3]
    heir, early = FleetSizer(TideSettings(1, 10)), ask(1, 2)
    assert heir.decide(0.0, 5, early, ALIKE).replicas == 5, "who led before may have needed five"
    assert heir.decide(600.0, 5, early, ALIKE).replicas == 2


@pytest.mark.parametrize(
    ("asked", "number", "cause", "words"),
    [
        (ask(0.2, 0.5), 2, Cause.MIN, "2, which is min: calls fill 0.2 engines"),
        (ask(4.0, 5.5), 6, Cause.CALLS, "6: calls fill 4.0 engines, 5.5 at most, by the last"),
        (ask(11.0, 12.5), 8, Cause.MAX, "8, which is max: calls fill"),
        (ask(0.5, 1.0, has_rows=True), 3, Cause.OFFLINE_MIN, "3, which is offline_min"),
        (
            ask(1.5, 2.0, JobNeed("nightly", 7.5 * 3_600, 4 * 3_600)),
            4,
            Cause.DEADLINE,
            "4, so that nightly meets its deadline: calls fill",
        ),
    ],
)
def test_each_number_is_explained(asked: FleetNeeds, number: int, cause: Cause, words: str) -> None:
    sizer = FleetSizer(TideSettings(2, 8, offline_min=3))
    decision = sizer.decide(0.0, 2, asked, ALIKE)
    assert (decision.replicas, decision.cause) == (number, cause)
    assert decision.reason.startswith(words)


def test_fewer_that_would_do_are_named_while_they_are_waited_for() -> None:
    sizer = FleetSizer(TideSettings(1, 8))
    sizer.decide(0.0, 1, ask(4, 5), ALIKE)
    decision = sizer.decide(60.0, 5, ask(1, 2), ALIKE)
    assert decision.cause is Cause.PATIENCE
    assert decision.reason.startswith("5, though 2 would do: not for 10 min yet")


def test_without_a_minute_of_calls_the_number_stays() -> None:
    decision = FleetSizer(TideSettings(1, 8)).decide(0.0, 3, FleetNeeds(None), ALIKE)
    assert (decision.replicas, decision.cause) == (3, Cause.UNKNOWN)


def test_jobs_without_deadlines_buy_nothing_and_those_with_share_the_time() -> None:
    hour, whole = 3_600.0, TideSettings(1, 8, reserve=0.0, reserve_s=0.0)
    assert needed_work((), 2.0, whole) == ("", 0.0)
    near, far = JobNeed("near", hour, hour), JobNeed("far", hour, 4 * hour)
    assert needed_work([far, near], 2.0, whole) == ("near", 3.0)
    large = far._replace(work_s=3 * hour)
    assert needed_work([large, near], 2.0, whole) == ("near", 3.0)
    assert needed_work([large._replace(work_s=20 * hour), near], 2.0, whole) == ("far", 7.25)
    assert needed_work([near._replace(calls=0.5)], 2.0, whole) == ("near", 1.5)
    half = TideSettings(1, 8, reserve=0.25, reserve_s=900.0)
    assert needed_work([near], 2.0, half) == ("near", 4.0)
