"""The prefix tree of all prompts of a job, in bytes: what Preble's study is made on (section 3:
"we construct a prefix tree for all the requests in the dataset")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchrun.pool.chain_sort import sort_by_chain
from batchrun.pool.chains import ChainTable, IntArray
from batchrun.pool.piece_codes import (
    HEAD_PIECE_BYTES,
    PIECE_BYTES,
    CodeArray,
    PieceCodes,
    equal_pieces,
    sort_keys,
)
from batchrun.pool.prefix_key import CHUNK_BYTES
from batchrun.pool.prefix_nodes import NO_NODE, PrefixNodes, find_prefix_nodes

UNIT_BYTES = HEAD_PIECE_BYTES
"""What depths of nodes are counted in."""

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptTree:
    """Rows that share a beginning stand together; a node is a beginning that two or more have.

    `rows[i]` is the row at position i, with `text_bytes[i]` of prompt. The rows of node k share
    `depth_bytes[k]` of text: to half a piece exactly, where they part within one. What a row has
    for itself, behind its innermost node, is its leaf.
    """

    rows: IntArray
    text_bytes: IntArray
    nodes: PrefixNodes
    depth_bytes: IntArray

    @classmethod
    def of(
        cls, chains: ChainTable, codes: PieceCodes, text_bytes: IntArray, rows: IntArray
    ) -> PromptTree:
        """The tree of these rows; the other arguments are of all rows of the job."""
        order, shared_units = _sorted_by_piece(chains, codes, rows)
        nodes = find_prefix_nodes(shared_units)
        lengths = text_bytes[order]
        depth_bytes = nodes.depths * UNIT_BYTES
        in_first_chunk = depth_bytes < CHUNK_BYTES
        depth_bytes += np.where(in_first_chunk, HEAD_PIECE_BYTES, PIECE_BYTES) // 2
        depth_bytes = np.minimum(depth_bytes, least_of(nodes, lengths))
        return cls(order, lengths, nodes, depth_bytes)

    @property
    def num_rows(self) -> int:
        """Rows of the tree."""
        return len(self.rows)

    @property
    def innermost(self) -> IntArray:
        """The deepest node of each position, or NO_NODE."""
        return self.nodes.innermost

    @property
    def node_bytes(self) -> IntArray:
        """What each node adds to the one around it."""
        own: IntArray = self.depth_bytes - np.append(self.depth_bytes, 0)[self.nodes.parents]
        return own

    @property
    def leaf_bytes(self) -> IntArray:
        """What each position has for itself."""
        leaf: IntArray = self.text_bytes - np.append(self.depth_bytes, 0)[self.innermost]
        return leaf

    def positions_of(self, rows: IntArray) -> IntArray:
        """The positions of these rows, all of which are in the tree."""
        by_row = np.argsort(self.rows)
        positions: IntArray = by_row[np.searchsorted(self.rows, rows, sorter=by_row)]
        return positions

    def shared_with_earlier(self, ranks: IntArray) -> IntArray:
        """For each position the deepest node that a row before it has, or NO_NODE, where
        `ranks[i]` says when position i comes. O(positions x levels of the tree)."""
        first = np.append(least_of(self.nodes, ranks), -1)
        parents = np.append(self.nodes.parents, NO_NODE)
        found = self.innermost.copy()
        while (new := np.flatnonzero(first[found] == ranks)).size:
            found[new] = parents[found[new]]
        return found


def least_of(nodes: PrefixNodes, values: IntArray) -> IntArray:
    """The smallest value of each node's positions. O(values x levels of the tree)."""
    if not nodes.num_nodes:
        return np.empty(0, dtype=np.int64)
    bounds = np.stack((nodes.starts, nodes.ends), axis=1).ravel()
    padded = np.append(values, np.iinfo(np.int64).max)
    least: IntArray = np.minimum.reduceat(padded, bounds)[::2]
    return least


def path_sums(parents: IntArray, values: FloatArray) -> FloatArray:
    """For each node the sum of the values from the root down to it. O(nodes x log levels)."""
    sums, up = np.append(values, 0.0), np.append(parents, NO_NODE)
    while (up != NO_NODE).any():
        sums, up = sums + sums[up], up[up]
    return sums[:-1]


def nearest_marked(parents: IntArray, is_marked: npt.NDArray[np.bool_]) -> IntArray:
    """For each node the deepest marked one from the root down to it, or NO_NODE."""
    found = np.append(np.where(is_marked, np.arange(len(parents)), NO_NODE), NO_NODE)
    up = np.append(parents, NO_NODE)
    while (up != NO_NODE).any():
        found, up = np.where(found == NO_NODE, found[up], found), up[up]
    return found[:-1]


def _sorted_by_piece(
    chains: ChainTable, codes: PieceCodes, rows: IntArray
) -> tuple[IntArray, IntArray]:
    """(rows, leading units that each shares with the one before).

    Rows sorted by chain are the tree in chunks. In it the items of a node, its inner nodes and
    single rows, are sorted by the codes of the chunk in which they part.
    """
    by_chain = sort_by_chain(chains, rows)
    nodes = find_prefix_nodes(chains.shared_with_previous(by_chain))
    starts = np.concatenate((nodes.starts, np.arange(len(rows))))
    sizes = np.concatenate((nodes.ends - nodes.starts, np.ones(len(rows), dtype=np.int64)))
    parents = np.concatenate((nodes.parents, nodes.innermost))
    outer, inner = np.flatnonzero(parents == NO_NODE), np.flatnonzero(parents != NO_NODE)
    depths = nodes.depths[parents[inner]]
    first_rows = by_chain[starts]
    outer_order, outer_equal = _siblings(parents[outer], codes.heads[first_rows[outer]])
    inner_order, inner_equal = _siblings(parents[inner], codes.at(first_rows[inner], depths))
    order = np.concatenate((outer[outer_order], inner[inner_order]))
    inner_equal = inner_equal * (PIECE_BYTES // UNIT_BYTES)
    units = np.concatenate((
        outer_equal,
        depths[inner_order] * (CHUNK_BYTES // UNIT_BYTES) + inner_equal,
    ))
    return _placed(nodes, order, parents, sizes, units, by_chain)


def _siblings(parents: IntArray, codes: CodeArray) -> tuple[IntArray, IntArray]:
    """(order by parent and codes, leading pieces that each shares with the sibling before it)."""
    order = np.lexsort((*reversed(sort_keys(codes)), parents))
    num_siblings = np.bincount(parents + 1)[parents + 1] if len(parents) else parents
    equal = np.zeros(len(order), dtype=np.int64)
    equal[1:] = equal_pieces(codes[order[1:]], codes[order[:-1]], num_siblings[order[1:]])
    return order, equal


def _placed(
    nodes: PrefixNodes,
    order: IntArray,
    parents: IntArray,
    sizes: IntArray,
    units: IntArray,
    by_chain: IntArray,
) -> tuple[IntArray, IntArray]:
    """Items, which are the nodes and then the rows, in `order`: (rows, units shared with the row
    before), where `units` are those of each item with the sibling before it."""
    is_first = np.diff(parents[order], prepend=NO_NODE - 1) != 0
    before = np.cumsum(sizes[order]) - sizes[order]
    offsets = np.empty(len(order), dtype=np.float64)
    offsets[order] = before - np.maximum.accumulate(np.where(is_first, before, 0))
    node_starts = np.append(path_sums(nodes.parents, offsets[: nodes.num_nodes]), 0.0)
    starts = (node_starts[parents] + offsets).astype(np.int64)
    shared = np.zeros(len(by_chain), dtype=np.int64)
    shared[starts[order[~is_first]]] = units[~is_first]
    rows = np.empty_like(by_chain)
    rows[starts[nodes.num_nodes :]] = by_chain
    return rows, shared
