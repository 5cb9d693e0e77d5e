"""How fast offline work went, stretch by stretch, and how far that says what is to come."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LEAST_STRETCHES = 3
PRIOR_SD = 0.12
"""Standard deviation of the logarithm of a pace about its forecast, before anything was seen."""
PRIOR_WEIGHT = 2.0
"""So many independent errors weigh as much as the prior."""
LEAST_WINDOW_S = 60.0
WINDOW_SHARE = 0.25
"""A forecast is the mean of so much of the time that it is for: the mix of rows changes slowly."""

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
    _open_s: float = 0.0
    _open_tokens: float = 0.0

    def __post_init__(self) -> None:
        self._rates = deque(maxlen=self.num_stretches)

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
            self._open_s -= self.stretch_s
            self._open_tokens -= tokens

    def forecast(self, horizon_s: float) -> PaceForecast | None:
        """The mean pace over the next `horizon_s`; None until a few stretches were seen.

        Its doubt is the error that the same forecast made over the past, at that horizon or at a
        third of the past where that is shorter.
        """
        rates = np.fromiter(self._rates, np.float64)
        if len(rates) < LEAST_STRETCHES or not rates.any():
            return None
        stretches = max(1, round(horizon_s / self.stretch_s))
        mean = float(rates[-self._window(stretches) :].mean())
        if mean <= 0:
            return None
        horizon = min(stretches, max(1, len(rates) // LEAST_STRETCHES))
        errors = _past_errors(rates, horizon, self._window(horizon))
        num = len(errors) / horizon
        squares = float(errors @ errors) / max(len(errors), 1)
        variance = (num * squares + PRIOR_WEIGHT * PRIOR_SD**2) / (num + PRIOR_WEIGHT)
        return PaceForecast(mean, math.sqrt(variance))

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
