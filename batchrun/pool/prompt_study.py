"""The prompt study of Preble's section 3 (arXiv 2407.00023), for any job.

Its second paragraph: the study covers "prompt and decoding (output) length, amount of sharing in a
prompt, key portion size in a prompt, and number of requests sharing a key portion. We define the
'key portion' of a request as the deepest node in a path that has more tokens than the sum of its
predecessors." The tree stands for "an infinite prefix cache" (first paragraph).

What table 1 calls "shared prefix in prompt" is what that cache holds when a request comes: its
VideoQA has 8.6 requests to a video and (88 %, 32 %), which is 1 - 1/8.6 with its deviation. A path
ends with what the request has for itself: VideoQA's key portions take (99 %, 0.2 %) of a prompt,
those of videos with one request too.

Where within a chunk two rows part: codes of 16 bits for every few bytes of a prompt's text.

The order of a job needs whole chunks only. A study of its prompts needs more: of a prompt with
1,400 bytes, half a chunk is a tenth. Every chunk is cut into pieces of 32 bytes. A text's first
chunk is cut into pieces of 8 bytes too, since a beginning that all rows share is often short.

The prefix tree of all prompts of a job, in bytes: what Preble's study is made on (section 3:
"we construct a prefix tree for all the requests in the dataset").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchrun.pool.prefix_keys import CHUNK_BYTES, ChainTable, IntArray
from batchrun.pool.radix_tree import NO_NODE, PrefixNodes, find_prefix_nodes, sort_by_chain

PIECE_BYTES = 32
HEAD_PIECE_BYTES = 8
SURE_BITS = 6
"""An equal beginning among n siblings counts if its codes have so many bits more than log2(n):
by chance it would be found for one sibling in 64 or fewer."""

CodeArray = npt.NDArray[np.uint16]

_CODE_BITS = 16
_CODE_TYPE = np.dtype(">u2")
_PER_CHUNK = CHUNK_BYTES // PIECE_BYTES
_PER_HEAD = CHUNK_BYTES // HEAD_PIECE_BYTES
_FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93],
    dtype=np.uint64,
)


@dataclass(frozen=True, slots=True, eq=False)
class PieceCodes:
    """Row r's chunks, the last one begun included, have the codes
    `codes[starts[r] : starts[r + 1]]`, its first chunk also `heads[r]`: a line for each chunk."""

    codes: CodeArray
    starts: IntArray
    heads: CodeArray

    def at(self, rows: IntArray, chunks: IntArray) -> CodeArray:
        """The codes of the given chunk of each row; zeros where the row has ended before."""
        places = self.starts[rows] + chunks
        found = np.zeros((len(rows), _PER_CHUNK), dtype=_CODE_TYPE)
        goes_on = places < self.starts[rows + 1]
        found[goes_on] = self.codes[places[goes_on]]
        return found


class PieceCoder:
    """Collects the codes of rows in their order: 16 bytes for each begun chunk, 64 for each row."""

    def __init__(self) -> None:
        self._codes, self._heads = bytearray(), bytearray()
        self._num_chunks: list[IntArray] = []

    def add(self, texts: Sequence[bytes]) -> None:
        """The next rows' prompt texts."""
        padded = b"".join(text + bytes(-len(text) % CHUNK_BYTES) for text in texts)
        self._codes += _coded(padded, PIECE_BYTES)
        heads = b"".join(text[:CHUNK_BYTES].ljust(CHUNK_BYTES, b"\0") for text in texts)
        self._heads += _coded(heads, HEAD_PIECE_BYTES)
        num_chunks = [-(-len(text) // CHUNK_BYTES) for text in texts]
        self._num_chunks.append(np.array(num_chunks, dtype=np.int64))

    def build(self) -> PieceCodes:
        """The codes of all rows so far. Shares the coder's memory: add no more after it."""
        codes = np.frombuffer(self._codes, dtype=_CODE_TYPE).reshape(-1, _PER_CHUNK)
        heads = np.frombuffer(self._heads, dtype=_CODE_TYPE).reshape(-1, _PER_HEAD)
        starts = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *self._num_chunks]))
        return PieceCodes(codes, starts, heads)


def sort_keys(codes: CodeArray) -> list[npt.NDArray[np.uint64]]:
    """Keys of the lines of codes, the first one first: in their order, lines with equal beginnings
    stand together."""
    return list(codes.view(">u8").astype(np.uint64).T)


def equal_pieces(codes: CodeArray, others: CodeArray, num_siblings: IntArray) -> IntArray:
    """Leading pieces that each line of codes shares with the other beside it, not by chance."""
    equal: IntArray = np.logical_and.accumulate(codes == others, axis=1).sum(axis=1)
    is_sure = _CODE_BITS * equal >= np.log2(np.maximum(num_siblings, 1)) + SURE_BITS
    return np.where(is_sure, equal, 0)


def _coded(text: bytes, piece_bytes: int) -> bytes:
    words = np.frombuffer(text, dtype="<u8").reshape(-1, piece_bytes // 8)
    mixed = (words * _FACTORS[: words.shape[1]]).sum(axis=1, dtype=np.uint64)
    codes: CodeArray = (mixed >> np.uint64(64 - _CODE_BITS)).astype(_CODE_TYPE)
    return codes.tobytes()


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

    @property
    def shared_shares(self) -> FloatArray:
        """Share of each prompt (0 to 1) that an earlier row has."""
        return _shares(self.shared, self.prompts)

    @property
    def common_shares(self) -> FloatArray:
        """Share of each prompt (0 to 1) that any other row has."""
        return _shares(self.common, self.prompts)

    @property
    def key_shares(self) -> FloatArray:
        """Share of each prompt (0 to 1) that is its key portion."""
        return _shares(self.key_portions, self.prompts)


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


def _shares(part: FloatArray, whole: FloatArray) -> FloatArray:
    shares: FloatArray = part / np.maximum(whole, 1e-9)
    return shares
