"""The highest use within any minute of the recent past, and its spread."""

from __future__ import annotations

import math
from collections import deque

MINUTE_S = 60


class MinuteTops:
    """The tops of all minutes of the last `window_s` seconds, one minute beginning each second.

    Each second's end costs O(1) on average; memory is one number a second.
    """

    def __init__(self, window_s: int) -> None:
        self._num_kept = max(1, window_s - MINUTE_S + 1)
        self._second = 0
        # Falling values with their seconds: the first is the top of the minute that ends now.
        self._candidates: deque[tuple[int, int]] = deque()
        self._tops: deque[int] = deque()
        self._total = 0
        self._total_squares = 0

    def end_second(self, max_blocks: int) -> None:
        """A second with this highest use has ended."""
        candidates = self._candidates
        while candidates and candidates[-1][1] <= max_blocks:
            candidates.pop()
        candidates.append((self._second, max_blocks))
        self._second += 1
        if candidates[0][0] < self._second - MINUTE_S:
            candidates.popleft()
        if self._second >= MINUTE_S:
            self._add(candidates[0][1])

    def mean_plus(self, sigmas: float) -> float:
        """Mean + `sigmas` standard deviations; 0 before the first minute has ended."""
        num = len(self._tops)
        if not num:
            return 0.0
        variance = (num * self._total_squares - self._total * self._total) / (num * num)
        return self._total / num + sigmas * math.sqrt(variance)

    def _add(self, top: int) -> None:
        self._tops.append(top)
        self._total += top
        self._total_squares += top * top
        if len(self._tops) > self._num_kept:
            oldest = self._tops.popleft()
            self._total -= oldest
            self._total_squares -= oldest * oldest
