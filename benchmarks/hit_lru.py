"""Rows one at a time in an LRU cache: what an order alone is worth, whatever runs beside a row."""

from __future__ import annotations

from collections import OrderedDict

from benchmarks.optimal_hits import RowBlocks


class LruBlocks:
    """The blocks used last. A parent is used no earlier than its child, so that what is there of a
    chain is its front."""

    def __init__(self, rows: RowBlocks, capacity: int) -> None:
        self._rows = rows
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def num_leading(self, row: int) -> int:
        """Blocks of the row's chain that are there, from its front on."""
        chains, known = self._rows.chains, self._keys
        start = int(chains.starts[row])
        low, high = 0, int(chains.starts[row + 1]) - start
        while low < high:
            middle = (low + high + 1) // 2
            if int(chains.keys[start + middle - 1]) in known:
                low = middle
            else:
                high = middle - 1
        return low

    def run(self, row: int) -> None:
        """The row runs to its end: its chain is there now, beside its other blocks."""
        chains = self._rows.chains
        chain = chains.keys[chains.starts[row] : chains.starts[row + 1]]
        for key in chain[::-1].tolist():
            self._keys[key] = None
            self._keys.move_to_end(key)
        room = self._capacity - (int(self._rows.held[row]) - len(chain))
        while len(self._keys) > room:
            self._keys.popitem(last=False)


def hit_blocks_in_turn(rows: RowBlocks, cache_blocks: int) -> int:
    """The hits of rows that run one at a time, in their order."""
    cached = LruBlocks(rows, cache_blocks)
    num_blocks = 0
    for row in range(rows.num_rows):
        num_blocks += min(cached.num_leading(row), int(rows.most_hits[row]))
        cached.run(row)
    return num_blocks
