"""How much KV the online requests will hold soon (Echo, section 5.3), from the recent past.

Which statistic of it is taken, `ForecastRule` says.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from enum import StrEnum
from itertools import repeat

MINUTE_S = 60


class RecentValues:
    """The latest `num_kept` numbers, with their mean and spread in O(1); exact, being whole."""

    __slots__ = ("_num_kept", "_squares", "_total", "values")

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._total = self._squares = 0
        self.values: deque[int] = deque()

    def add(self, value: int, times: int = 1) -> None:
        """Keep a number, so many times over, and drop what is too old."""
        self.values.extend(repeat(value, times))
        self._total += times * value
        self._squares += times * value * value
        while len(self.values) > self._num_kept:
            oldest = self.values.popleft()
            self._total -= oldest
            self._squares -= oldest * oldest

    def mean_plus(self, sigmas: float) -> float:
        """Mean + `sigmas` standard deviations; 0 without numbers."""
        num = len(self.values)
        if not num:
            return 0.0
        variance = (num * self._squares - self._total * self._total) / (num * num)
        return self._total / num + sigmas * math.sqrt(variance)


class MinuteTops:
    """The tops of all minutes of the last `window_s` seconds, one minute beginning each second.

    Each second's end costs O(1) on average; memory is one number a second.
    """

    def __init__(self, window_s: int) -> None:
        self.tops = RecentValues(max(1, window_s - MINUTE_S + 1))
        self._second = 0
        # Falling values with their seconds: the first is the top of the minute that ends now.
        self._candidates: deque[tuple[int, int]] = deque()

    def end_second(self, max_blocks: int, times: int = 1) -> None:
        """A second with this highest use has ended; or so many, after a minute of such seconds."""
        candidates = self._candidates
        while candidates and candidates[-1][1] <= max_blocks:
            candidates.pop()
        self._second += times
        candidates.append((self._second - 1, max_blocks))
        if candidates[0][0] < self._second - MINUTE_S:
            candidates.popleft()
        if self._second >= MINUTE_S:
            self.tops.add(candidates[0][1], times)


DEFAULT_WINDOW_S = 900
LEAST_DATA_S = 300
"""Below so many seconds of data there is no forecast; the caller then reserves 15 %."""


class ForecastRule(StrEnum):
    """What stands for the memory that online requests will want."""

    MEAN_SIGMA = "mean-sigma"
    """mean + k * sigma, as the paper has it."""
    QUANTILE = "quantile"
    """The empirical quantile, interpolated linearly."""
    GROWTH = "growth"
    """What they hold now, and the quantile of how much they grew within `GROWTH_HORIZON_S`: the
    work that the reserve decides on ends within seconds."""
    MINUTE_MAX = "minute-max"
    """mean + k * sigma of the highest use within each minute, a minute beginning every second.

    The paper's rule takes the same of single seconds, which half of all minutes exceed somewhere.
    """


GROWTH_HORIZON_S = 2
DEFAULT_QUANTILES = {ForecastRule.QUANTILE: 0.98, ForecastRule.GROWTH: 0.9}
DEFAULT_SIGMAS = {ForecastRule.MEAN_SIGMA: 2.0, ForecastRule.MINUTE_MAX: 3.0}


class KvForecast:
    """The forecast over a sliding window of the highest use in each second.

    Memory is one number a second. The value holds between samples, so an engine that sleeps
    repeats its last one. The forecast changes only when a second has ended; the current use is
    for the caller to add (`max(now, forecast)`). Sampling costs 0.7 us, a second's end 3 us, and a
    long sleep little more than a minute.
    """

    def __init__(
        self,
        *,
        window_s: int = DEFAULT_WINDOW_S,
        least_data_s: int = LEAST_DATA_S,
        rule: ForecastRule = ForecastRule.MEAN_SIGMA,
        sigmas: float | None = None,
        quantile: float | None = None,
    ) -> None:
        """`sigmas` is for MEAN_SIGMA and MINUTE_MAX, `quantile` (0 to 1) for the others; None is
        the rule's default.

        Raises ValueError when the window is shorter than the least data or a value is off range.
        """
        if quantile is None:
            quantile = DEFAULT_QUANTILES.get(rule, 0.0)
        if sigmas is None:
            sigmas = DEFAULT_SIGMAS.get(rule, 0.0)
        if not 0 < least_data_s <= window_s or sigmas < 0 or not 0 <= quantile <= 1:
            raise ValueError("forecast: needs 0 < least_data_s <= window_s, sigmas >= 0, 0..1")
        self._window_s = window_s
        self._least_data_s = least_data_s
        self._rule = rule
        self._sigmas = sigmas
        self._quantile = quantile
        self._maxima = RecentValues(window_s)
        self._measures: deque[int] = deque(maxlen=window_s)
        self._sorted: list[int] = []
        self._tops = MinuteTops(window_s)
        self._second: int | None = None
        self._latest_blocks = 0
        self._second_max_blocks = 0
        self._forecast_blocks: int | None = None

    @property
    def num_seconds(self) -> int:
        """Ended seconds in the window."""
        return len(self._maxima.values)

    @property
    def forecast_blocks(self) -> int | None:
        """Blocks that online requests may want soon, rounded up; None: not enough data yet."""
        return self._forecast_blocks

    def sample(self, now_s: float, online_blocks: int) -> None:
        """Online requests hold `online_blocks` from `now_s` on. A clock that steps back counts as
        standing still."""
        second = int(now_s)
        if self._second is None:
            self._second = second
        elif second > self._second:
            self._end_seconds(second - self._second)
            self._second = second
        self._latest_blocks = online_blocks
        if online_blocks > self._second_max_blocks:
            self._second_max_blocks = online_blocks

    def _end_seconds(self, num_seconds: int) -> None:
        if num_seconds > self._window_s:
            num_seconds = self._window_s + 1
        self._end_second(self._second_max_blocks)
        num_asleep = num_seconds - 1
        for _ in range(min(num_asleep, MINUTE_S)):
            self._end_second(self._latest_blocks)
        if num_asleep > MINUTE_S:
            self._end_second(self._latest_blocks, num_asleep - MINUTE_S)
        self._second_max_blocks = self._latest_blocks

    def _end_second(self, max_blocks: int, times: int = 1) -> None:
        """One second has ended; or so many that differ in nothing from the minute before them."""
        self._maxima.add(max_blocks, times)
        seconds = self._maxima.values
        if self._rule is ForecastRule.QUANTILE:
            self._measure(max_blocks, times)
        elif self._rule is ForecastRule.GROWTH and len(seconds) > GROWTH_HORIZON_S:
            latest = [seconds[-i] for i in range(1, GROWTH_HORIZON_S + 2)]
            self._measure(max(latest) - latest[-1], times)
        elif self._rule is ForecastRule.MINUTE_MAX:
            self._tops.end_second(max_blocks, times)
        if len(seconds) >= self._least_data_s:
            self._forecast_blocks = math.ceil(self._forecast() - 1e-9)

    def _measure(self, blocks: int, times: int) -> None:
        """Add what the quantile is of, and drop what is older than the window."""
        if times > 1:
            self._measures.extend(repeat(blocks, times))
            self._sorted = sorted(self._measures)
            return
        if len(self._measures) == self._window_s:
            del self._sorted[bisect_left(self._sorted, self._measures[0])]
        self._measures.append(blocks)
        insort(self._sorted, blocks)

    def _forecast(self) -> float:
        if self._rule is ForecastRule.MEAN_SIGMA:
            return self._maxima.mean_plus(self._sigmas)
        if self._rule is ForecastRule.MINUTE_MAX:
            return self._tops.tops.mean_plus(self._sigmas)
        base = self._maxima.values[-1] if self._rule is ForecastRule.GROWTH else 0
        return base + self._quantile_blocks()

    def _quantile_blocks(self) -> float:
        if not self._sorted:
            return 0.0
        last = len(self._sorted) - 1
        place = self._quantile * last
        below = self._sorted[int(place)]
        above = self._sorted[min(int(place) + 1, last)]
        return below + (above - below) * (place - int(place))
