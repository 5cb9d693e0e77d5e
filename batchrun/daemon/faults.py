"""What goes wrong with rows: suspects of an engine's death, retries, refusals, a bad setting.

A death costs the loading of a model, so the guilty row is to be found in few of them. Of n suspects
only about sqrt(n) run at once, among rows that are none; when the engine dies again, these alone
stay suspects: 4 deaths for 256 rows, where halving would take 8. A few are run one by one, with no
other row on their engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from batchrun.types import Outcome, OutcomeKind
from batchrun.wire import RowKey

SOLO = 1
"""The limit of a suspect that runs with no other row on its engine."""
MAX_SOLO_ROWS = 8
"""So few suspects run one by one."""
MAX_SOLO_DEATHS = 2
"""A row that was alone so often when its engine died ends. The first may be someone's `kill`."""
MAX_PRESENCES = 3
"""A row that was there so often is a suspect though no step held it: it may kill its parser."""


@dataclass(slots=True)
class Trials:
    """The suspects among the rows of a job.

    `limits`: the most suspects that may be on an engine together with this one, itself included.
    """

    limits: dict[int, int] = field(default_factory=dict)
    _presences: dict[int, int] = field(default_factory=dict)
    _solo_deaths: dict[int, int] = field(default_factory=dict)

    def was_there(self, row: int) -> bool:
        """An engine died with the row in flight. True when that is no chance any more."""
        self._presences[row] = self._presences.get(row, 0) + 1
        return self._presences[row] >= MAX_PRESENCES

    def accuse(self, row: int, limit: int) -> None:
        """The row is a suspect now, or still."""
        if self.limits.get(row) == SOLO:
            self._solo_deaths[row] = self._solo_deaths.get(row, 0) + 1
        self.limits[row] = limit

    def is_guilty(self, row: int) -> bool:
        """Whether the row kills engines beyond doubt."""
        return self._solo_deaths.get(row, 0) >= MAX_SOLO_DEATHS

    def clear(self, row: int) -> None:
        """The row has ended."""
        for known in (self.limits, self._presences, self._solo_deaths):
            known.pop(row, None)


def accuse_rows(
    in_flight: Mapping[RowKey, Trials], last_steps: Collection[RowKey]
) -> frozenset[RowKey]:
    """An engine died: make suspects of the rows in flight that its last steps held, or of all when
    they held none. Where these were suspects before, those alone stay it. Returns all accused.

    `in_flight` has the trials of each row's job.
    """
    haunting = {key for key, trials in in_flight.items() if trials.was_there(key[1])}
    held = {key for key in in_flight if key in last_steps} or set(in_flight)
    tried = {key for key in held if key[1] in in_flight[key].limits}
    accused = frozenset((tried or held) | haunting)
    limit = SOLO if len(accused) <= MAX_SOLO_ROWS else math.isqrt(len(accused))
    for key in accused:
        in_flight[key].accuse(key[1], limit)
    return accused


FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0


def retry_delay_s(attempt: int, retry_after_s: float | None, rng: random.Random) -> float:
    """Exponential with full jitter on the upper half; never less than the engine asked for.

    `attempt` is the attempt that just failed, starting at 1.
    """
    ceiling_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (attempt - 1))
    delay_s = rng.uniform(ceiling_s / 2, ceiling_s)
    return max(delay_s, min(retry_after_s or 0.0, LONGEST_DELAY_S))


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


IDENTICAL_ERRORS_LIMIT = 20


class CircuitBreaker:
    """Watches the final outcomes of one job and says when the job should pause: one bad setting
    never burns a million rows.

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
