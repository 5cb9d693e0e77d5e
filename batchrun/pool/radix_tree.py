"""The order in which rows that share a prefix stand together: a radix tree, walked depth first.

Rows sorted by their chains of chunk hashes are the tree: every subtree is an interval of the order,
and it follows from the chunks that neighbours share (the LCP intervals of a suffix array).

Among siblings the subtree that serves the most chunks for the work it takes goes first (Echo's
objective, Eq. 3: benefit per second; for waiting times, Smith's rule). Within 9 % of each other
they keep the order of their first row in the input, and a job without shared prefixes runs as it
was written. Echo's length buckets (section 6) are one bucket here: more do not pay.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchrun.pool.prefix_keys import ChainTable, IntArray, KeyArray

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


NO_NODE = -1


def path_up(parents: Sequence[int] | IntArray, node: int) -> list[int]:
    """The nodes from this one up to the root."""
    path: list[int] = []
    while node != NO_NODE:
        path.append(node)
        node = int(parents[node])
    return path


@dataclass(frozen=True, slots=True)
class RadixTree:
    """A radix tree over sorted rows, as arrays: nodes by number, the root of a subtree before its
    children.

    Node k holds the positions `starts[k]` to `ends[k]` (exclusive, two or more) of the order, whose
    rows share exactly `depths[k]` leading chunks; `parents[k]` is the node around it or NO_NODE.
    `innermost[i]` is the deepest node of position i, or NO_NODE for a row that shares nothing.
    """

    starts: IntArray
    ends: IntArray
    depths: IntArray
    parents: IntArray
    innermost: IntArray

    def path(self, position: int) -> list[int]:
        """The nodes above a position, from the root downwards."""
        return path_up(self.parents, int(self.innermost[position]))[::-1]

    @property
    def num_nodes(self) -> int:
        """Nodes in all trees."""
        return len(self.starts)


def build_radix_tree(shared_chunks: IntArray) -> RadixTree:
    """The nodes of an order, from how many chunks each position shares with the one before.

    One pass for each depth that occurs, over the positions that go as deep: O(shared chunks) in
    all, in numpy.
    """
    starts, ends, depths = _intervals(shared_chunks)
    order = np.lexsort((depths, starts))
    starts, ends, depths = starts[order], ends[order], depths[order]
    parents = np.full(len(starts), NO_NODE, dtype=np.int64)
    innermost = np.full(len(shared_chunks), NO_NODE, dtype=np.int64)
    by_depth = np.argsort(depths, kind="stable")
    bounds = np.flatnonzero(np.diff(depths[by_depth])) + 1
    for nodes in np.split(by_depth, bounds) if len(starts) else ():
        parents[nodes] = innermost[starts[nodes]]
        innermost[spread(starts[nodes], ends[nodes])] = np.repeat(
            nodes, ends[nodes] - starts[nodes]
        )
    return RadixTree(starts, ends, depths, parents, innermost)


def spread(starts: IntArray, ends: IntArray) -> IntArray:
    """All positions of these intervals, one interval after the other."""
    sizes = ends - starts
    before = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    positions: IntArray = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
    return positions


def _intervals(shared: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """(start, end, depth) of every node: the longest runs that share at least a depth, where some
    neighbours share no more."""
    found: list[tuple[IntArray, IntArray, IntArray]] = []
    deep = np.flatnonzero(shared)
    for depth in np.unique(shared[deep]).tolist():
        deep = deep[shared[deep] >= depth]
        firsts = np.flatnonzero(np.diff(deep, prepend=-1) != 1)
        lasts = np.append(firsts[1:], deep.size) - 1
        is_node = np.minimum.reduceat(shared[deep], firsts) == depth
        starts, ends = deep[firsts[is_node]] - 1, deep[lasts[is_node]] + 1
        found.append((starts, ends, np.full(starts.size, depth, dtype=np.int64)))
    if not found:
        none = np.empty(0, dtype=np.int64)
        return none, none, none
    starts, ends, depths = (np.concatenate(column) for column in zip(*found, strict=True))
    return starts, ends, depths


def nearest_marked(parents: IntArray, is_marked: BoolArray) -> IntArray:
    """For each node the deepest marked one from the root down to it, or NO_NODE."""
    found = np.append(np.where(is_marked, np.arange(len(parents)), NO_NODE), NO_NODE)
    up = np.append(parents, NO_NODE)
    while (up != NO_NODE).any():
        found, up = np.where(found == NO_NODE, found[up], found), up[up]
    return found[:-1]


FloatArray = npt.NDArray[np.float64]

ATTENTION_CHUNKS = 940
"""A prefix of so many chunks (about 60,000 tokens) takes twice the work that its length alone
would: attention grows with the square. True of 8B models, roughly of others."""
WORTH_LEVELS = 8
"""Worths that are told apart per doubling."""


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """Rows in the order to run them.

    `rows[i]` is the i-th row to run; `shared_chunks[i]` is how many leading chunks it shares with
    `rows[i - 1]` (0 for the first), which is also the most it shares with any row before it.
    `by_chain` holds the same rows sorted by chain, where `rows_with_prefix` finds them.
    """

    rows: IntArray
    shared_chunks: IntArray
    by_chain: IntArray


def order_by_prefix(table: ChainTable) -> PrefixOrder:
    """Order all rows of the table. O(rows x log rows) for each branching on a path."""
    by_chain = sort_by_chain(table, np.arange(table.num_rows))
    shared = table.shared_with_previous(by_chain)
    lengths = table.lengths[by_chain]
    items = _Items.of(build_radix_tree(shared), by_chain)
    order = np.lexsort((items.first_rows, -_worth(items, lengths, shared), items.parents))
    rows = np.empty_like(by_chain)
    rows[_new_positions(items, order)] = by_chain
    return PrefixOrder(rows, table.shared_with_previous(rows), by_chain)


@dataclass(frozen=True, slots=True)
class _Items:
    """What is put in order: all nodes, then every single row. Parents are nodes.

    `parent_depths` are the chunks that all rows of the parent share, `first_rows` the smallest row
    numbers; `levels` are the nodes of the trees' levels, roots first.
    """

    starts: IntArray
    ends: IntArray
    parents: IntArray
    parent_depths: IntArray
    first_rows: IntArray
    levels: list[IntArray]

    @classmethod
    def of(cls, nodes: RadixTree, by_chain: IntArray) -> _Items:
        positions = np.arange(len(by_chain))
        parents = np.concatenate((nodes.parents, nodes.innermost))
        levels = _levels(nodes.parents)
        return cls(
            np.concatenate((nodes.starts, positions)),
            np.concatenate((nodes.ends, positions + 1)),
            parents,
            np.append(nodes.depths, 0)[parents],
            np.concatenate((_first_rows(nodes, levels, by_chain), by_chain)),
            levels,
        )


def _levels(parents: IntArray) -> list[IntArray]:
    """Nodes by how many are around them. Parents are numbered before their children."""
    level = np.zeros(len(parents), dtype=np.int64)
    around = parents
    while (inside := np.flatnonzero(around != NO_NODE)).size:
        level[inside] += 1
        around = np.where(around == NO_NODE, NO_NODE, parents[around])
    by_level = np.argsort(level, kind="stable")
    bounds = np.flatnonzero(np.diff(level[by_level])) + 1
    return np.split(by_level, bounds) if len(parents) else []


def _first_rows(nodes: RadixTree, levels: list[IntArray], by_chain: IntArray) -> IntArray:
    """The smallest row number of each node."""
    smallest = np.full(nodes.num_nodes, np.iinfo(np.int64).max)
    inside = np.flatnonzero(nodes.innermost != NO_NODE)
    np.minimum.at(smallest, nodes.innermost[inside], by_chain[inside])
    for level in reversed(levels[1:]):
        np.minimum.at(smallest, nodes.parents[level], smallest[level])
    return smallest


def _worth(items: _Items, lengths: IntArray, shared: IntArray) -> IntArray:
    """For each item, the log of the chunks it serves per work: its first row computes all behind
    the parent's prefix, every other one what it does not share with the one before it."""
    served = np.concatenate(([0.0], np.cumsum(1.0 + lengths)))
    work = np.concatenate(([0.0], np.cumsum(_work(lengths, shared))))
    first = items.starts
    item_work = work[items.ends] - work[first]
    item_work += _work(lengths[first], items.parent_depths) - _work(lengths[first], shared[first])
    item_served = served[items.ends] - served[first]
    worth: IntArray = np.round(WORTH_LEVELS * np.log2(item_served / item_work)).astype(np.int64)
    return worth


def _work(lengths: IntArray, cached: IntArray) -> FloatArray:
    total, known = lengths.astype(np.float64), cached.astype(np.float64)
    work: FloatArray = 1 + total - known + (total**2 - known**2) / ATTENTION_CHUNKS
    return work


def _new_positions(items: _Items, order: IntArray) -> IntArray:
    """Where each row goes when every parent's items stand in `order`, which is by parent."""
    parents, sizes = items.parents[order], (items.ends - items.starts)[order]
    before = np.cumsum(sizes) - sizes
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = parents[1:] != parents[:-1]
    offset = np.empty(len(order), dtype=np.int64)
    offset[order] = before - np.maximum.accumulate(np.where(is_first, before, 0))
    num_nodes = sum(map(len, items.levels))
    starts = np.zeros(num_nodes + 1, dtype=np.int64)  # the last stands for NO_NODE
    for level in items.levels:
        starts[level] = starts[items.parents[level]] + offset[level]
    positions: IntArray = starts[items.parents[num_nodes:]] + offset[num_nodes:]
    return positions
