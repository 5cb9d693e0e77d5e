"""The order in which rows that share a prefix stand together: a radix tree, walked depth first.

Sorting rows by their chain of chunk hashes makes every subtree of the prefix tree contiguous; the
chunks that neighbours share are the tree. Subtrees and rows keep the order of their first row in
the input, so that a job without shared prefixes runs as it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """Rows in the order to run them.

    `rows[i]` is the i-th row to run; `shared_chunks[i]` is how many leading chunks it shares with
    `rows[i - 1]` (0 for the first), which is also the most it shares with any row before it;
    `groups[i]` numbers the groups of rows that share at least their first chunk.
    """

    rows: IntArray
    shared_chunks: IntArray
    groups: IntArray


def order_by_prefix(chains: Sequence[npt.NDArray[np.uint64]]) -> PrefixOrder:
    """Order rows 0..n-1, given each row's chunk chain. O(total chunks x log rows)."""
    num_rows = len(chains)
    lengths = np.fromiter((len(chain) for chain in chains), dtype=np.int64, count=num_rows)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    flat = np.concatenate([*chains, np.empty(0, dtype=np.uint64)])
    ranks = _depth_first_ranks(flat, offsets, lengths)
    rows = np.argsort(ranks, kind="stable").astype(np.int64)
    shared = _shared_with_previous(flat, offsets, lengths, rows)
    return PrefixOrder(rows, shared, np.cumsum(shared == 0) - 1)


def _depth_first_ranks(
    flat: npt.NDArray[np.uint64], offsets: IntArray, lengths: IntArray
) -> IntArray:
    """A key per row whose ascending order is the depth-first walk.

    Level by level, rows that are still together are told apart by their next chunk; a group's key
    is the first row in it, and rows that leave a group keep its key as their prefix. Keys of all
    levels are folded into one integer by re-ranking, so memory stays one array per row.
    """
    num_rows = len(lengths)
    ranks = np.zeros(num_rows, dtype=np.int64)
    together = np.arange(num_rows, dtype=np.int64)
    level = 0
    while together.size > 1:
        first_row = _first_row_of_group(flat, offsets, lengths, together, ranks, level)
        order = np.lexsort((first_row, ranks[together]))
        pairs = np.stack((ranks[together][order], first_row[order]))
        new_group = np.concatenate(([True], np.any(pairs[:, 1:] != pairs[:, :-1], axis=0)))
        starts = np.flatnonzero(new_group)
        sizes = np.diff(np.concatenate((starts, [order.size])))
        # A group's rank is the position of its first member among all rows of its parent group.
        parent_start = np.concatenate(([True], pairs[0, 1:] != pairs[0, :-1]))
        base = np.maximum.accumulate(np.where(parent_start, np.arange(order.size), 0))
        within = np.repeat(starts, sizes) - base
        members = together[order]
        ranks[members] += within
        alive = (np.repeat(sizes, sizes) > 1) & (lengths[members] > level)
        together = members[alive]
        level += 1
    return ranks


def _first_row_of_group(
    flat: npt.NDArray[np.uint64],
    offsets: IntArray,
    lengths: IntArray,
    together: IntArray,
    ranks: IntArray,
    level: int,
) -> IntArray:
    """For each row, the smallest row of its group that has the same chunk at this level.

    A row whose chain has ended here stands alone.
    """
    longer = lengths[together] > level
    first_row = together.copy()
    members = together[longer]
    if members.size:
        chunk = flat[offsets[members] + level]
        # Chained hashes differ between parents already, so the chunk alone names the group.
        _, inverse = np.unique(chunk, return_inverse=True)
        smallest = np.full(int(inverse.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(smallest, inverse, members)
        first_row[longer] = smallest[inverse]
    return first_row


def _shared_with_previous(
    flat: npt.NDArray[np.uint64], offsets: IntArray, lengths: IntArray, rows: IntArray
) -> IntArray:
    shared = np.zeros(rows.size, dtype=np.int64)
    for i in range(1, rows.size):
        one, other = rows[i - 1], rows[i]
        length = min(lengths[one], lengths[other])
        left = flat[offsets[one] : offsets[one] + length]
        right = flat[offsets[other] : offsets[other] + length]
        # In a chain, once two elements differ all later ones do.
        shared[i] = np.count_nonzero(left == right)
    return shared
