"""The rows of one job that still have to run, handed out in the planned order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from batchrun.pool.prefix_order import IntArray


class RowQueue:
    """Pending and in-flight rows of a job.

    Every row that was put in is in exactly one place: pending, delayed, in flight, or done.
    Positions in the planned order decide what comes next, so a row that comes back after a lost
    engine runs again beside its prefix group.
    """

    def __init__(self, rows: IntArray, done: Iterable[int] = ()) -> None:
        finished = set(done)
        self._num_rows = len(rows)
        self._position = {int(row): i for i, row in enumerate(rows)}
        self._order = rows
        self._next = 0
        self._skip = finished
        self._returned: list[int] = []
        self._delayed: list[tuple[float, int]] = []
        self._in_flight: set[int] = set()
        self._num_done = len(finished)

    @property
    def num_in_flight(self) -> int:
        """Rows handed out and not yet done or given back."""
        return len(self._in_flight)

    @property
    def num_pending(self) -> int:
        """Rows that are neither done nor in flight, the delayed ones included."""
        return self._num_rows - self._num_done - len(self._in_flight)

    @property
    def is_finished(self) -> bool:
        """Whether every row is done."""
        return self._num_done == self._num_rows

    def position_of(self, row: int) -> int:
        """The row's place in the planned order."""
        return self._position[row]

    def pending_from(self) -> list[int]:
        """For each position, and one past the last: rows from there on that are not done yet."""
        counts = [0]
        for row in reversed(self._order.tolist()):
            counts.append(counts[-1] + (row not in self._skip))
        counts.reverse()
        return counts

    def peek(self, now_s: float) -> int | None:
        """The row to hand out next, or None when none is ready at `now_s`."""
        self._wake(now_s)
        fresh = self._peek_fresh()
        if self._returned and (fresh is None or self._returned[0] < fresh):
            return int(self._order[self._returned[0]])
        return None if fresh is None else int(self._order[fresh])

    def take(self, row: int) -> None:
        """Hand out the row that `peek` just returned."""
        position = self._position[row]
        if self._returned and self._returned[0] == position:
            heapq.heappop(self._returned)
        else:
            assert self._peek_fresh() == position
            self._next = position + 1
        self._in_flight.add(row)

    def give_back(self, row: int, *, ready_at_s: float = 0.0) -> None:
        """Put an in-flight row back; it is handed out again no sooner than `ready_at_s`."""
        self._in_flight.remove(row)
        heapq.heappush(self._delayed, (ready_at_s, self._position[row]))

    def finish(self, row: int) -> None:
        """An in-flight row has its result committed: it never runs again."""
        self._in_flight.remove(row)
        self._num_done += 1

    def next_ready_at_s(self) -> float | None:
        """When the first delayed row becomes ready, or None when none is delayed."""
        return self._delayed[0][0] if self._delayed else None

    def check(self) -> None:
        """Recount everything; raises AssertionError when an account does not balance."""
        fresh = sum(int(row) not in self._skip for row in self._order[self._next :])
        pending = fresh + len(self._returned) + len(self._delayed)
        assert pending == self.num_pending
        waiting = {*self._returned, *(position for _, position in self._delayed)}
        assert len(waiting) == len(self._returned) + len(self._delayed)
        assert not waiting & {self._position[row] for row in self._in_flight}

    def _wake(self, now_s: float) -> None:
        while self._delayed and self._delayed[0][0] <= now_s:
            heapq.heappush(self._returned, heapq.heappop(self._delayed)[1])

    def _peek_fresh(self) -> int | None:
        while self._next < self._num_rows and int(self._order[self._next]) in self._skip:
            self._next += 1
        return self._next if self._next < self._num_rows else None
