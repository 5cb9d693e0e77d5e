"""The circuit breaker: one bad setting never burns a million rows."""

from __future__ import annotations

from batchrun.types import Outcome, OutcomeKind

IDENTICAL_ERRORS_LIMIT = 20


class CircuitBreaker:
    """Watches the final outcomes of one job and says when the job should pause.

    `max_failed_rows` is the most failed rows that the job bears (None: any number);
    `num_failed_rows` is how many have failed already; `max_identical` is how many may fail alike in
    a row.
    """

    def __init__(
        self,
        max_failed_rows: int | None,
        num_failed_rows: int = 0,
        *,
        max_identical: float = IDENTICAL_ERRORS_LIMIT,
    ) -> None:
        self._max_identical = max_identical
        self._max_failed_rows = max_failed_rows
        self._num_failed_rows = num_failed_rows
        self._last_error: tuple[str, str] | None = None
        self._num_identical = 0

    def see(self, outcome: Outcome) -> str | None:
        """Count a final outcome; returns the one-line reason to pause the job, or None."""
        if outcome.kind is OutcomeKind.OK or outcome.error is None:
            self._last_error, self._num_identical = None, 0
            return None
        self._num_failed_rows += 1
        error = (outcome.error.code, outcome.error.message)
        self._num_identical = self._num_identical + 1 if error == self._last_error else 1
        self._last_error = error
        if self._num_identical >= self._max_identical:
            return f"{self._max_identical} rows in a row failed alike: {outcome.error.message}"
        limit = self._max_failed_rows
        if limit is not None and self._num_failed_rows > limit:
            return (
                f"{self._num_failed_rows} rows failed, more than max_failed allows "
                f"({limit}); last: {outcome.error.message}"
            )
        return None
