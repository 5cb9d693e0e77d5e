"""Which waiting rows are not overtaken any more, so that every row gets its turn.

The fill of a step prefers rows whose prefix is cached, short ones, and prefixes worth more: those
that stand before them in the order wait. How long they may is kept here, in O(1) for a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from batchrun.scheduling.view import EngineView, Group, RequestView

OVERTAKEN_S = 30.0
"""A row that others have overtaken for so long, or that has stood first, is overtaken no more."""
MAX_LOOKED_AT = 16
"""Waiting rows that one step looks at, from the first on."""
MARK_S = 1.0
MAX_MARKS = 64
"""Marks reach further back than `OVERTAKEN_S`; older ones tell no more."""

Place = tuple[int, int]


def place_of(request: RequestView) -> Place:
    """Where a row stands in the planned order of all rows."""
    return request.epoch, request.rank


class Patience:
    """Remembers of one engine which row stands first, and when rows were let in past others.

    A mark is the last place in the order that was let in so far, and since when. A waiting row has
    been overtaken since the first mark behind it, or since it came or was preempted.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[Place, float]] = deque(maxlen=MAX_MARKS)
        self._first: RequestView | None = None
        self._first_since_s = 0.0

    def let_in(self, rows: Sequence[RequestView], now_s: float) -> None:
        """These rows begin to run."""
        last = max(map(place_of, rows), default=None)
        marks = self._marks
        if last is None or (marks and marks[-1][0] >= last):
            return
        if marks and now_s - marks[-1][1] < MARK_S:
            marks[-1] = last, marks[-1][1]
        else:
            marks.append((last, now_s))

    def overdue(
        self, view: EngineView, computing: Collection[Group | None]
    ) -> Iterator[RequestView]:
        """Waiting rows that must go before all rows behind them, in order.

        Rows of groups whose prefix is being computed wait for that and are left out.
        """
        waiting = (row for row in view.offline_waiting if row.group not in computing)
        first = next(waiting, None)
        if first is None:
            return
        if first is not self._first:
            self._first, self._first_since_s = first, view.now_s
        marks = self._marks
        while len(marks) > 1 and marks[0][0] <= place_of(first):
            marks.popleft()
        stood_first_s = view.now_s - self._first_since_s
        if stood_first_s > OVERTAKEN_S or self._is_overtaken(first, view.now_s):
            yield first
        if marks and view.now_s - marks[0][1] > OVERTAKEN_S:
            for row in islice(waiting, MAX_LOOKED_AT - 1):
                if self._is_overtaken(row, view.now_s):
                    yield row

    def _is_overtaken(self, row: RequestView, now_s: float) -> bool:
        place = place_of(row)
        since_s = next((at_s for last, at_s in self._marks if last > place), now_s)
        return now_s - max(since_s, row.arrival_at_s, row.preempted_at_s) > OVERTAKEN_S
