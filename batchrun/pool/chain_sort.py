"""Rows sorted by their chains: every subtree of the prefix tree becomes an interval."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

from batchrun.pool.chains import ChainTable, IntArray, KeyArray

_NO_KEY = np.uint64(0)
BoolArray = npt.NDArray[np.bool_]


def sort_by_chain(table: ChainTable, rows: IntArray) -> IntArray:
    """`rows` so that equal leading chunks stand together; a row that ends comes before those that
    go on, equal ones in the order given.

    Rows that are still together are told apart by their next chunk, and every group first skips
    the chunks that all of it shares: O(rows x log rows) for each branching on the way down.
    """
    order = rows.copy()
    places = np.arange(len(rows))
    group = np.zeros(len(rows), dtype=np.int64)
    depth = np.zeros(len(rows), dtype=np.int64)
    while places.size > 1:
        members = order[places]
        goes_on = table.starts[members + 1] - table.starts[members] > depth
        key = np.full(members.size, _NO_KEY)
        key[goes_on] = table.key_at(members[goes_on], depth[goes_on])
        sorting = np.lexsort((key, goes_on, group))
        members, key, group, goes_on = (
            column[sorting] for column in (members, key, group, goes_on)
        )
        order[places] = members
        is_first = np.ones(members.size, dtype=bool)
        is_first[1:] = (np.diff(group) != 0) | (key[1:] != key[:-1]) | ~goes_on[1:] | ~goes_on[:-1]
        places, group, depth = _next_groups(table, members, places, is_first)
    return order


def _next_groups(
    table: ChainTable, members: IntArray, places: IntArray, is_first: BoolArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Of groups given by their first members: (places, group number, chunks that all of the group
    share) of the members of groups of two or more."""
    starts = np.flatnonzero(is_first)
    sizes = np.diff(starts, append=members.size)
    size = np.repeat(sizes, sizes)
    kept = size > 1
    leaders = np.repeat(members[starts], sizes)[kept]
    members, places = members[kept], places[kept]
    if not members.size:
        return places, members, members
    sizes = sizes[sizes > 1]
    shared = table.shared(members, leaders)
    group_starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    depth = np.minimum.reduceat(shared, group_starts)
    return places, np.repeat(np.arange(sizes.size), sizes), np.repeat(depth, sizes)


def merge_sorted(table: ChainTable, rows: IntArray, more: IntArray) -> IntArray:
    """One sorted order of two: those of `more` go to their places among `rows`, behind equals.

    O(more x log rows x log chunks), and one copy of the order.
    """
    low = np.zeros(len(more), dtype=np.int64)
    high = np.full(len(more), len(rows), dtype=np.int64)
    open_ = np.flatnonzero(low < high)
    while open_.size:
        middle = (low[open_] + high[open_]) >> 1
        is_before = _is_before(table, more[open_], rows[middle])
        high[open_] = np.where(is_before, middle, high[open_])
        low[open_] = np.where(is_before, low[open_], middle + 1)
        open_ = open_[low[open_] < high[open_]]
    return np.insert(rows, low, more)


def rows_with_prefix(
    table: ChainTable, rows: IntArray, prefix: KeyArray, most: int | None = None
) -> IntArray:
    """Those of `rows`, which are sorted by chain, whose chain begins with `prefix`.

    Only the first `most` of them where that is given. O(log rows) comparisons of prefixes.
    """
    wanted = prefix.tolist()

    def beginning(row: int) -> list[int]:
        start, end = table.starts[row : row + 2].tolist()
        keys: list[int] = table.keys[start : min(end, start + len(wanted))].tolist()
        return keys

    first = bisect_left(rows, wanted, key=beginning)
    last = len(rows) if most is None else min(first + most, len(rows))
    if first == last or beginning(rows[first]) != wanted:
        return rows[:0]
    return rows[first : bisect_right(rows, wanted, lo=first, hi=last, key=beginning)]


def _is_before(table: ChainTable, rows: IntArray, others: IntArray) -> BoolArray:
    """Whether each row sorts before the other beside it; False for equal chains."""
    shared = table.shared(rows, others)
    ends = table.starts[rows + 1] - table.starts[rows] == shared
    other_ends = table.starts[others + 1] - table.starts[others] == shared
    is_before: BoolArray = ends & ~other_ends
    both = np.flatnonzero(~ends & ~other_ends)
    mine = table.key_at(rows[both], shared[both])
    is_before[both] = mine < table.key_at(others[both], shared[both])
    return is_before
