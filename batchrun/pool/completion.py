"""When jobs will be done: a best guess, and a range that is to hold nine times of ten."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from batchrun.pool.finish_times import JobWork, tokens_ahead
from batchrun.pool.pace_history import PaceForecast, PaceHistory

DEVIATIONS = 1.7
"""On either side of the best guess; 1.645 would do were the errors normal and well known."""
DOUBT_SD = 0.5
"""An estimate of work is off by its doubt at most, so by half of it on average."""
EARLY_S, LATE_S = 0.5, 2.0
"""The last rows end together or one by one: seconds added to either side."""
FINE_S, NUM_FINE = 5.0, 720
COARSE_S, NUM_COARSE = 300.0, 2_016
"""An hour in stretches of 5 s, a week in stretches of 5 minutes."""
FINE_HORIZON_S = 1_200.0
"""What is done sooner is foretold from the fine history."""


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

    def foretell(
        self, works: Mapping[str, JobWork], claims: Mapping[str, float]
    ) -> dict[str, Completion]:
        """Of all jobs in `works`, which run beside each other; none while the pace is not known.

        `claims` are the shares that deadlines take off the fair shares.
        """
        ahead = tokens_ahead(works, claims)
        found = {job_id: self._of(ahead[job_id], work.doubt) for job_id, work in works.items()}
        return {job_id: each for job_id, each in found.items() if each is not None}

    def _of(self, tokens: float, doubt: float) -> Completion | None:
        pace = self._pace(tokens)
        if pace is None:
            return None
        expected_s = tokens / pace.tokens_per_s
        factor = math.exp(DEVIATIONS * math.hypot(pace.log_sd, DOUBT_SD * doubt))
        low_s = max(expected_s / factor - EARLY_S, 0.0)
        return Completion(expected_s, low_s, expected_s * factor + LATE_S)

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
