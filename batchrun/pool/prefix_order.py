"""The order in which rows that share a prefix stand together: a radix tree, walked depth first.

Rows sorted by their chains are the tree. Among siblings the subtree that serves the most chunks
for the work it takes goes first (Echo's objective, Eq. 3: benefit per second; for waiting times,
Smith's rule). Within 9 % of each other they keep the order of their first row in the input, and a
job without shared prefixes runs as it was written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchrun.pool.chain_sort import merge_sorted, sort_by_chain
from batchrun.pool.chains import ChainTable, IntArray
from batchrun.pool.length_buckets import bucket_of_groups
from batchrun.pool.prefix_nodes import NO_NODE, PrefixNodes, find_prefix_nodes

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
    `by_chain` holds the same rows sorted by chain, to which more rows can be added.
    """

    rows: IntArray
    shared_chunks: IntArray
    by_chain: IntArray

    @property
    def groups(self) -> IntArray:
        """For each position the number of its group: rows that share at least their first chunk."""
        return np.cumsum(self.shared_chunks == 0) - 1


def order_by_prefix(table: ChainTable, *, num_buckets: int = 1) -> PrefixOrder:
    """Order all rows of the table. O(rows x log rows) for each branching on a path.

    With several `num_buckets`, whole groups of like lengths run together, short ones first.
    """
    by_chain = sort_by_chain(table, np.arange(table.num_rows))
    return _planned(table, by_chain, num_buckets)


def add_rows(order: PrefixOrder, table: ChainTable, *, num_buckets: int = 1) -> PrefixOrder:
    """The order with the rows that `table` has more than it: they join the trees that are there.

    The chains of old rows are neither made nor sorted again. The rows' places may all change.
    """
    more = sort_by_chain(table, np.arange(len(order.by_chain), table.num_rows))
    return _planned(table, merge_sorted(table, order.by_chain, more), num_buckets)


def _planned(table: ChainTable, by_chain: IntArray, num_buckets: int) -> PrefixOrder:
    shared = table.shared_with_previous(by_chain)
    lengths = table.lengths[by_chain]
    nodes = find_prefix_nodes(shared)
    items = _Items.of(nodes, by_chain)
    worth = _worth(items, lengths, shared)
    bucket = _buckets(items, lengths, num_buckets)
    order = np.lexsort((items.first_rows, -worth, bucket, items.parents))
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
    def of(cls, nodes: PrefixNodes, by_chain: IntArray) -> _Items:
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


def _first_rows(nodes: PrefixNodes, levels: list[IntArray], by_chain: IntArray) -> IntArray:
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


def _buckets(items: _Items, lengths: IntArray, num_buckets: int) -> IntArray:
    """The bucket of each group of rows; 0 for items within a group."""
    bucket = np.zeros(len(items.starts), dtype=np.int64)
    roots = np.flatnonzero(items.parents == NO_NODE)
    roots = roots[np.argsort(items.starts[roots])]
    groups = np.repeat(np.arange(roots.size), items.ends[roots] - items.starts[roots])
    bucket[roots] = bucket_of_groups(groups, lengths, num_buckets)
    return bucket


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
