"""Step times: what is in flight, how long it should take, and how long it took."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batchrun.estimator import StepLoad


@dataclass(slots=True)
class _Flight:
    load: StepLoad | None
    scheduled_at_s: float
    predicted_s: float


class StepClock:
    """The steps that were scheduled and whose output has not come back, oldest first.

    A step begins when the one before it ends, or when it was scheduled if the engine was idle.
    """

    def __init__(self) -> None:
        self._flights: deque[_Flight] = deque()
        self._last_end_s = float("-inf")

    def scheduled(self, load: StepLoad | None, predicted_s: float, now_s: float) -> None:
        """A step was handed to the engine; `load` is None when nothing is computed."""
        self._flights.append(_Flight(load, now_s, predicted_s))

    def ended(self, now_s: float) -> tuple[StepLoad, float, float] | None:
        """The oldest step's output came: (load, measured seconds, predicted seconds)."""
        if not self._flights:
            return None
        flight = self._flights.popleft()
        began_s = max(self._last_end_s, flight.scheduled_at_s)
        self._last_end_s = now_s
        if flight.load is None:
            return None
        return flight.load, now_s - began_s, flight.predicted_s

    def rest_s(self, now_s: float) -> float:
        """The predicted time until every step in flight has ended."""
        end_s = now_s
        previous_s = self._last_end_s
        for flight in self._flights:
            began_s = max(previous_s, flight.scheduled_at_s)
            previous_s = max(began_s + flight.predicted_s, now_s)
            end_s = previous_s
        return max(0.0, end_s - now_s)
