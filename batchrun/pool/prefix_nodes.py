"""The prefix tree of an order: which rows share a prefix.

Where rows that share a prefix stand together, every subtree is an interval of positions, so the
tree follows from the chunks that neighbours share (the LCP intervals of a suffix array).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchrun.pool.chains import IntArray

NO_NODE = -1


@dataclass(frozen=True, slots=True)
class PrefixNodes:
    """Nodes by number, the root of a subtree before its children.

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
        nodes: list[int] = []
        node = int(self.innermost[position])
        while node != NO_NODE:
            nodes.append(node)
            node = int(self.parents[node])
        nodes.reverse()
        return nodes

    @property
    def num_nodes(self) -> int:
        """Nodes in all trees."""
        return len(self.starts)


def find_prefix_nodes(shared_chunks: IntArray) -> PrefixNodes:
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
    return PrefixNodes(starts, ends, depths, parents, innermost)


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
