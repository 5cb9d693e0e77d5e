"""The circuit breaker: one bad setting never burns a million rows."""

from __future__ import annotations

from batchrun.types import Outcome, OutcomeKind

IDENTICAL_ERRORS_LIMIT = 20


class CircuitBreaker:
    """Watches the committed outcomes of one job and says when the job should pause.

    `max_failed_rows` is the most failed rows that the job bears (None: any number).
    """

    def __init__(self, max_failed_rows: int | None) -> None:
        self._max_failed_rows = max_failed_rows
        self._last_error: tuple[str, str] | None = None
        self._num_identical = 0

    def see(self, outcome: Outcome, num_failed_rows: int) -> str | None:
        """Count a final outcome; returns the one-line reason to pause the job, or None.

        `num_failed_rows` counts the job's failed rows, this one included.
        """
        if outcome.kind is OutcomeKind.OK or outcome.error is None:
            self._last_error, self._num_identical = None, 0
            return None
        error = (outcome.error.code, outcome.error.message)
        self._num_identical = self._num_identical + 1 if error == self._last_error else 1
        self._last_error = error
        if self._num_identical >= IDENTICAL_ERRORS_LIMIT:
            return f"{IDENTICAL_ERRORS_LIMIT} rows in a row failed alike: {outcome.error.message}"
        if self._max_failed_rows is not None and num_failed_rows > self._max_failed_rows:
            return (
                f"{num_failed_rows} rows failed, more than max_failed allows "
                f"({self._max_failed_rows}); last: {outcome.error.message}"
            )
        return None

    def reset(self) -> None:
        """Forget the streak: the user resumed the job."""
        self._last_error, self._num_identical = None, 0
