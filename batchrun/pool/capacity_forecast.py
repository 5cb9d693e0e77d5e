"""How many tokens the engines compute for offline work in a second: the recent past, weighed."""

from __future__ import annotations

from batchrun.pool.completion import Completions

HALF_LIFE_S = 120.0
"""Longer than a burst of online calls, shorter than their tide."""
LEAST_SEEN_S = 15.0
"""No forecast from less than this."""
MOST_EARLY_S = 30.0
"""How long to wait for the first rows of a full window, which say nothing of the rate."""


class CapacityForecast:
    """The offline capacity of all engines together, in computed tokens per second.

    A mean over the recent past in which a second counts for half after `HALF_LIFE_S`. It is a mean
    and not a median because a job lives through the bursts of online load too. Only time in which
    the engines had all the work that they take is counted: an engine that is idle says nothing of
    what it could do, nor does one that has just been filled.
    """

    __slots__ = (
        "_at",
        "_early_until_s",
        "_is_saturated",
        "_new_tokens",
        "_num_early_rows",
        "_seen_s",
        "_tokens",
        "completions",
    )

    def __init__(self) -> None:
        self._at = 0.0
        self._early_until_s = 0.0
        self._is_saturated = False
        self._num_early_rows = 0
        self._new_tokens = 0
        self._tokens = 0.0
        self._seen_s = 0.0
        self.completions = Completions()

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

    def observe(self, now_s: float, num_in_flight: int, *, is_saturated: bool) -> None:
        """From now on the engines have all the work that they take, or not.

        `num_in_flight` rows are with the engines. Call it at each change, and a few times a second.
        """
        elapsed_s, self._at = now_s - self._at, now_s
        if self._is_saturated and not self._num_early_rows:
            decay = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self._tokens = self._tokens * decay + self._new_tokens
            self._seen_s = self._seen_s * decay + elapsed_s
            self.completions.add(elapsed_s, self._new_tokens)
        self._new_tokens = 0
        if is_saturated and not self._is_saturated:
            self._num_early_rows = num_in_flight
            self._early_until_s = now_s + MOST_EARLY_S
        elif not is_saturated or now_s >= self._early_until_s:
            self._num_early_rows = 0
        self._is_saturated = is_saturated
