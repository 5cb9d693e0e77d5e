"""The prompt study of Preble's section 3 (arXiv 2407.00023), for any job.

Its second paragraph: the study covers "prompt and decoding (output) length, amount of sharing in a
prompt, key portion size in a prompt, and number of requests sharing a key portion. We define the
'key portion' of a request as the deepest node in a path that has more tokens than the sum of its
predecessors." The tree stands for "an infinite prefix cache" (first paragraph).

What table 1 calls "shared prefix in prompt" is what that cache holds when a request comes. A path
ends with what the request has for itself, which may be its key portion.

Texts are cut into finer chunks where they begin (`Cuts`) than the order of a job needs. Where
within a chunk rows part is not known, and half of it is assumed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchrun.pool.prefix_keys import CHUNK_BYTES, ChainTable, IntArray
from batchrun.pool.radix_tree import (
    NO_NODE,
    RadixTree,
    build_radix_tree,
    nearest_marked,
    sort_by_chain,
)

FloatArray = npt.NDArray[np.float64]

FIRST_BYTES = 8
LEAST_BYTES = 32
GRAIN_SHARE = 32


class Cuts:
    """Where a study cuts texts into chunks: called with a length, the ends of its chunks.

    The first is short, since a beginning that all rows share often is. The others take a 32nd
    of what stands before them, at least 32 bytes and at most `CHUNK_BYTES`.
    """

    def __init__(self) -> None:
        self._ends = [0, FIRST_BYTES]

    def __call__(self, num_bytes: int) -> list[int]:
        """The ends of the chunks of a text of so many bytes; the last one may be cut short."""
        ends = self._ends
        while ends[-1] <= num_bytes:
            ends.append(ends[-1] + min(CHUNK_BYTES, max(LEAST_BYTES, ends[-1] // GRAIN_SHARE)))
        return [*ends[1 : bisect_left(ends, num_bytes)], num_bytes]

    def middles(self) -> IntArray:
        """By number of chunks that texts share: the bytes, half of the next chunk included."""
        ends = np.array([*self._ends, self._ends[-1] + CHUNK_BYTES], dtype=np.int64)
        middles: IntArray = (ends[:-1] + ends[1:]) // 2
        return middles


@dataclass(frozen=True, slots=True, eq=False)
class PromptTree:
    """Rows that share a beginning stand together; a node is a beginning that two or more have.

    `rows[i]` is the row at position i, with `text_bytes[i]` of prompt. The rows of node k share
    `depth_bytes[k]` of text, give or take half a chunk. What a row has for itself, behind its
    innermost node, is its leaf.
    """

    rows: IntArray
    text_bytes: IntArray
    nodes: RadixTree
    depth_bytes: IntArray

    @classmethod
    def of(cls, chains: ChainTable, cuts: Cuts, text_bytes: IntArray, rows: IntArray) -> PromptTree:
        """The tree of these rows; `chains`, cut by `cuts`, and `text_bytes` are of all rows."""
        order = sort_by_chain(chains, rows)
        nodes = build_radix_tree(chains.shared_with_previous(order))
        lengths = text_bytes[order]
        depth_bytes = np.minimum(cuts.middles()[nodes.depths], least_of(nodes, lengths))
        return cls(order, lengths, nodes, depth_bytes)

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


def least_of(nodes: RadixTree, values: IntArray) -> IntArray:
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


@dataclass(frozen=True, slots=True, eq=False)
class TreeTokens:
    """Tokens of each node's own text, and of each position's leaf."""

    nodes: FloatArray
    leaves: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class PromptStudy:
    """One value for each position of the tree, in tokens.

    `shared` is the prefix that a row earlier in the input has, `common` the one that any other row
    has. `key_nodes` is the node that is the key portion, or NO_NODE where that is the leaf;
    `key_portions` its tokens. `rows_per_key` has one value for each distinct key portion: the rows
    whose prompts hold it. `depths` are the tokens of each node with those around it.
    """

    prompts: FloatArray
    shared: FloatArray
    common: FloatArray
    key_nodes: IntArray
    key_portions: FloatArray
    rows_per_key: IntArray
    depths: FloatArray

    def shares(self, tokens: FloatArray) -> FloatArray:
        """What share (0 to 1) of its prompt some tokens of each position are."""
        shares: FloatArray = tokens / np.maximum(self.prompts, 1e-9)
        return shares


def study_prompts(tree: PromptTree, tokens: TreeTokens) -> PromptStudy:
    """Preble's figures for every row. O(positions x levels of the tree), in numpy."""
    parents, innermost = tree.nodes.parents, tree.innermost
    depths = path_sums(parents, tokens.nodes)
    above = np.append(depths, 0.0)[innermost]
    key_nodes, key_portions = _key_portions(tree, tokens, depths)
    node_keys = np.unique(key_nodes[key_nodes != NO_NODE])
    sizes = (tree.nodes.ends - tree.nodes.starts)[node_keys]
    num_leaf_keys = int(np.count_nonzero(key_nodes == NO_NODE))
    return PromptStudy(
        prompts=above + tokens.leaves,
        shared=np.append(depths, 0.0)[tree.shared_with_earlier(tree.rows)],
        common=above,
        key_nodes=key_nodes,
        key_portions=key_portions,
        rows_per_key=np.concatenate((sizes, np.ones(num_leaf_keys, dtype=np.int64))),
        depths=depths,
    )


def servable_tokens(found: FloatArray, prompts: FloatArray, block_tokens: int) -> FloatArray:
    """What vLLM takes from its prefix cache of `found` tokens: whole blocks, and never the last
    token of a prompt, which is computed for its logits."""
    blocks = np.minimum(found, np.maximum(prompts - 1, 0)) // block_tokens
    servable: FloatArray = blocks * block_tokens
    return servable


def _key_portions(
    tree: PromptTree, tokens: TreeTokens, depths: FloatArray
) -> tuple[IntArray, FloatArray]:
    """(node or NO_NODE for the leaf, tokens) of each position's key portion."""
    is_larger = tokens.nodes > depths - tokens.nodes
    key_of_node = np.append(nearest_marked(tree.nodes.parents, is_larger), NO_NODE)
    is_leaf = tokens.leaves > np.append(depths, 0.0)[tree.innermost]
    keys = np.where(is_leaf, NO_NODE, key_of_node[tree.innermost])
    portions = np.where(keys == NO_NODE, tokens.leaves, np.append(tokens.nodes, 0.0)[keys])
    return keys, portions
