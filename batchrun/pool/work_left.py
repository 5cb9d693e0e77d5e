"""What a job still has to compute: its estimate, corrected by what came back."""

from __future__ import annotations

DOUBT = 0.3
"""How far an estimate may be off, as a share, before any row has come back."""
PRIOR_ROWS = 8
"""So many rows must come back to weigh as much as the estimate itself."""
HALF_LIFE_ROWS = 256
"""A row weighs half as much in the correction once so many others have come back after it."""

_DECAY = 0.5 ** (1 / HALF_LIFE_ROWS)


class WorkLeft:
    """The computed tokens that a job's unfinished rows will take.

    A row comes with an estimate. The ratio of computed to estimated tokens of the rows that came
    back corrects what is left, and the estimates of rows to come. Rows in flight count as left.
    """

    __slots__ = ("_seen_computed", "_seen_estimated", "_seen_rows", "estimated_tokens", "ratio")

    def __init__(self, estimated_tokens: int) -> None:
        self.estimated_tokens = estimated_tokens
        self.ratio = 1.0
        self._seen_rows = 0.0
        self._seen_estimated = 0.0
        self._seen_computed = 0.0

    @property
    def tokens(self) -> float:
        """The best guess."""
        return self.estimated_tokens * self.ratio

    @property
    def doubt(self) -> float:
        """How far the guess may be off, as a share: from `DOUBT` to nothing as rows come back."""
        return DOUBT * PRIOR_ROWS / (self._seen_rows + PRIOR_ROWS)

    def corrected(self, estimated_tokens: int) -> int:
        """What a row with this estimate will compute, by the rows that came back."""
        return round(estimated_tokens * self.ratio)

    def settle(self, estimated_tokens: int, computed_tokens: int) -> None:
        """A row with this estimate has ended, after so many computed tokens."""
        self.estimated_tokens = max(self.estimated_tokens - estimated_tokens, 0)
        self._seen_rows = self._seen_rows * _DECAY + 1
        self._seen_estimated = self._seen_estimated * _DECAY + estimated_tokens
        self._seen_computed = self._seen_computed * _DECAY + computed_tokens
        if self._seen_estimated > 0:
            seen_ratio = self._seen_computed / self._seen_estimated
            rows = self._seen_rows
            self.ratio = (rows * seen_ratio + PRIOR_ROWS) / (rows + PRIOR_ROWS)
