"""How fast a job goes: rows and tokens per second over the last half minute."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RATE_WINDOW_S = 30.0


@dataclass(slots=True)
class _Second:
    """What ended in one second."""

    began_s: float
    num_rows: int = 0
    served_tokens: int = 0
    computed_tokens: int = 0


@dataclass(slots=True)
class Pace:
    """Sums by the second, so that asking costs the same at any speed. Instants are monotonic."""

    _seconds: deque[_Second] = field(default_factory=deque)

    def add(self, now_s: float, served_tokens: int, computed_tokens: int) -> None:
        """A row has ended."""
        if not self._seconds or now_s >= self._seconds[-1].began_s + 1:
            self._forget(now_s)
            self._seconds.append(_Second(now_s))
        second = self._seconds[-1]
        second.num_rows += 1
        second.served_tokens += served_tokens
        second.computed_tokens += computed_tokens

    def rates(self, now_s: float) -> tuple[float, float, float]:
        """(rows, served tokens, computed tokens) per second over the last `RATE_WINDOW_S`."""
        self._forget(now_s)
        if not self._seconds:
            return 0.0, 0.0, 0.0
        span_s = max(now_s - self._seconds[0].began_s, 1.0)
        rows = sum(second.num_rows for second in self._seconds)
        served = sum(second.served_tokens for second in self._seconds)
        computed = sum(second.computed_tokens for second in self._seconds)
        return rows / span_s, served / span_s, computed / span_s

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0].began_s < now_s - RATE_WINDOW_S:
            self._seconds.popleft()
