"""The KV forecast against the same statistics from numpy."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from batchrun.estimator.forecast import ForecastRule, KvForecast
from benchmarks.forecast import judge


def fed(forecast: KvForecast, blocks_by_second: list[int]) -> KvForecast:
    """One sample in the middle of each second, then the start of the next."""
    for second, blocks in enumerate(blocks_by_second):
        forecast.sample(second + 0.1, 0)
        forecast.sample(second + 0.5, blocks)
        forecast.sample(second + 0.9, 0)
    forecast.sample(len(blocks_by_second) + 0.0, 0)
    return forecast


def random_blocks(seed: int, num_seconds: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(blocks) for blocks in rng.lognormal(6, 0.7, num_seconds)]


def test_there_is_no_forecast_before_five_minutes() -> None:
    assert fed(KvForecast(), random_blocks(0, 299)).forecast_blocks is None
    assert fed(KvForecast(), random_blocks(0, 300)).forecast_blocks is not None


@pytest.mark.parametrize("num_seconds", [300, 899, 900, 2500])
def test_the_forecast_is_mean_and_two_sigma_of_the_window(num_seconds: int) -> None:
    blocks = random_blocks(1, num_seconds)

    forecast = fed(KvForecast(), blocks)

    window = np.array(blocks[-900:])
    assert forecast.num_seconds == len(window)
    assert forecast.forecast_blocks == math.ceil(window.mean() + 2 * window.std())


@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.95, 1.0])
def test_the_quantile_is_numpys(quantile: float) -> None:
    blocks = random_blocks(2, 1300)

    forecast = fed(KvForecast(rule=ForecastRule.QUANTILE, quantile=quantile), blocks)

    assert forecast.forecast_blocks == math.ceil(np.quantile(blocks[-900:], quantile) - 1e-9)


@pytest.mark.parametrize("num_seconds", [300, 899, 1500])
def test_minute_max_is_mean_and_three_sigma_of_the_tops_of_all_minutes(num_seconds: int) -> None:
    blocks = random_blocks(4, num_seconds)

    forecast = fed(KvForecast(rule=ForecastRule.MINUTE_MAX), blocks)

    tops = np.lib.stride_tricks.sliding_window_view(blocks[-900:], 60).max(axis=1)
    assert forecast.forecast_blocks == math.ceil(tops.mean() + 3 * tops.std() - 1e-9)


def test_use_holds_until_the_next_sample() -> None:
    forecast = KvForecast(window_s=10, least_data_s=10, sigmas=0.0)
    forecast.sample(0.0, 50)
    forecast.sample(8.5, 100)
    forecast.sample(10.0, 0)

    assert forecast.forecast_blocks == math.ceil((8 * 50 + 2 * 100) / 10)


def test_a_second_counts_its_highest_use_and_what_it_began_with() -> None:
    forecast = KvForecast(window_s=2, least_data_s=2, sigmas=0.0)
    for now_s, blocks in ((0.2, 10), (0.4, 90), (0.6, 30), (1.5, 20), (2.0, 0)):
        forecast.sample(now_s, blocks)

    assert forecast.forecast_blocks == (90 + 30) / 2


def test_a_long_sleep_fills_the_window() -> None:
    forecast = fed(KvForecast(), random_blocks(3, 400))
    forecast.sample(400.5, 700)
    forecast.sample(1_000_000.0, 5)

    assert forecast.forecast_blocks == 700
    assert forecast.num_seconds == 900


@pytest.mark.parametrize("rule", ForecastRule)
@pytest.mark.parametrize("asleep_s", [1, 61, 62, 200, 301, 999])
def test_a_sleep_is_as_many_seconds_that_repeat_the_last(rule: ForecastRule, asleep_s: int) -> None:
    asleep, awake = [KvForecast(rule=rule, window_s=300) for _ in range(2)]
    blocks = random_blocks(asleep_s, 700)
    for forecast in (asleep, awake):
        fed(forecast, blocks[:290])
        forecast.sample(290.5, 300)
    for second in range(291, 290 + asleep_s):
        awake.sample(second, 300)
    for second, each in enumerate(blocks[290:], start=290 + asleep_s):
        for forecast in (asleep, awake):
            forecast.sample(second, each)
        assert asleep.forecast_blocks == awake.forecast_blocks
        assert asleep.num_seconds == awake.num_seconds


@pytest.mark.parametrize("rule", ForecastRule)
def test_a_long_sleep_ends_in_few_steps(rule: ForecastRule) -> None:
    forecast = KvForecast(rule=rule, window_s=86_400)
    fed(forecast, random_blocks(5, 400))
    num_calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        forecast.sample(40_000.0, 5)
    finally:
        sys.setprofile(None)
    assert num_calls < 1_000


def test_a_clock_that_steps_back_ends_no_second() -> None:
    forecast = KvForecast(window_s=3, least_data_s=1, sigmas=0.0)
    forecast.sample(5.0, 10)
    forecast.sample(2.0, 40)
    assert forecast.num_seconds == 0
    forecast.sample(6.0, 0)

    assert forecast.forecast_blocks == 40


def test_a_forecast_is_held_against_the_highest_use_of_the_minute_after_it() -> None:
    quiet, burst = [100] * 60, [100] * 59 + [5000]
    by_second = quiet * 6 + burst + quiet
    samples = [each for s, top in enumerate([*by_second, 0]) for each in ((s, top), (s + 0.9, 0))]

    forecasts, tops = judge(KvForecast(sigmas=0.0), samples)

    # After 5 minutes at 100 the forecast is 100; the burst raises it to 112 for the last minute.
    assert forecasts.tolist() == [100, 100, 112]
    assert tops.tolist() == [100, 5000, 100]


def test_no_minute_is_judged_before_a_forecast_was_made() -> None:
    forecasts, tops = judge(KvForecast(), [(float(second), 100) for second in range(330)])
    assert (forecasts.tolist(), tops.tolist()) == ([], [])


@pytest.mark.parametrize(
    "wrong",
    [{"window_s": 100}, {"least_data_s": 0}, {"sigmas": -1.0}, {"quantile": 1.1}],
)
def test_settings_off_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="forecast"):
        KvForecast(**wrong)  # type: ignore[arg-type]
