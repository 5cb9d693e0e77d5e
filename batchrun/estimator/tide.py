"""How many replicas a fleet needs: a forecast of what calls will ask of it by the time that another
replica could be there, what jobs with deadlines need besides, and when to go down again. And when
in the day calls leave the most room, for jobs that may wait.

Work is in engine-seconds a second, by the prices of an engine: what prompts and answers add to
steps. Nothing here reads a clock; a minute is told when it has ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.estimator.engine_capacity import FleetCapacity
from batchrun.quantities import duration

MINUTE_S = 60.0
DAY = 1_440
"""Minutes of a day."""
KEPT = 7 * DAY
"""So many minutes are remembered."""
FloatArray = npt.NDArray[np.float64]
LEVEL, TREND = 3, 12
"""Minutes that the level is the mean of, and over which the trend is a line."""
SMOOTH = 3
"""Minutes on either side of a time of an earlier day that stand for it."""
ERRORS = DAY
"""Errors are those of so many minutes."""
LEAST_ERRORS = 20
FIRST_MARGIN = 0.35
"""Logarithm of what is planned for over what is expected, until errors are known."""
MOST_GROWTH = 2.0
"""A time of day makes the load grow or shrink by no more than this factor."""


class LoadRule(StrEnum):
    """What the minute to come is taken to be like."""

    LEVEL = "the last minutes"
    TREND = "their trend"
    DAY = "their course at this time of earlier days"


class LoadForecast(NamedTuple):
    """Work a second, in the minute that is `ahead` minutes away: as expected, and what is planned
    for, so that it suffices in a given share of minutes."""

    expected: float
    high: float
    rule: LoadRule


@dataclass(slots=True)
class TideForecast:
    """Foretells the work of a minute that is `ahead` minutes from the last that has ended.

    Three rules guess. The errors of each at this distance, over the last day, are known: what is
    planned for is the guess times their `quantile`. The rule counts whose plans exceed what came
    by the least.
    """

    ahead: int
    quantile: float = 0.97
    _loads: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _guesses: deque[dict[LoadRule, float]] = field(init=False)
    _errors: dict[LoadRule, deque[float]] = field(init=False)

    def __post_init__(self) -> None:
        self._guesses = deque(maxlen=self.ahead)
        self._errors = {rule: deque(maxlen=ERRORS) for rule in LoadRule}

    @property
    def loads(self) -> list[float]:
        """Work a second of each minute that is known, the oldest first."""
        return list(self._loads)

    def add(self, work: float) -> None:
        """A minute has ended that brought so much work a second."""
        self._loads.append(work)
        if len(self._guesses) == self.ahead:
            for rule, guess in self._guesses[0].items():
                if guess > 0 and work > 0:
                    self._errors[rule].append(math.log(work / guess))
        self._guesses.append(self._guess())

    def forecast(self) -> LoadForecast | None:
        """None while no minute is known."""
        if not self._guesses:
            return None
        found = []
        for rule, guess in self._guesses[-1].items():
            errors = np.array(self._errors[rule])
            if len(errors) < LEAST_ERRORS:
                first = LoadForecast(guess, guess * math.exp(FIRST_MARGIN), rule)
                found.append((FIRST_MARGIN, first))
                continue
            margin, median = np.quantile(errors, (self.quantile, 0.5)).tolist()
            above = errors - margin
            loss = float(np.maximum(self.quantile * above, (self.quantile - 1) * above).mean())
            told = LoadForecast(guess * math.exp(median), guess * math.exp(margin), rule)
            found.append((loss, told))
        return min(found, key=lambda each: each[0])[1]

    def mean_ahead(self, minutes: int) -> float | None:
        """Work a second to expect on average over so many minutes to come: as the same minutes of
        the day before were, times what today is of yesterday; without a day before, as now."""
        loads = np.array(self._loads)
        if not len(loads):
            return None
        level = float(loads[-LEVEL:].mean())
        if len(loads) < DAY + TREND:
            return level
        before = loads[-DAY : min(len(loads), len(loads) - DAY + max(minutes, 1))]
        since = max(TREND, min(60, len(loads) - DAY))
        ratio = float(loads[-since:].sum()) / max(float(loads[-DAY - since : -DAY].sum()), 1e-9)
        ahead = float(before.mean())
        if ratio <= MOST_GROWTH:
            return ahead * max(ratio, 1 / MOST_GROWTH)
        # Today is of another size: at least as now, times the course of yesterday.
        course = ahead / max(self._day_before(-(LEVEL - 1) / 2), 1e-9)
        return max(ahead * MOST_GROWTH, level * min(max(course, 1 / MOST_GROWTH), MOST_GROWTH))

    def _guess(self) -> dict[LoadRule, float]:
        loads = np.array([*islice(reversed(self._loads), max(LEVEL, TREND))][::-1])
        level = float(loads[-LEVEL:].mean())
        guesses = {LoadRule.LEVEL: level}
        if len(loads) == TREND:
            slope = float(np.polyfit(np.arange(TREND), loads, 1)[0])
            at_end = float(loads.mean()) + slope * (TREND - 1) / 2
            guesses[LoadRule.TREND] = max(at_end + slope * self.ahead, 0.25 * level)
        if len(self._loads) >= DAY + SMOOTH + LEVEL:
            now, then = self._day_before(-(LEVEL - 1) / 2), self._day_before(self.ahead)
            if now > 0:
                growth = min(max(then / now, 1 / MOST_GROWTH), MOST_GROWTH)
                guesses[LoadRule.DAY] = level * growth
        return guesses

    def _day_before(self, minutes: float) -> float:
        """The mean around the time of yesterday that is so many minutes later than now."""
        middle = len(self._loads) - 1 - DAY + round(minutes)
        span = range(max(0, middle - SMOOTH), min(len(self._loads), middle + SMOOTH + 1))
        return sum(self._loads[i] for i in span) / len(span)


RESERVE, RESERVE_S = 0.1, 600.0
"""Kept back of the time to a deadline: this share, and so much besides."""
MOST_KEPT = 0.5
"""Of the little time that is left before a deadline no larger share is kept back."""
COURSE = 15
"""Minutes of the day that are taken together, so that no job stops and goes by chance."""
ALIKE = 1.02
"""So little more load is not worth waiting for less."""


def course_of_day(loads: Sequence[float]) -> FloatArray | None:
    """What the minutes of a day that begins now bring on average, smoothed; None as long as no
    whole day is known. `loads` are those of the minutes that have ended, the oldest first."""
    num_days = len(loads) // DAY
    if not num_days:
        return None
    padded = np.pad(np.array(loads), COURSE // 2, mode="edge")
    smooth = np.convolve(padded, np.full(COURSE, 1 / COURSE), "valid")
    day: FloatArray = smooth[-num_days * DAY :].reshape(num_days, DAY).mean(axis=0)
    return day


def minutes_to_cheap_time(day: FloatArray | None, work_s: float, left_s: float) -> int:
    """In how many minutes work of so many seconds, due in `left_s`, should go on: 0 in one of the
    minutes until then that bring the least load, of as many as the work takes, and while no `day`
    is known."""
    needed = math.ceil(work_s / MINUTE_S)
    left = int(((1 - RESERVE) * left_s - RESERVE_S) / MINUTE_S)
    if day is None or needed >= left:
        return 0
    course = np.resize(day, min(left, KEPT))
    most = np.partition(course, min(needed, len(course) - 1))[min(needed, len(course) - 1)]
    return int(np.argmax(course <= ALIKE * most))


FILLED = 0.85
"""Minutes in which calls fill less of what is believed tell that it is too much at most: where late
calls are `CLEARLY` too many."""
CLEARLY = -1.0
LEAST_LATE = 5.0
"""Minutes are judged together until so many calls may have been late: fewer may be by chance."""
STEP, MOST_DOWN = 0.002, 10.0
MOST_MINUTES = 10
"""So many count of those that were judged together: a bad one among quiet ones is no bad hour."""
LEAST_CORRECTION, MOST_CORRECTION = 0.6, 1.3


@dataclass(slots=True)
class CapacityCorrection:
    """What engines are believed to hold is multiplied by this: it falls while too many calls are
    late, and rises while fewer are than may be where they are filled."""

    may_miss: float = 0.01
    factor: float = 1.0
    _minutes: int = 0
    _filled: float = 0.0
    _calls: float = 0.0
    _late: float = 0.0

    def learn(self, filled: float, num_calls: float, num_late: float) -> None:
        """In a minute calls filled such a share of what is believed, and so many were late."""
        self._minutes += 1
        self._filled += filled * num_calls
        self._calls += num_calls
        self._late += num_late
        if self._calls * self.may_miss < LEAST_LATE:
            return
        room = max(1 - self._late / self._calls / self.may_miss, -MOST_DOWN)
        if room <= CLEARLY or self._filled / self._calls >= FILLED:
            factor = self.factor * math.exp(STEP * room * min(self._minutes, MOST_MINUTES))
            self.factor = min(max(factor, LEAST_CORRECTION), MOST_CORRECTION)
        self._minutes, self._filled, self._calls, self._late = 0, 0.0, 0.0, 0.0


class JobNeed(NamedTuple):
    """A job with a deadline: work that it has left (engine-seconds), the time for it, and the work
    a second that calls are expected to bring meanwhile; None: as in the minute that is foretold."""

    name: str
    work_s: float
    left_s: float
    calls: float | None = None


class FleetNeeds(NamedTuple):
    """What a fleet is asked for: the forecast of its calls, None while no minute is known, and jobs
    with deadlines. `has_rows`: any job has rows to run."""

    load: LoadForecast | None
    jobs: Sequence[JobNeed] = ()
    has_rows: bool = False


class Cause(StrEnum):
    """What set the number."""

    CALLS = "calls"
    DEADLINE = "deadline"
    OFFLINE_MIN = "offline_min"
    MIN = "min"
    MAX = "max"
    PATIENCE = "patience"
    UNKNOWN = "unknown"


class FleetDecision(NamedTuple):
    """How many replicas there shall be, and why, also in words.

    So many would do for the calls alone, and for those that are expected with the jobs that have
    deadlines; 0 without. The forecast is in engines: how many of a fleet of this size it fills."""

    replicas: int
    cause: Cause
    reason: str
    for_calls: int = 0
    for_jobs: int = 0
    expected: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class TideSettings:
    """`low` to `high` replicas; `offline_min` at least while jobs have rows to run. A lower number
    must have sufficed for `down_after_s` before it is gone down to. Of the time to a deadline,
    `reserve` and `reserve_s` are kept back."""

    low: int
    high: int
    offline_min: int = 0
    down_after_s: float = 600.0
    reserve: float = RESERVE
    reserve_s: float = RESERVE_S


@dataclass(slots=True)
class FleetSizer:
    """Decides how many replicas there shall be: up at once, down once fewer have sufficed."""

    settings: TideSettings
    _needs: deque[tuple[float, int]] = field(default_factory=deque)

    def decide(
        self, now_s: float, num_wanted: int, asked: FleetNeeds, capacity: FleetCapacity
    ) -> FleetDecision:
        """`num_wanted` are wanted now. Instants are on one clock, any."""
        settings, load = self.settings, asked.load
        low, high = settings.low, settings.high
        if load is None:
            why = f"{num_wanted} stay: no minute of calls is known yet"
            return FleetDecision(num_wanted, Cause.UNKNOWN, why)
        for_calls = capacity.fewest(load.high, low, high)
        floor = min(settings.offline_min, high) if asked.has_rows else 0
        pressing, work = needed_work(asked.jobs, load.expected, settings)
        for_jobs = capacity.fewest(work, low, high) if pressing else 0
        need = max(for_calls, for_jobs, floor, low)
        number = self._with_patience(now_s, need, num_wanted)
        each = capacity.work(number) / number
        expected, most = load.expected / each, load.high / each
        calls = f"calls fill {expected:.1f} engines, {most:.1f} at most, by {load.rule}"
        cause, why = Cause.CALLS, ""
        if number > need:
            patience = duration(settings.down_after_s)
            cause, why = Cause.PATIENCE, f", though {need} would do: not for {patience} yet"
        elif max(load.high, work) > capacity.work(number):
            cause, why = Cause.MAX, ", which is max"
        elif for_jobs > max(for_calls, floor, low):
            cause, why = Cause.DEADLINE, f", so that {pressing} meets its deadline"
        elif floor > max(for_calls, low):
            cause, why = Cause.OFFLINE_MIN, ", which is offline_min while jobs have rows"
        elif need == low:
            cause, why = Cause.MIN, ", which is min"
        reason = f"{number}{why}: {calls}"
        return FleetDecision(number, cause, reason, for_calls, for_jobs, expected, most)

    def _with_patience(self, now_s: float, need: int, num_wanted: int) -> int:
        needs = self._needs
        if not needs:  # Who decided before may have needed all of them a moment ago.
            needs.append((now_s, min(num_wanted, self.settings.high)))
        needs.append((now_s, need))
        while needs[0][0] <= now_s - self.settings.down_after_s:
            needs.popleft()
        if need >= num_wanted:
            return need
        return min(max(number for _, number in needs), num_wanted)


def needed_work(
    jobs: Sequence[JobNeed], expected: float, settings: TideSettings
) -> tuple[str, float]:
    """The job that sets the pace, and the work a second of calls and jobs together until its
    deadline; no name without jobs. All work up to a deadline is due by then (the densities of Yao,
    Demers and Shenker, FOCS 1995); calls bring `expected` where a job does not say."""
    pressing, most, total_s = "", 0.0, 0.0
    for job in sorted(jobs, key=lambda each: each.left_s):
        total_s += job.work_s
        kept_s = min(settings.reserve_s, MOST_KEPT * job.left_s)
        time_s = (1 - settings.reserve) * job.left_s - kept_s
        work = total_s / max(time_s, MINUTE_S) + (expected if job.calls is None else job.calls)
        if work > most:
            pressing, most = job.name, work
    return pressing, most
