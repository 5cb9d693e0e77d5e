"""The rows of a job that still have to run, in planned order, and how many an engine may have."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchrun.pool.prefix_keys import IntArray
from batchrun.pool.radix_tree import NO_NODE, RadixTree

_PENDING, _QUEUED, _IN_FLIGHT, _DONE = range(4)
"""States of a row. Queued ones are in one of the heaps, and not found by going on in order."""


class RowQueue:
    """Pending and in-flight rows of a job, and how many of them each prefix node has.

    Every row is in exactly one place: pending, delayed, in flight, or done. Positions in the
    planned order decide what comes next, so a row that comes back after a lost engine runs again
    beside its prefix group. `num_in_flight` rows are handed out and neither done nor given back.
    Memory: 17 bytes a row.
    """

    def __init__(self, rows: IntArray, nodes: RadixTree, done: Sequence[int] | IntArray = ()):
        """`rows` in planned order, whose tree is `nodes`; those of `done` have a result."""
        self._rows = rows
        self._nodes = nodes
        self._position = np.empty(len(rows), dtype=np.int64)
        self._position[rows] = np.arange(len(rows))
        self._states = bytearray(len(rows))
        self._state = np.frombuffer(self._states, dtype=np.uint8)
        self._state[self._position[np.asarray(done, dtype=np.int64)]] = _DONE
        self._parents: list[int] = nodes.parents.tolist()
        self._next = 0
        self._first: list[int] = []
        self._delayed: list[tuple[float, int]] = []
        self.num_in_flight = 0
        self._num_done = int(np.count_nonzero(self._state == _DONE))
        self._num_left = self._count_by_node(self._state != _DONE)
        self._num_to_come = list(self._num_left)

    @property
    def num_pending(self) -> int:
        """Rows that are neither done nor in flight, the delayed ones included."""
        return len(self._rows) - self._num_done - self.num_in_flight

    @property
    def is_finished(self) -> bool:
        """Whether every row is done."""
        return self._num_done == len(self._rows)

    def position_of(self, row: int) -> int:
        """The row's place in the planned order."""
        return int(self._position[row])

    def path_of(self, row: int) -> list[int]:
        """The prefix nodes above a row, from the root downwards."""
        path = self._path(int(self._position[row]))
        path.reverse()
        return path

    def depth_of(self, node: int) -> int:
        """Chunks that all rows of a prefix node share."""
        return int(self._nodes.depths[node])

    def num_to_come(self, node: int) -> int:
        """Rows of a prefix node that were not handed out yet, or came back."""
        return self._num_to_come[node]

    def num_left(self, node: int) -> int:
        """Rows of a prefix node that have no result yet."""
        return self._num_left[node]

    def peek(self, now_s: float) -> int | None:
        """The row to hand out next, or None when none is ready at `now_s`."""
        self._wake(now_s)
        position = self._peek()
        return None if position is None else int(self._rows[position])

    def take(self, row: int) -> None:
        """Hand out the row that `peek` just returned."""
        position = int(self._position[row])
        assert self._peek() == position
        if self._first and self._first[0] == position:
            heapq.heappop(self._first)
        else:
            self._next = position + 1
        self._states[position] = _IN_FLIGHT
        self.num_in_flight += 1
        for node in self._path(position):
            self._num_to_come[node] -= 1

    def give_back(self, row: int, *, ready_at_s: float = 0.0) -> None:
        """Put an in-flight row back; it is handed out again no sooner than `ready_at_s`."""
        position = int(self._position[row])
        assert self._states[position] == _IN_FLIGHT
        self._states[position] = _QUEUED
        self.num_in_flight -= 1
        heapq.heappush(self._delayed, (ready_at_s, position))
        for node in self._path(position):
            self._num_to_come[node] += 1

    def finish(self, row: int) -> None:
        """An in-flight row has its result committed: it never runs again."""
        position = int(self._position[row])
        assert self._states[position] == _IN_FLIGHT
        self._states[position] = _DONE
        self.num_in_flight -= 1
        self._num_done += 1
        for node in self._path(position):
            self._num_left[node] -= 1

    def prefer(self, rows: IntArray) -> None:
        """Hand these rows out before all others, in planned order, as far as they are pending."""
        positions = np.sort(self._position[rows])
        ahead = positions[positions >= self._next]
        pending = ahead[self._state[ahead] == _PENDING]
        self._state[pending] = _QUEUED
        for position in pending.tolist():
            heapq.heappush(self._first, position)

    def check(self) -> None:
        """Recount everything; raises AssertionError when an account does not balance."""
        state = self._state
        assert np.count_nonzero(state == _DONE) == self._num_done
        assert np.count_nonzero(state == _IN_FLIGHT) == self.num_in_flight
        waiting = [*self._first, *(position for _, position in self._delayed)]
        assert len(set(waiting)) == len(waiting)
        assert sorted(waiting) == np.flatnonzero(state == _QUEUED).tolist()
        behind = np.flatnonzero(state[: self._next] <= _QUEUED)
        assert set(behind.tolist()) <= set(waiting)
        assert self._num_left == self._count_by_node(state != _DONE)
        assert self._num_to_come == self._count_by_node(state <= _QUEUED)

    def _path(self, position: int) -> list[int]:
        """The nodes above a position, from the leaf upwards."""
        path: list[int] = []
        node = int(self._nodes.innermost[position])
        while node != NO_NODE:
            path.append(node)
            node = self._parents[node]
        return path

    def _count_by_node(self, is_counted: npt.NDArray[np.bool_]) -> list[int]:
        before = np.concatenate(([0], np.cumsum(is_counted)))
        counts: list[int] = (before[self._nodes.ends] - before[self._nodes.starts]).tolist()
        return counts

    def _wake(self, now_s: float) -> None:
        while self._delayed and self._delayed[0][0] <= now_s:
            heapq.heappush(self._first, heapq.heappop(self._delayed)[1])

    def _peek(self) -> int | None:
        if self._first:
            return self._first[0]
        position = self._states.find(_PENDING, self._next)
        self._next = len(self._states) if position < 0 else position
        return None if position < 0 else position


TICK_S = 0.1
TICK_TOKENS = 50_000
TICK_LONG_ROWS = 4
LONG_ROW_TOKENS = 4_096
"""Taking a long prompt in holds up the engine's front end for milliseconds: online calls wait."""
URGENT_SHARE = 0.125
"""So much more than the window may be in the engine for rows that cannot wait for room."""
LENT_SHARE = 0.25
"""So much of the window may be in the engine when rows of another engine's groups come."""


@dataclass(slots=True)
class Window:
    """What is in flight on one engine. Rows beyond those that the engine runs are its choice of
    candidates, at most `max_waiting` of them; all together have at most `max_tokens`."""

    max_waiting: int
    max_tokens: int
    num_rows: int = 0
    num_tokens: int = 0
    _tick_end_s: float = -math.inf
    _tick_tokens: int = 0
    _tick_long_rows: int = 0

    def has_room(
        self, tokens: int, num_running: int, *, is_urgent: bool = False, is_lent: bool = False
    ) -> bool:
        """Whether a row of so many tokens fits beside the others, of which the engine runs
        `num_running`. A row larger than the window fits alone.

        `is_lent`: its prefix group belongs to another engine. It comes only while there is little
        to choose from; else groups would be computed on every engine, and each would keep KV for
        rows that go elsewhere.
        """
        if not self.num_rows:
            return True
        share = LENT_SHARE if is_lent else 1 + URGENT_SHARE if is_urgent else 1
        num_waiting = self.num_rows - min(num_running, self.num_rows)
        has_place = num_waiting < self.max_waiting * share
        return has_place and self.num_tokens + tokens <= self.max_tokens * share

    def opens_at_s(self, tokens: int, now_s: float) -> float:
        """When the row may come: `now_s`, or the next tick if this one has brought enough."""
        if now_s >= self._tick_end_s or not self._tick_tokens:
            return now_s
        is_over = self._tick_tokens + tokens > TICK_TOKENS
        is_long = tokens >= LONG_ROW_TOKENS
        if is_over or (is_long and self._tick_long_rows >= TICK_LONG_ROWS):
            return self._tick_end_s
        return now_s

    def add(self, tokens: int, now_s: float) -> None:
        """A row goes to the engine."""
        if now_s >= self._tick_end_s:
            self._tick_end_s = now_s + TICK_S
            self._tick_tokens = self._tick_long_rows = 0
        self._tick_tokens += tokens
        self._tick_long_rows += tokens >= LONG_ROW_TOKENS
        self.num_rows += 1
        self.num_tokens += tokens

    def remove(self, tokens: int) -> None:
        """A row has left the engine."""
        self.num_rows -= 1
        self.num_tokens -= tokens
