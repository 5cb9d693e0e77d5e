"""The exact most hits of a few small rows, by trying every order and every eviction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from benchmarks.hit_orders import RowBlocks

Blocks = frozenset[int]
Numbers = tuple[int, ...]


def searched_hit_blocks(
    rows: RowBlocks,
    cache_blocks: int,
    num_running: int = 1,
    order: Sequence[int] | None = None,
) -> int | None:
    """The exact most hits of a few small rows, by trying every order and every eviction.

    With an `order`, only that one is tried. `num_running` rows run at once: each row starts while
    the `num_running` - 1 before it still hold their blocks. None when no order lets the rows that
    fit the cache do so.
    """
    rank = range(rows.chains.num_rows) if order is None else order
    fitting = tuple(row for row in rank if rows.held[row] <= cache_blocks)
    search = _Search(rows, cache_blocks, num_running, is_ordered=order is not None)
    return search.best(fitting, (), frozenset())


class _Search:
    """Tries everything, each state once. Rows and blocks go by number and key."""

    def __init__(
        self, rows: RowBlocks, cache_blocks: int, num_running: int, *, is_ordered: bool
    ) -> None:
        keys, starts = rows.chains.keys, rows.chains.starts
        self._chains = [tuple(chain.tolist()) for chain in np.split(keys, starts[1:-1])]
        self._most_hits: list[int] = rows.most_hits.tolist()
        self._own: list[int] = (rows.held - rows.chains.lengths).tolist()
        self._cache_blocks = cache_blocks
        self._num_running = num_running
        self._is_ordered = is_ordered
        self._known: dict[tuple[Numbers, Numbers, Blocks], int | None] = {}

    def best(self, left: Numbers, running: Numbers, cached: Blocks) -> int | None:
        """The most hits of the rows `left`, after `running` began, with `cached` in the cache."""
        if not left:
            return 0
        state = left, running, cached
        if state not in self._known:
            tried = left[:1] if self._is_ordered else left
            found = [self._best_with(row, *state) for row in tried]
            self._known[state] = max((hits for hits in found if hits is not None), default=None)
        return self._known[state]

    def _best_with(self, row: int, left: Numbers, running: Numbers, cached: Blocks) -> int | None:
        """The same if this row goes next; None when it finds no room."""
        now = (*running, row)[-self._num_running :]
        held = frozenset(block for other in now for block in self._chains[other])
        room = self._cache_blocks - len(held) - sum(self._own[other] for other in now)
        if room < 0:
            return None
        hits = _leading(self._chains[row][: self._most_hits[row]], cached)
        others = tuple(other for other in left if other != row)
        more = [self.best(others, now, held | kept) for kept in _kept_free(cached - held, room)]
        return max((hits + number for number in more if number is not None), default=None)


def _leading(chain: Numbers, cached: Blocks) -> int:
    """Blocks of the chain that are found from its front on."""
    return next((i for i, block in enumerate(chain) if block not in cached), len(chain))


def _kept_free(free: Blocks, room: int) -> Iterator[Blocks]:
    """What can stay of the blocks that nobody holds: to evict more than needed never helps."""
    return map(frozenset, combinations(sorted(free), min(room, len(free))))
