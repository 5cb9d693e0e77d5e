"""Step times: what is in flight, how long it should take, and how long it took."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batchrun.estimator import ObservedGap, StepLoad


@dataclass(slots=True)
class _Flight:
    load: StepLoad | None
    scheduled_at_s: float
    predicted_s: float
    gap: ObservedGap | None


class StepClock:
    """The steps that were scheduled and whose output has not come back, oldest first.

    A step begins when the one before it ends, or when it was scheduled if the engine was idle.
    Where no step is scheduled ahead there is a gap between two steps; it counts after a step that
    computed something, if requests were left.
    """

    def __init__(self) -> None:
        self._flights: deque[_Flight] = deque()
        self._last_end_s = float("-inf")
        self._num_before = 0
        self.gap: ObservedGap | None = None
        """The gap before the step that ended last."""

    def scheduled(self, load: StepLoad | None, predicted_s: float, now_s: float) -> None:
        """A step was handed to the engine; `load` is None when nothing is computed."""
        gap = None
        if self._num_before and not self._flights:
            gap = self._num_before, now_s - self._last_end_s
        self._flights.append(_Flight(load, now_s, predicted_s, gap))

    def ended(self, now_s: float) -> tuple[StepLoad, float, float] | None:
        """The oldest step's output came: (load, measured seconds, predicted seconds)."""
        if not self._flights:
            return None
        flight = self._flights.popleft()
        began_s = max(self._last_end_s, flight.scheduled_at_s)
        self._last_end_s = now_s
        self.gap = flight.gap
        if flight.load is None:
            self._num_before = 0
            return None
        self._num_before = flight.load.num_requests
        return flight.load, now_s - began_s, flight.predicted_s

    def fell_idle(self) -> None:
        """No request is left: what comes before the next step is no gap."""
        self._num_before = 0

    def rest_s(self, now_s: float) -> float:
        """The predicted time until every step in flight has ended."""
        end_s = now_s
        previous_s = self._last_end_s
        for flight in self._flights:
            began_s = max(previous_s, flight.scheduled_at_s)
            previous_s = max(began_s + flight.predicted_s, now_s)
            end_s = previous_s
        return max(0.0, end_s - now_s)
