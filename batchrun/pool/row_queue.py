"""The rows of a job that still have to run, in planned order, and how many an engine may have."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchrun.pool.prefix_groups import KEY_DEPTH, NOBODY, EngineWork, GroupParts, key_nodes
from batchrun.pool.prefix_keys import IntArray
from batchrun.pool.radix_tree import NO_NODE, FloatArray, RadixTree, path_up

_PENDING, _QUEUED, _IN_FLIGHT, _DONE = range(4)
"""States of a row. Queued ones are in one of the heaps, and not found by going on in order."""


class PlannedWork(NamedTuple):
    """Of the rows in planned order: the prefix group, the work in seconds of a usual engine, and
    what it would take to compute the prefix that a row is to find."""

    group_of: IntArray
    work_s: FloatArray
    found_s: FloatArray

    @classmethod
    def unknown(cls, num_rows: int) -> PlannedWork:
        """All rows are one group without work."""
        return cls(np.zeros(num_rows, np.int64), np.zeros(num_rows), np.zeros(num_rows))


@dataclass(slots=True)
class _UsualEngine:
    work_s: float = 0.0
    speed: float = 1.0


ONE_ENGINE: Mapping[int, EngineWork] = {0: _UsualEngine()}


class RowQueue:
    """Pending and in-flight rows of a job, and how many of them each prefix node has.

    Every row is in exactly one place: pending, delayed, in flight, or done. Engines ask by their
    numbers: `loads` has all that rows may go to. One gets the rows of the group that it is at work
    on, in planned order, then it pulls another group (see `GroupParts`). A row that comes back
    goes first, to the engine that has its group or one that is named.
    `num_in_flight` rows are handed out and neither done nor given back. Memory: 35 bytes a row.
    """

    def __init__(
        self,
        rows: IntArray,
        nodes: RadixTree,
        done: Sequence[int] | IntArray = (),
        work: PlannedWork | None = None,
    ):
        """`rows` in planned order, whose tree is `nodes`: of a job, all or some; those of `done`
        have a result."""
        self._rows = rows
        self._nodes = nodes
        self._position = np.empty(int(rows.max(initial=-1)) + 1, dtype=np.int64)
        self._position[rows] = np.arange(len(rows))
        self._states = bytearray(len(rows))
        self._state = np.frombuffer(self._states, dtype=np.uint8)
        self._state[self._position[np.asarray(done, dtype=np.int64)]] = _DONE
        self._parents: list[int] = nodes.parents.tolist()
        self._key_nodes: list[int] = key_nodes(nodes).tolist()
        self._parts = GroupParts(self._states, *(work or PlannedWork.unknown(len(rows))))
        self._first: dict[int, list[int]] = {}
        self._delayed: list[tuple[float, int, int | None]] = []
        self._failed_at: dict[int, set[int]] = {}
        self.num_in_flight = 0
        self._in_flight_s = 0.0
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

    def key_of(self, row: int, num_chunks: int) -> int | None:
        """The node that is the key portion of a row of so many chunks; None where that is the
        row's own text."""
        node = int(self._nodes.innermost[self._position[row]])
        if node == NO_NODE or num_chunks > KEY_DEPTH * self.depth_of(node):
            return None
        return self._key_nodes[node]

    def work_s(self, row: int) -> float:
        """What a row takes, in seconds of a usual engine."""
        return self._parts.work_s(int(self._position[row]))

    @property
    def left_work_s(self) -> float:
        """What the rows without a result take, in seconds of a usual engine; those in flight count
        whole."""
        return max(0.0, self._parts.left_s + self._in_flight_s)

    @property
    def num_unfinished(self) -> int:
        """Rows that have no result yet."""
        return len(self._rows) - self._num_done

    def num_to_come(self, node: int) -> int:
        """Rows of a prefix node that were not handed out yet, or came back."""
        return self._num_to_come[node]

    def num_left(self, node: int) -> int:
        """Rows of a prefix node that have no result yet."""
        return self._num_left[node]

    def engines_failed(self, row: int) -> Collection[int]:
        """Where a row that came back has failed."""
        return self._failed_at.get(int(self._position[row]), ())

    def has_ready(self, now_s: float) -> bool:
        """Whether a row may go at `now_s`, to whichever engine."""
        self._wake(now_s)
        return self.num_pending > len(self._delayed)

    def peek(
        self, now_s: float, engine: int = 0, loads: Mapping[int, EngineWork] = ONE_ENGINE
    ) -> int | None:
        """The row to hand out next to an engine; None when none is ready at `now_s` that is worth
        going there."""
        self._wake(now_s)
        self._lose(loads)
        position = self._known(engine)
        if position is None:
            part = self._parts.choose(engine, loads)
            if part is None:
                self._share_first(engine, loads)
            position = self._known(engine) if part is None else part.next
        return None if position is None else int(self._rows[position])

    def goes_on(self, row: int, engine: int = 0) -> bool:
        """Whether the engine has more rows of the group of this one, which was just handed out."""
        position = self._known(engine)
        group_at = self._parts.group_at
        return position is not None and group_at(position) == group_at(int(self._position[row]))

    def take(self, row: int, engine: int = 0, loads: Mapping[int, EngineWork] = ONE_ENGINE) -> None:
        """Hand out the row that `peek` just returned to this engine."""
        position = int(self._position[row])
        known = self._known(engine)
        if known is None:
            part = self._parts.choose(engine, loads)
            assert part is not None and part.next == position
            self._parts.pull(engine, part)
        assert known is None or known == position
        if self._states[position] == _QUEUED:
            self._pull_returned(position, engine)
        self._hand_out(position)

    def take_out(self, row: int) -> bool:
        """Hand out this very row, whatever its turn; False when it is not pending."""
        position = int(self._position[row])
        if self._states[position] == _QUEUED:
            for first in self._first.values():
                if position in first:
                    first.remove(position)
                    heapq.heapify(first)
            self._delayed = [each for each in self._delayed if each[1] != position]
            heapq.heapify(self._delayed)
        elif self._states[position] != _PENDING:
            return False
        self._hand_out(position)
        return True

    def give_back(
        self,
        row: int,
        *,
        ready_at_s: float = 0.0,
        failed_at: int | None = None,
        engine: int | None = None,
    ) -> None:
        """Put an in-flight row back; it is handed out again no sooner than `ready_at_s`, to this
        `engine` or, without one, to that of its group. One where it failed takes it from no
        other."""
        position = int(self._position[row])
        if failed_at is not None:
            self._failed_at.setdefault(position, set()).add(failed_at)
        assert self._states[position] == _IN_FLIGHT
        self._states[position] = _QUEUED
        self._leave_flight(position)
        self._parts.left_s += self._parts.work_s(position)
        heapq.heappush(self._delayed, (ready_at_s, position, engine))
        for node in self._path(position):
            self._num_to_come[node] += 1

    def finish(self, row: int) -> None:
        """An in-flight row has its result committed: it never runs again."""
        position = int(self._position[row])
        self._failed_at.pop(position, None)
        assert self._states[position] == _IN_FLIGHT
        self._states[position] = _DONE
        self._leave_flight(position)
        self._num_done += 1
        for node in self._path(position):
            self._num_left[node] -= 1

    def prefer(self, rows: IntArray, engine: int = 0) -> None:
        """Hand these rows out to this engine before all others, in planned order, as far as they
        are pending."""
        positions = np.sort(self._position[rows])
        pending = positions[self._state[positions] == _PENDING]
        self._state[pending] = _QUEUED
        first = self._first.setdefault(engine, [])
        for position in pending.tolist():
            heapq.heappush(first, position)

    def check(self) -> None:
        """Recount everything; raises AssertionError when an account does not balance."""
        state = self._state
        assert np.count_nonzero(state == _DONE) == self._num_done
        assert np.count_nonzero(state == _IN_FLIGHT) == self.num_in_flight
        waiting = [position for first in self._first.values() for position in first]
        waiting += [position for _, position, _ in self._delayed]
        assert len(set(waiting)) == len(waiting)
        assert sorted(waiting) == np.flatnonzero(state == _QUEUED).tolist()
        assert self._num_left == self._count_by_node(state != _DONE)
        assert self._num_to_come == self._count_by_node(state <= _QUEUED)
        left_s = sum(map(self._parts.work_s, np.flatnonzero(state <= _QUEUED).tolist()))
        assert math.isclose(left_s, self._parts.left_s, abs_tol=1e-6)
        in_flight_s = sum(map(self._parts.work_s, np.flatnonzero(state == _IN_FLIGHT).tolist()))
        assert math.isclose(in_flight_s, self._in_flight_s, abs_tol=1e-6)

    def _hand_out(self, position: int) -> None:
        self._states[position] = _IN_FLIGHT
        self.num_in_flight += 1
        work_s = self._parts.work_s(position)
        self._parts.left_s -= work_s
        self._in_flight_s += work_s
        for node in self._path(position):
            self._num_to_come[node] -= 1

    def _leave_flight(self, position: int) -> None:
        self.num_in_flight -= 1
        work_s = self._parts.work_s(position)
        self._in_flight_s = self._in_flight_s - work_s if self.num_in_flight else 0.0

    def _path(self, position: int) -> list[int]:
        """The nodes above a position, from the leaf upwards."""
        return path_up(self._parents, int(self._nodes.innermost[position]))

    def _count_by_node(self, is_counted: npt.NDArray[np.bool_]) -> list[int]:
        before = np.concatenate(([0], np.cumsum(is_counted)))
        counts: list[int] = (before[self._nodes.ends] - before[self._nodes.starts]).tolist()
        return counts

    def _wake(self, now_s: float) -> None:
        while self._delayed and self._delayed[0][0] <= now_s:
            _, position, engine = heapq.heappop(self._delayed)
            owner = self._parts.owner_at(position) if engine is None else engine
            heapq.heappush(self._first.setdefault(owner, []), position)

    def _lose(self, loads: Mapping[int, EngineWork]) -> None:
        """What engines have that are away is for any of the others."""
        self._parts.lose(loads)
        for engine in [each for each in self._first if each not in loads and each != NOBODY]:
            for position in self._first.pop(engine):
                heapq.heappush(self._first.setdefault(NOBODY, []), position)

    def _share_first(self, engine: int, loads: Mapping[int, EngineWork]) -> None:
        """Of rows that another engine is to have before all others, the last go to this one, so
        many that both are done together."""
        firsts = {each: self._first[each] for each in loads if self._first.get(each)}
        if not firsts:
            return
        row_s = self._parts.left_s / self.num_pending
        ends_s = {
            each: (loads[each].work_s + row_s * len(first)) / loads[each].speed
            for each, first in firsts.items()
        }
        owner = max(ends_s, key=ends_s.__getitem__)
        group = self._parts.group_at(firsts[owner][0])
        moved_s = self._parts.worth_moving_s(group, ends_s[owner], loads[owner], loads[engine])
        if moved_s and row_s > 0:
            first = sorted(firsts[owner])
            start = max(1, len(first) - int(moved_s / row_s))
            last = [each for each in first[start:] if engine not in self._failed_at.get(each, ())]
            # Heaps, as they are sorted.
            self._first[owner], self._first[engine] = sorted({*first} - {*last}), last

    def _known(self, engine: int) -> int | None:
        """The next row for an engine without pulling a group: one that came back, or goes on."""
        for owner in (engine, NOBODY):
            first = self._first.get(owner)
            if first:
                return first[0]
        return self._parts.current(engine)

    def _pull_returned(self, position: int, engine: int) -> None:
        """A row that came back goes to the engine, and with it those of its group."""
        mine = self._first.setdefault(engine, [])
        if not mine:
            nobodys, group = self._first[NOBODY], self._parts.group_at(position)
            while nobodys and self._parts.group_at(nobodys[0]) == group:
                heapq.heappush(mine, heapq.heappop(nobodys))
            self._parts.hand_over(position, engine)
        assert heapq.heappop(mine) == position


TICK_S = 0.1
TICK_TOKENS = 50_000
TICK_LONG_ROWS = 4
LONG_ROW_TOKENS = 4_096
"""Taking a long prompt in holds up the engine's front end for milliseconds: online calls wait."""
URGENT_SHARE = 0.125
"""So much more than the window may be in the engine for rows that cannot wait for room."""


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

    def has_room(self, tokens: int, num_running: int, *, is_urgent: bool = False) -> bool:
        """Whether a row of so many tokens fits beside the others, of which the engine runs
        `num_running`. A row larger than the window fits alone."""
        if not self.num_rows:
            return True
        share = 1 + URGENT_SHARE if is_urgent else 1
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
        # A row of more than a tick's tokens makes the tick longer.
        self._tick_end_s += TICK_S * max(0, tokens - TICK_TOKENS) / TICK_TOKENS
        self._tick_long_rows += tokens >= LONG_ROW_TOKENS
        self.num_rows += 1
        self.num_tokens += tokens

    def remove(self, tokens: int) -> None:
        """A row has left the engine."""
        self.num_rows -= 1
        self.num_tokens -= tokens


BOUND_S = 8.0
"""Work beyond the running rows that an engine beside others may have: it can no longer move."""
STEP_S = 0.0274
"""A usual engine's step when its KV is full."""
PRIOR_S = 10.0
"""The first guess of a speed weighs as much as so many seconds."""
SPEED_HALF_LIFE_S = 60.0


@dataclass(slots=True)
class RowLoad:
    """Rows that the daemon has on one engine: the tokens of their prompts, their work in seconds of
    a usual engine, and how fast it goes.

    `first_speed` is what is expected before anything was seen; None: nobody knows. `is_full`: it
    has all the rows that it takes; only then its pace tells of its speed.
    """

    first_speed: float | None = None
    num_in_flight: int = 0
    tokens_in_flight: int = 0
    work_s: float = 0.0
    is_full: bool = False
    _done_s: float = 0.0
    _busy_s: float = 0.0
    _at_s: float = field(default=-math.inf)

    @property
    def speed(self) -> float:
        """Seconds of work that it does in a second."""
        first_speed = 1.0 if self.first_speed is None else self.first_speed
        return (first_speed * PRIOR_S + self._done_s) / (PRIOR_S + self._busy_s)

    @property
    def is_speed_known(self) -> bool:
        """Whether it was measured, or seen for as long as a guess weighs."""
        return self.first_speed is not None or self._busy_s >= PRIOR_S

    @property
    def seconds(self) -> float:
        """How long it needs for what it has."""
        return self.work_s / self.speed

    def has_room(self, work_s: float, output_tokens: float, *, is_urgent: bool = False) -> bool:
        """Whether a row of so much work fits beside the others, where other engines could run it.
        Rows with answers of so many tokens that run together are no burden."""
        if not self.num_in_flight:
            return True
        most_s = BOUND_S * self.speed + output_tokens * STEP_S
        return self.work_s + work_s <= most_s * (1 + URGENT_SHARE * is_urgent)

    def add(self, tokens: int, work_s: float) -> None:
        """A row goes to the engine."""
        self.num_in_flight += 1
        self.tokens_in_flight += tokens
        self.work_s += work_s

    def remove(self, tokens: int, work_s: float) -> None:
        """A row has left it."""
        self.num_in_flight -= 1
        self.tokens_in_flight -= tokens
        self.work_s = self.work_s - work_s if self.num_in_flight else 0.0

    def ended(self, work_s: float) -> None:
        """It has done a row."""
        if self.is_full:
            self._done_s += work_s

    def observe(self, now_s: float, *, is_full: bool) -> None:
        """From now on it has all the rows that it takes, or not. Call it at each change."""
        elapsed_s, self._at_s = now_s - self._at_s, now_s
        if self.is_full:
            decay = 0.5 ** (elapsed_s / SPEED_HALF_LIFE_S)
            self._done_s, self._busy_s = self._done_s * decay, self._busy_s * decay + elapsed_s
        self.is_full = is_full
