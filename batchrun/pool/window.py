"""How much offline work may be in an engine, and how fast it may come (design 6.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

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

    def has_room(self, tokens: int, num_running: int, *, is_urgent: bool = False) -> bool:
        """Whether a row of so many tokens fits beside the others, of which the engine runs
        `num_running`. A row larger than the window fits alone."""
        if not self.num_rows:
            return True
        share = 1 + URGENT_SHARE if is_urgent else 1
        num_waiting = self.num_rows - min(num_running, self.num_rows)
        has_place = num_waiting < self.max_waiting * share
        return has_place and self.num_tokens + tokens <= self.max_tokens * share

    def has_room_to_lend(self, tokens: int, num_running: int) -> bool:
        """Whether a row may come whose prefix group belongs to another engine: only while there is
        little to choose from. Else groups would be computed on every engine, and each would keep
        KV for rows that go elsewhere."""
        num_waiting = self.num_rows - min(num_running, self.num_rows)
        has_place = num_waiting < self.max_waiting * LENT_SHARE
        has_tokens = self.num_tokens + tokens <= self.max_tokens * LENT_SHARE
        return not self.num_rows or (has_place and has_tokens)

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
