"""The prefix tree of a planned order: which rows share a prefix, and for how long it is needed.

In a depth-first order every subtree is an interval of positions, so the tree follows from the
chunks that neighbours share (the LCP intervals of a suffix array).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchrun.pool.prefix_order import IntArray

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


def find_prefix_nodes(shared_chunks: IntArray) -> PrefixNodes:
    """The nodes of an order, from how many chunks each position shares with the one before.

    O(positions): one pass with a stack of the intervals that are still open.
    """
    num_rows = len(shared_chunks)
    found: list[tuple[int, int, int]] = []
    stack: list[tuple[int, int]] = []
    for position in range(1, num_rows + 1):
        shared = int(shared_chunks[position]) if position < num_rows else 0
        start = position - 1
        while stack and stack[-1][1] > shared:
            start, depth = stack.pop()
            found.append((start, position, depth))
        if shared and (not stack or stack[-1][1] < shared):
            stack.append((start, shared))
    found.sort(key=lambda node: (node[0], -node[1]))
    starts, ends, depths = (
        np.array(column, dtype=np.int64)
        for column in (zip(*found, strict=True) if found else ((), (), ()))
    )
    return PrefixNodes(starts, ends, depths, *_place(found, num_rows))


def _place(found: list[tuple[int, int, int]], num_rows: int) -> tuple[IntArray, IntArray]:
    """(parent of each node, innermost node of each position); `found` lists roots first."""
    parents = np.full(len(found), NO_NODE, dtype=np.int64)
    innermost = np.full(num_rows, NO_NODE, dtype=np.int64)
    open_nodes: list[int] = []
    for number, (start, end, _) in enumerate(found):
        while open_nodes and found[open_nodes[-1]][1] <= start:
            open_nodes.pop()
        if open_nodes:
            parents[number] = open_nodes[-1]
        open_nodes.append(number)
        innermost[start:end] = number
    return parents, innermost
