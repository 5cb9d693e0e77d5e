"""What steps beside rows leave of the bounds, so that callers find them kept, not the engine alone.

An engine knows when it hands a token on; its caller sees it later: front end, gateway, a step that
took longer than predicted and cores that others use lie between, and only the caller's end shows
them all. So the margin follows what calls were found to be, in time or late. It is the quantile
tracker of conformal control (arXiv 2307.16895, section 2.1): up with each late call, down a
little with every other, so that in the long run `WANTED_LATE` of calls are late by either bound,
however delays are distributed. It is bounded, and calls without rows beside them teach nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from batchrun.wire import FeltCalls

WANTED_LATE = 0.01
"""Share of calls whose first token may be late beside rows; as many answers may be."""
RISE = 0.25
"""What a late call adds, as a share of the most that is kept back."""
MOST_FIRST_SHARE = 0.5
"""At most so much of a TTFT bound is kept back: rows still get steps."""
MOST_LATER_TPOTS = 1.0
"""At most so many TPOT bounds are kept back, once for an answer: its first tokens come so much
earlier, all others at their pace."""
CAUTION = 0.5
"""Of the most, kept back of answers until calls have told how they fare beyond the engine."""
HEARD_S = 30.0
"""The engine's own clock does not count for so long after the last news of callers."""


class KeptBack(NamedTuple):
    """What is kept back: a share of TTFT bounds, and a number of TPOT bounds."""

    first_share: float = 0.0
    later_tpots: float = 0.0


NOTHING = KeptBack()


class CallerMargin:
    """Learns what to keep back, from those who see calls beyond the engine where anybody does,
    else from what the engine itself sees of them."""

    def __init__(self) -> None:
        self._heard: FeltCalls | None = None
        self._heard_at_s = -math.inf
        self._first = self._later = 0.0
        self.now = NOTHING

    def hear(self, felt: FeltCalls, now_s: float, *, beside_rows: bool) -> None:
        """Counts since some beginning. Those that went back are another one's."""
        before = self._heard
        if before is None:
            self._later = max(self._later, CAUTION)
        elif beside_rows and felt.follows(before):
            self._first = _next(
                self._first,
                felt.num_first - before.num_first,
                felt.num_late_first - before.num_late_first,
            )
            self._later = _next(
                self._later,
                felt.num_answers - before.num_answers,
                felt.num_late_answers - before.num_late_answers,
            )
        if felt != (before or FeltCalls()):
            self._heard_at_s = now_s
        self._heard = felt
        self._set()

    def saw_first(self, now_s: float, *, is_late: bool) -> None:
        """A first token left the engine beside rows."""
        if now_s - self._heard_at_s > HEARD_S:
            self._first = _next(self._first, 1, int(is_late))
            self._set()

    def saw_last(self, now_s: float, *, is_late: bool) -> None:
        """The last token of an answer left the engine beside rows; late: by its TPOT."""
        if now_s - self._heard_at_s > HEARD_S:
            self._later = _next(self._later, 1, int(is_late))
            self._set()

    def _set(self) -> None:
        self.now = KeptBack(MOST_FIRST_SHARE * self._first, MOST_LATER_TPOTS * self._later)


def _next(share: float, num_calls: int, num_late: int) -> float:
    """The tracker after so many calls; 0 to 1."""
    return min(1.0, max(0.0, share + RISE * (num_late - WANTED_LATE * num_calls)))
