"""Which rows are not overtaken any more, so that every row gets its turn.

The fill of a step prefers rows whose prefix is cached, short ones, and prefixes worth more: those
that stand before them in the order wait. How long they may is kept here, in O(1) for a step. Of
those that run it prefers what takes little time: `Standstill` tells which have had none for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
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


class Standstill:
    """Running rows of one engine for whose prompt, or next token, steps have had no time for long,
    though others went on.

    One that has waited for `OVERTAKEN_S` presses from then on, until it ends or is preempted.
    """

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._noted_at_s = 0.0
        self._pressing: set[str] = set()

    def pressing(self, view: EngineView) -> Sequence[RequestView]:
        """Those of the running rows that press, the one that waits longest first."""
        since_s, late_s = self._since_s, view.now_s - OVERTAKEN_S
        self._pressing.update(each for each, at_s in since_s.items() if at_s < late_s)
        if not self._pressing:
            return ()
        rows = [row for row in view.offline_running if row.request_id in self._pressing]
        self._pressing = {row.request_id for row in rows}
        return sorted(rows, key=lambda row: since_s.get(row.request_id, view.now_s))

    def note(self, request_ids: Iterable[str], now_s: float, *, goes_on: bool) -> None:
        """These are at a prompt, or get no token in the step; where no row `goes_on` in it, none
        has waited for others."""
        since_s, rest_s = self._since_s, 0.0 if goes_on else now_s - self._noted_at_s
        self._since_s = {each: since_s.get(each, now_s - rest_s) + rest_s for each in request_ids}
        self._noted_at_s = now_s
