"""How long the answers of online calls become, from those that ended and those still in flight.

Calls never tell. A call in flight says as much as one that ended: its answer is longer than what
it has generated. The life table of Kaplan and Meier (J. Am. Stat. Assoc. 53, 1958) counts both, so
long answers are known for long before the first of them has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from batchrun.estimator.least_squares import FloatArray

STEPS_PER_DOUBLING = 4
FIRST_TOKENS = 16
EDGES_TOKENS: FloatArray = np.concatenate(
    [[0.0], FIRST_TOKENS * 2 ** (np.arange(12 * STEPS_PER_DOUBLING + 1) / STEPS_PER_DOUBLING)]
)
"""The ages at which the table has an entry; no answer is taken to become longer than the last."""
PRIOR_CALLS = 0.5
PRIOR_END_SHARE = 1 - 2 ** (-3 / STEPS_PER_DOUBLING)
"""Where nothing is known a call goes on for half as long as it has so far, on average."""
RATE_MEMORY_S = 60.0
FIRST_RATE_S = 2.0
REMEMBERED_CALLS = 1_000
"""Counts halve when there are twice as many."""


class CallLengths:
    """Answers of calls by length. An end costs microseconds, a look at the table some 20."""

    def __init__(self) -> None:
        self._at_risk = np.zeros(len(EDGES_TOKENS) - 1)
        self._ended = np.zeros(len(EDGES_TOKENS) - 1)
        self._num_begun = 0.0
        self._time_s = 0.0
        self._last_at_s: float | None = None

    def begun(self, at_s: float) -> None:
        """A call has come in."""
        self._pass(at_s)
        self._num_begun += 1

    def rate_per_s(self, now_s: float) -> float:
        """Calls that came in per second, of late."""
        self._pass(now_s)
        return self._num_begun / (self._time_s + FIRST_RATE_S)

    def _pass(self, now_s: float) -> None:
        passed_s = 0.0 if self._last_at_s is None else max(0.0, now_s - self._last_at_s)
        kept = math.exp(-passed_s / RATE_MEMORY_S)
        self._num_begun *= kept
        self._time_s = self._time_s * kept + RATE_MEMORY_S * (1 - kept)
        self._last_at_s = now_s

    def ended(self, num_tokens: int) -> None:
        """The answer of a call has ended, of itself or at its limit."""
        place = min(int(np.searchsorted(EDGES_TOKENS, num_tokens)), len(self._ended)) - 1
        if place < 0:
            return
        self._at_risk[: place + 1] += 1
        self._ended[place] += 1
        if self._at_risk[0] >= 2 * REMEMBERED_CALLS:
            self._at_risk /= 2
            self._ended /= 2

    def staying(self, generated_tokens: Sequence[int]) -> FloatArray:
        """The share of answers that are longer than each of `EDGES_TOKENS`, where calls in flight
        have generated so many tokens."""
        ages = np.asarray(generated_tokens, np.float64)[:, None]
        widths = np.diff(EDGES_TOKENS)
        passed = np.clip((ages - EDGES_TOKENS[:-1]) / widths, 0.0, 1.0).sum(axis=0)
        ends = self._ended + PRIOR_CALLS * PRIOR_END_SHARE
        hazard = ends / (self._at_risk + passed + PRIOR_CALLS)
        return np.concatenate([[1.0], np.cumprod(1.0 - np.minimum(hazard, 1.0))])
