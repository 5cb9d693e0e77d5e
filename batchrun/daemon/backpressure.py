"""An engine that answers 429 or 503 gets fewer rows, and later: none of them is at fault."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from batchrun.daemon.backoff import retry_delay_s

MAX_REFUSALS = 20
"""A row that is refused so often while other rows are taken has to do with it after all."""
MAX_REFUSALS_IN_ALL = 100
"""Or so often at all: with the longest waits between, an hour and a half."""


@dataclass(slots=True)
class Backpressure:
    """How many rows one engine takes, by its own account: halved when it refuses one, and one more
    for each limit's worth that it takes (additive increase, multiplicative decrease).

    Instants are monotonic. Without a refusal there is no limit.
    """

    limit_rows: float = math.inf
    rests_until_s: float = -math.inf
    num_taken: int = 0
    _num_in_a_row: int = 0

    def allows(self, num_rows: int, now_s: float) -> bool:
        """Whether another row may go beside `num_rows` in flight."""
        return now_s >= self.rests_until_s and num_rows < self.limit_rows

    def refused(
        self, num_rows: int, retry_after_s: float | None, now_s: float, rng: random.Random
    ) -> None:
        """The engine refused one of `num_rows` rows. Those sent before a rest count as one."""
        if now_s >= self.rests_until_s:
            self._num_in_a_row += 1
            self.limit_rows = max(min(self.limit_rows, num_rows) / 2, 1.0)
        delay_s = retry_delay_s(max(self._num_in_a_row, 1), retry_after_s, rng)
        self.rests_until_s = max(self.rests_until_s, now_s + delay_s)

    def taken(self, max_rows: int) -> None:
        """The engine answered a row; a limit above `max_rows` is none."""
        self.num_taken += 1
        self._num_in_a_row = 0
        self.limit_rows += 1 / self.limit_rows
        if self.limit_rows > max_rows:
            self.limit_rows = math.inf


@dataclass(slots=True)
class Refusals:
    """How often each row of a job was refused, and how often of these while others were taken."""

    _seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def are_enough(self, row: int, num_taken: int) -> bool:
        """A row was refused once more, by an engine that has taken `num_taken` rows so far.

        True when that is no chance any more.
        """
        num_in_all, num_alone, before = self._seen.get(row, (0, 0, -1))
        num_in_all, num_alone = num_in_all + 1, num_alone + (num_taken != before)
        self._seen[row] = num_in_all, num_alone, num_taken
        return num_alone > MAX_REFUSALS or num_in_all > MAX_REFUSALS_IN_ALL

    def forget(self, row: int) -> None:
        """The row has ended."""
        self._seen.pop(row, None)
