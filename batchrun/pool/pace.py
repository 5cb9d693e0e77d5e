"""When jobs will be done: a best guess, and a range that is to hold nine times of ten.

From how fast offline work went, stretch by stretch: the tokens that all engines compute for it in a
second, the recent past weighing most. What was seen with other engines counts by their speeds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchrun.pool.deadlines import JobWork, tokens_ahead
from batchrun.pool.row_times import LastEnd

LEAST_STRETCHES = 3
PRIOR_SD = 0.12
"""Standard deviation of the logarithm of a pace about its forecast, before anything was seen."""
PRIOR_WEIGHT = 2.0
"""So many independent errors weigh as much as the prior."""
LEAST_WINDOW_S = 60.0
WINDOW_SHARE = 0.25
"""A forecast is the mean of so much of the time that it is for: the mix of rows changes slowly."""
RESIZE_SD = 0.5
"""Standard deviation of the logarithm of a pace for each unit by which that of the engines' speed
differs from what it was seen with: the calls beside rows stay, and take another share of them."""

Rates = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PaceForecast:
    """Computed tokens per second over some time to come, and the standard deviation of the
    logarithm of what really comes over that."""

    tokens_per_s: float
    log_sd: float


@dataclass(slots=True)
class PaceHistory:
    """Computed tokens per second in the last `num_stretches` stretches of `stretch_s`.

    Only time counts in which the engines had all the work that they take.
    """

    stretch_s: float
    num_stretches: int
    _rates: deque[float] = field(init=False)
    _speeds: deque[float] = field(init=False)
    _speed: float = 1.0
    _open_s: float = 0.0
    _open_tokens: float = 0.0

    def __post_init__(self) -> None:
        self._rates = deque(maxlen=self.num_stretches)
        self._speeds = deque(maxlen=self.num_stretches)

    @property
    def seen_s(self) -> float:
        """The time that is remembered, whole stretches only."""
        return len(self._rates) * self.stretch_s

    def add(self, elapsed_s: float, computed_tokens: float) -> None:
        """Time has passed, in which so many tokens came back; both are spread evenly."""
        self._open_s += elapsed_s
        self._open_tokens += computed_tokens
        while self._open_s >= self.stretch_s:
            tokens = self._open_tokens * self.stretch_s / self._open_s
            self._rates.append(tokens / self.stretch_s)
            self._speeds.append(self._speed)
            self._open_s -= self.stretch_s
            self._open_tokens -= tokens

    def resize(self, speed: float) -> None:
        """From now on all engines together are so fast, in any unit."""
        self._open_tokens *= speed / self._speed
        self._speed = speed

    def forecast(self, horizon_s: float) -> PaceForecast | None:
        """The mean pace over the next `horizon_s`; None until a few stretches were seen.

        Its doubt is the error that the same forecast made over the past, at that horizon or at a
        third of the past where that is shorter, and what the speed of other engines leaves open.
        """
        scales = self._speed / np.fromiter(self._speeds, np.float64)
        rates = np.fromiter(self._rates, np.float64) * scales
        if len(rates) < LEAST_STRETCHES or not rates.any():
            return None
        stretches = max(1, round(horizon_s / self.stretch_s))
        window = self._window(stretches)
        mean = float(rates[-window:].mean())
        if mean <= 0:
            return None
        horizon = min(stretches, max(1, len(rates) // LEAST_STRETCHES))
        errors = _past_errors(rates, horizon, self._window(horizon))
        num = len(errors) / horizon
        squares = float(errors @ errors) / max(len(errors), 1)
        variance = (num * squares + PRIOR_WEIGHT * PRIOR_SD**2) / (num + PRIOR_WEIGHT)
        resize_sd = RESIZE_SD * float(np.abs(np.log(scales[-window:])).mean())
        return PaceForecast(mean, math.hypot(math.sqrt(variance), resize_sd))

    def _window(self, stretches: int) -> int:
        """How many stretches a forecast for so many looks back on."""
        return max(1, round(LEAST_WINDOW_S / self.stretch_s), int(stretches * WINDOW_SHARE))


def _past_errors(rates: Rates, horizon: int, window: int) -> Rates:
    """Logarithms of what came over what was forecast, at every stretch of the past."""
    sums = np.concatenate([[0.0], np.cumsum(rates)])
    at = np.arange(horizon, len(rates) - horizon + 1)
    looked_back = np.minimum(at, window)
    before = (sums[at] - sums[at - looked_back]) / looked_back
    after = (sums[at + horizon] - sums[at]) / horizon
    is_known = (before > 0) & (after > 0)
    errors: Rates = np.log(after[is_known] / before[is_known])
    return errors


DEVIATIONS = 1.6
"""On either side of the best guess: about the 1.645 of normal errors."""
DOUBT_SD = 0.5
"""An estimate of work is off by its doubt at most, so by half of it on average."""
EARLY_S, LATE_S = 0.5, 2.0
"""The last rows end together or one by one: seconds added to either side."""
FINE_S, NUM_FINE = 5.0, 720
COARSE_S, NUM_COARSE = 300.0, 2_016
"""An hour in stretches of 5 s, a week in stretches of 5 minutes."""
FINE_HORIZON_S = 1_200.0
"""What is done sooner is predicted from the fine history."""

IN_FLIGHT_LOW, IN_FLIGHT = 0.85, 0.9
"""At a job's end no rows follow those in flight, which then go faster than the pace that was seen:
they take so much of the time that it gives them, at least and about."""
DRAIN_LOW, DRAIN, DRAIN_HIGH = 0.35, 0.55, 0.7
"""The last rows have the engines to themselves and take so much of what rows took beside others:
at least, about, and at most."""


class LastRows(NamedTuple):
    """What is known of a job's end: when its rows in flight will have ended, were they to go on
    beside as many others, and how many tokens all jobs have in flight. `are_sent`: the job has no
    other rows."""

    last_end: LastEnd
    in_flight_tokens: float
    are_sent: bool


class Completion(NamedTuple):
    """Seconds until a job is done; the range is to hold the truth with a probability of 0.9."""

    expected_s: float
    low_s: float
    high_s: float


@dataclass(slots=True)
class Completions:
    """The pace of all engines together, and when it brings jobs to their ends."""

    fine: PaceHistory = field(default_factory=lambda: PaceHistory(FINE_S, NUM_FINE))
    coarse: PaceHistory = field(default_factory=lambda: PaceHistory(COARSE_S, NUM_COARSE))

    @property
    def seen_s(self) -> float:
        """How much of the past the pace rests on."""
        return max(self.fine.seen_s, self.coarse.seen_s)

    @property
    def tokens_per_s(self) -> float | None:
        """The pace of the last minute; None while it is not known."""
        now = self.fine.forecast(0.0)
        return None if now is None else now.tokens_per_s

    def add(self, elapsed_s: float, computed_tokens: float) -> None:
        """Time has passed in which the engines had all the work that they take."""
        self.fine.add(elapsed_s, computed_tokens)
        self.coarse.add(elapsed_s, computed_tokens)

    def resize(self, speed: float) -> None:
        """From now on all engines together are so fast, in any unit."""
        self.fine.resize(speed)
        self.coarse.resize(speed)

    def predict(
        self,
        works: Mapping[str, JobWork],
        claims: Mapping[str, float],
        last_rows: Mapping[str, LastRows],
    ) -> dict[str, Completion]:
        """Of all jobs in `works`, which run beside each other; none while the pace is not known.

        `claims` are the shares that deadlines take off the fair shares.
        """
        ahead = tokens_ahead(works, claims)
        found = {
            job_id: self._of(ahead[job_id], work.doubt, last_rows.get(job_id))
            for job_id, work in works.items()
        }
        return {job_id: each for job_id, each in found.items() if each is not None}

    def _of(self, tokens: float, doubt: float, last: LastRows | None) -> Completion | None:
        """A job is done when its work is, at the pace that was seen, and not before the last of
        its rows has ended."""
        pace = self._pace(tokens)
        if pace is None:
            return None
        factor = math.exp(DEVIATIONS * math.hypot(pace.log_sd, DOUBT_SD * doubt))
        paced_s = tokens / pace.tokens_per_s
        low_s, high_s = paced_s / factor - EARLY_S, paced_s * factor + LATE_S
        if last is None:
            return Completion(paced_s, max(low_s, 0.0), high_s)
        unsent_tokens = 0.0 if last.are_sent else max(tokens - last.in_flight_tokens, 0.0)
        sent_s, end = unsent_tokens / pace.tokens_per_s, last.last_end
        in_flight_s = paced_s - sent_s
        low_s -= (1 - IN_FLIGHT_LOW) * in_flight_s / factor
        expected_s = paced_s - (1 - IN_FLIGHT) * in_flight_s
        tail_s = DRAIN * end.expected_s
        early_s = math.hypot(sent_s * (1 - 1 / factor), tail_s - DRAIN_LOW * end.low_s)
        late_s = math.hypot(sent_s * (factor - 1), DRAIN_HIGH * end.high_s - tail_s)
        return Completion(
            max(expected_s, sent_s + tail_s),
            max(low_s, sent_s + tail_s - early_s, 0.0),
            max(high_s, sent_s + tail_s + late_s),
        )

    def _pace(self, tokens: float) -> PaceForecast | None:
        now_tokens_per_s = self.tokens_per_s
        if now_tokens_per_s is None:
            return None
        horizon_s = tokens / now_tokens_per_s
        if horizon_s > FINE_HORIZON_S:
            long = self.coarse.forecast(horizon_s)
            if long is not None and self.coarse.seen_s > self.fine.seen_s:
                return long
        return self.fine.forecast(horizon_s)


HALF_LIFE_S = 120.0
"""Longer than a burst of online calls, shorter than their tide."""
LEAST_SEEN_S = 15.0
"""No forecast from less than this."""
WAIT_S, WAIT_SHARE = 30.0, 1.25
"""How long to wait for the first rows of a full window, which say nothing of the rate: so long and,
where all began together, so many times as long as half of them took."""


@dataclass(slots=True)
class CapacityForecast:
    """The offline capacity of all engines together, in computed tokens per second.

    A mean over the recent past in which a second counts for half after `HALF_LIFE_S`, or as long as
    the first rows took. It is a mean and not a median because a job lives through the bursts of
    online load too. Only time in which the engines had all the work that they take is counted: an
    engine that is idle says nothing of what it could do, nor does one that has just been filled.
    """

    completions: Completions = field(default_factory=Completions)
    _at: float = 0.0
    _full_since_s: float = 0.0
    _early_s: float = WAIT_S
    _is_saturated: bool = False
    _is_new: bool = True
    _num_early_rows: int = 0
    _num_half: int = 0
    _new_tokens: int = 0
    _tokens: float = 0.0
    _seen_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """The forecast; None until enough was seen, or while nothing is computed."""
        if self._seen_s < LEAST_SEEN_S or not self._tokens:
            return None
        return self._tokens / self._seen_s

    def add(self, computed_tokens: int) -> None:
        """A row came back, after so many computed tokens."""
        if self._num_early_rows:
            self._num_early_rows -= 1
        else:
            self._new_tokens += computed_tokens

    def observe(
        self, now_s: float, num_in_flight: int, *, is_saturated: bool, speed: float = 1.0
    ) -> None:
        """From now on the engines have all the work that they take, or not.

        `num_in_flight` rows are with the engines, which together are so fast, in any unit; 0: there
        are none. Call it at each change, and a few times a second.
        """
        elapsed_s, self._at = now_s - self._at, now_s
        if self._is_saturated and not self._num_early_rows:
            self._is_new = False
            decay = 0.5 ** (elapsed_s / max(HALF_LIFE_S, self._early_s))
            self._tokens = self._tokens * decay + self._new_tokens
            self._seen_s = self._seen_s * decay + elapsed_s
            self.completions.add(elapsed_s, self._new_tokens)
        self._new_tokens = 0
        if speed:
            self.completions.resize(speed)
        self._is_new |= not num_in_flight
        if is_saturated and not self._is_saturated:
            self._full_since_s, self._num_early_rows = now_s, num_in_flight
            if self._is_new:
                self._early_s, self._num_half = WAIT_S, num_in_flight // 2
        full_s = now_s - self._full_since_s
        if self._is_new and self._num_early_rows > self._num_half:
            self._early_s = max(WAIT_S, WAIT_SHARE * full_s)
        if not is_saturated or full_s >= (self._early_s if self._is_new else WAIT_S):
            self._num_early_rows = 0
        self._is_saturated = is_saturated
