"""Which cached blocks planned offline rows will read: a radix tree over block hashes.

A row that is announced reads every block of its prompt. A hint says that more rows, not announced
yet, will read the first blocks of a chain. The tree keeps, for every block, how many rows will read
it and the rank of the first of them, without work per block and row: blocks that the same rows read
form one node, and the values are the node's.

Prefix closure holds by construction: whoever reads a block reads the ones before it, so along a
chain the reuse count never grows and the next rank never falls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from batchrun.cache.eviction import NO_RANK, UNNEEDED_TIER, EvictionOrder


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """Consecutive blocks, `chain[start:end]`, that the same rows read.

    `rows` (key: rank) end with this node; `hints` (key: (rows to come, next rank)) reach to its
    end. `num_rows`, `num_beyond` and `next_rank` take in everything below it: announced rows, rows
    still to be announced, and the first rank of them all.
    """

    parent: RadixNode | None
    chain: Sequence[bytes]
    start: int
    end: int
    children: dict[bytes, RadixNode] = field(default_factory=dict)
    rows: dict[Hashable, int] = field(default_factory=dict)
    hints: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    num_rows: int = 0
    num_beyond: int = 0
    children_beyond: int = 0
    next_rank: int = NO_RANK
    tier: int = UNNEEDED_TIER
    tier_front: int = -1

    @property
    def reuse_count(self) -> int:
        """Rows that will read these blocks, announced or not."""
        return self.num_rows + self.num_beyond

    def refresh(self) -> None:
        """Recompute `num_beyond` and `next_rank` from its own and its children's.

        A hint's rows include those of the hints below it, so the two are not added up.
        """
        own = max((count for count, _ in self.hints.values()), default=0)
        self.num_beyond = max(own, self.children_beyond)
        soonest = min(self.rows.values(), default=NO_RANK)
        for _, rank in self.hints.values():
            soonest = min(soonest, rank)
        for child in self.children.values():
            soonest = min(soonest, child.next_rank)
        self.next_rank = soonest


class BlockRadixTree:
    """Nodes by block key; the key of a block is its hash followed by `key_suffix`.

    Announcing a row costs O(log blocks) per node on its path, plus one dictionary entry per
    block that no other row has; a split moves only the blocks below it.
    """

    def __init__(self, order: EvictionOrder, key_suffix: bytes = b"") -> None:
        self._eviction_key = order.eviction_key
        self._suffix = key_suffix
        self._root = RadixNode(None, (), 0, 0)
        self.front_rank = 0
        self.blocks: dict[bytes, RadixNode] = {}
        self.fallen: list[RadixNode] = []

    def tier(self, node: RadixNode) -> int:
        """Its tier at the present front."""
        if node.tier_front != self.front_rank:
            node.tier_front = self.front_rank
            node.tier = self._compute_tier(node)
        return node.tier

    def _compute_tier(self, node: RadixNode) -> int:
        count = node.num_rows + node.num_beyond
        if count == 0:
            return UNNEEDED_TIER
        return self._eviction_key(count, node.next_rank, self.front_rank)

    def keys_of(self, node: RadixNode) -> Iterator[bytes]:
        """The block keys of a node, from its end."""
        for i in range(node.end - 1, node.start - 1, -1):
            yield node.chain[i] + self._suffix

    def add_row(self, chain: Sequence[bytes], row: Hashable, rank: int) -> None:
        """A row will read all of `chain` (not empty)."""
        node = self._ending_at(chain, len(chain))
        node.rows[row] = rank
        self._settle(node, 1)

    def drop_row(self, chain: Sequence[bytes], row: Hashable) -> None:
        """The row no longer will."""
        node = self._node_of(chain[-1])
        del node.rows[row]
        self._settle(node, -1)

    def add_hint(
        self, chain: Sequence[bytes], num_blocks: int, hint: Hashable, use: tuple[int, int]
    ) -> None:
        """`use` = (rows to come, first rank) will read `chain[:num_blocks]`; replaces an earlier
        hint of that key there."""
        node = self._ending_at(chain, num_blocks)
        node.hints[hint] = use
        self._settle(node, 0)

    def drop_hint(self, last_hash: bytes, hint: Hashable) -> None:
        """Forget the hint that reaches to this block."""
        node = self._node_of(last_hash)
        del node.hints[hint]
        self._settle(node, 0)

    def _node_of(self, block_hash: bytes) -> RadixNode:
        return self.blocks[block_hash + self._suffix]

    def _ending_at(self, chain: Sequence[bytes], num_blocks: int) -> RadixNode:
        """The node that ends with `chain[num_blocks - 1]`, made or cut out as needed."""
        node = self._root
        while node.end < num_blocks:
            child = node.children.get(chain[node.end])
            if child is None:
                return self._grow(node, chain, num_blocks)
            shared = common_blocks(child.chain, chain, child.start, min(child.end, num_blocks))
            if shared < child.end:
                self._split(child, shared)
            node = child
        return node

    def _grow(self, parent: RadixNode, chain: Sequence[bytes], end: int) -> RadixNode:
        leaf = RadixNode(parent, chain, parent.end, end)
        parent.children[chain[leaf.start]] = leaf
        self._map(leaf)
        return leaf

    def _split(self, node: RadixNode, at: int) -> None:
        """Cut the blocks from `at` on off into a child that takes over rows, hints, children."""
        below = RadixNode(node, node.chain, at, node.end)
        below.rows, node.rows = node.rows, {}
        below.hints, node.hints = node.hints, {}
        below.children, node.children = node.children, {node.chain[at]: below}
        for child in below.children.values():
            child.parent = below
        below.num_rows, below.num_beyond = node.num_rows, node.num_beyond
        below.children_beyond = node.children_beyond
        below.next_rank = node.next_rank
        node.children_beyond = node.num_beyond
        node.end = at
        self._map(below)

    def _map(self, node: RadixNode) -> None:
        blocks, suffix = self.blocks, self._suffix
        for block_hash in node.chain[node.start : node.end]:
            blocks[block_hash + suffix] = node

    def _settle(self, changed: RadixNode, num_rows_more: int) -> None:
        """Carry a change of a node's own rows or hints up to the root; drop what is unused."""
        node = changed
        while (parent := node.parent) is not None:
            old_tier, old_beyond = self.tier(node), node.num_beyond
            node.num_rows += num_rows_more
            node.refresh()
            node.tier = self._compute_tier(node)
            if node.tier < old_tier:
                self.fallen.append(node)
            parent.children_beyond += node.num_beyond - old_beyond
            if node.num_rows + node.num_beyond == 0:
                self._remove(node, parent)
            node = parent

    def _remove(self, node: RadixNode, parent: RadixNode) -> None:
        del parent.children[node.chain[node.start]]
        for key in self.keys_of(node):
            del self.blocks[key]

    def check(self) -> None:
        """Recount everything; raises AssertionError when an account does not balance."""
        num_mapped = sum(self._check_below(child) for child in self._root.children.values())
        assert num_mapped == len(self.blocks)

    def _check_below(self, node: RadixNode) -> int:
        children = list(node.children.values())
        num_mapped = node.end - node.start + sum(self._check_below(child) for child in children)
        assert node.end > node.start and node.reuse_count > 0
        assert node.num_rows == len(node.rows) + sum(child.num_rows for child in children)
        assert node.children_beyond == sum(child.num_beyond for child in children)
        before = node.num_beyond, node.next_rank
        node.refresh()
        assert before == (node.num_beyond, node.next_rank)
        assert all(self.blocks[key] is node for key in self.keys_of(node))
        for child in children:
            assert child.parent is node and child.start == node.end
            assert child.chain[: node.end] == node.chain[: node.end]
            assert child.reuse_count <= node.reuse_count and child.next_rank >= node.next_rank
            assert self.tier(child) <= self.tier(node)
        return num_mapped


def common_blocks(one: Sequence[bytes], other: Sequence[bytes], low: int, high: int) -> int:
    """How many leading blocks two chains share, known to be at least `low` and at most `high`.

    Hashes are chained, so equality at one place means equality before it: O(log blocks).
    """
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
