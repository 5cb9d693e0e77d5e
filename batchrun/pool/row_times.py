"""How long the rows of a job that are with the engines will still take, the last one's end.

A job whose answers differ in length does not end when its work is done at the usual pace: the last
rows end one by one, and of those in flight the long ones are left. How long rows took says how long
those in flight will, each given how long it has taken so far (Kaplan and Meier's estimator: rows in
flight are censored).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

REMEMBERED_ROWS = 512
"""Counts halve when there are twice as many."""
LEAST_ROWS = 16
"""Nothing is said from fewer rows."""
_LEVELS = (0.05, 0.5, 0.95)

FURTHEST = 8.0
"""No row takes more times as long as the longest so far."""
LEAST_S, BUCKETS_PER_DOUBLING, NUM_BUCKETS = 0.25, 4, 80
"""Rows are counted by how long they took: up to 0.25 s, then buckets 19 % wider each, to days."""
TAIL_SHARE = 0.25
"""Beyond what was seen, rows end at the rate of the slowest quarter."""
PRIOR_ROWS = 2.0
"""The rate of the tail counts in every bucket like what so many rows have shown."""

_EDGES_S = LEAST_S * 2 ** (np.arange(NUM_BUCKETS) / BUCKETS_PER_DOUBLING)
_EDGES: list[float] = _EDGES_S.tolist()
_WIDTHS_S = np.diff(_EDGES_S, prepend=0.0)
_LOG_EDGES = np.log(_EDGES_S)


class LastEnd(NamedTuple):
    """Seconds until no row is in flight: the median, and where it is sooner or later one time in
    twenty."""

    low_s: float
    expected_s: float
    high_s: float


class RowTimes:
    """How long rows took, from being handed out to their end, and those in flight."""

    __slots__ = ("_counts", "_num_ended", "_sent_s")

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_BUCKETS)
        self._num_ended = 0.0
        self._sent_s: dict[int, float] = {}

    def sent(self, row: int, now_s: float) -> None:
        """A row is handed out."""
        self._sent_s[row] = now_s

    def ended(self, row: int, now_s: float) -> None:
        """It has come back."""
        took_s = now_s - self._sent_s.pop(row)
        self._counts[min(bisect_left(_EDGES, took_s), NUM_BUCKETS - 1)] += 1
        self._num_ended += 1
        if self._num_ended >= 2 * REMEMBERED_ROWS:
            self._counts /= 2
            self._num_ended /= 2

    def lost(self, row: int) -> None:
        """It came back unfinished, which says nothing."""
        self._sent_s.pop(row)

    def last_end_s(self, now_s: float) -> LastEnd | None:
        """Seconds until all rows in flight have ended; None while too few rows have ended, or
        without any in flight."""
        if self._num_ended < LEAST_ROWS or not self._sent_s:
            return None
        ages_s = np.maximum(now_s - np.fromiter(self._sent_s.values(), np.float64), 0.0)
        hazard = self._hazard(ages_s)
        longest_s = max(float(ages_s.max()), self._longest_s())
        later_s = _EDGES_S[: int(np.searchsorted(_EDGES_S, FURTHEST * longest_s))]
        gone = _at(hazard, ages_s[:, None] + later_s) - _at(hazard, ages_s[:, None])
        # All have ended by then.
        chance = np.prod(-np.expm1(-gone), axis=0)
        return LastEnd(*map(float, np.interp(_LEVELS, chance, later_s)))

    def _longest_s(self) -> float:
        return float(_EDGES_S[np.flatnonzero(self._counts)[-1]])

    def _hazard(self, ages_s: Floats) -> Floats:
        """The cumulative hazard at each edge."""
        counts = self._counts
        in_flight = np.bincount(
            np.minimum(np.searchsorted(_EDGES_S, ages_s), NUM_BUCKETS - 1), minlength=NUM_BUCKETS
        )
        # Rows that got as far as a bucket: those that ended in it or later, those in flight beyond.
        ended = np.cumsum(counts[::-1])[::-1]
        reached = ended + np.cumsum(in_flight[::-1])[::-1] - in_flight
        first = int(np.flatnonzero(ended >= TAIL_SHARE * ended[0])[-1])
        begin_s = float(_EDGES_S[first - 1]) if first else 0.0
        lived_s = float(np.maximum(ages_s - begin_s, 0).sum())
        lived_s += float(counts[first:] @ (_EDGES_S[first:] - begin_s))
        tail = -np.expm1(-counts[first:].sum() / max(lived_s, LEAST_S) * _WIDTHS_S)
        hazards: Floats = (counts + PRIOR_ROWS * tail) / (reached + PRIOR_ROWS)
        hazards[: int(np.flatnonzero(counts)[0])] = 0.0
        return np.cumsum(-np.log1p(-np.minimum(hazards, 0.999)))


def _at(hazard: Floats, at_s: Floats) -> Floats:
    """The cumulative hazard at these times, between edges by their logarithms."""
    found: Floats = np.interp(np.log(np.maximum(at_s, LEAST_S)), _LOG_EDGES, hazard)
    return found
