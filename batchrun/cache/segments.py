"""Which cached blocks planned offline rows will read: a radix tree over block hashes.

A row that is announced reads every block of its prompt. A hint says that more rows, not announced
yet, will read the first blocks of a chain. The tree keeps, for every block, how many rows will read
it and the rank of the first of them, without work per block and row: blocks that the same rows read
form one segment, and the values are the segment's.

Prefix closure holds by construction: whoever reads a block reads the ones before it, so along a
chain the reuse count never grows and the next rank never falls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from batchrun.cache.eviction import NO_RANK, UNNEEDED_TIER, EvictionOrder


class Segment:
    """Consecutive blocks, `chain[start:end]`, that the same rows read.

    `rows` (key: rank) end with this segment; `hints` (key: (rows to come, next rank)) reach to its
    end. `num_rows`, `num_beyond` and `next_rank` take in everything below it: announced rows, rows
    still to be announced, and the first rank of them all.
    """

    __slots__ = (
        "chain", "children", "children_beyond", "end", "hints", "next_rank", "num_beyond",
        "num_rows", "parent", "rows", "start", "tier", "tier_front",
    )  # fmt: skip

    def __init__(
        self, parent: Segment | None, chain: Sequence[bytes], start: int, end: int
    ) -> None:
        self.parent = parent
        self.chain, self.start, self.end = chain, start, end
        self.children: dict[bytes, Segment] = {}
        self.rows: dict[Hashable, int] = {}
        self.hints: dict[Hashable, tuple[int, int]] = {}
        self.num_rows = self.num_beyond = self.children_beyond = 0
        self.next_rank = NO_RANK
        self.tier = UNNEEDED_TIER
        self.tier_front = -1

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


class SegmentTree:
    """Segments by block key; the key of a block is its hash followed by `key_suffix`.

    Announcing a row costs O(log blocks) per segment on its path, plus one dictionary entry per
    block that no other row has; a split moves only the blocks below it.
    """

    def __init__(self, order: EvictionOrder, key_suffix: bytes = b"") -> None:
        self._wanted_tier = order.wanted_tier
        self._suffix = key_suffix
        self._root = Segment(None, (), 0, 0)
        self.front_rank = 0
        self.blocks: dict[bytes, Segment] = {}
        self.fallen: list[Segment] = []

    def tier(self, segment: Segment) -> int:
        """Its tier at the present front."""
        if segment.tier_front != self.front_rank:
            segment.tier_front = self.front_rank
            segment.tier = self._compute_tier(segment)
        return segment.tier

    def _compute_tier(self, segment: Segment) -> int:
        count = segment.num_rows + segment.num_beyond
        if count == 0:
            return UNNEEDED_TIER
        return self._wanted_tier(count, segment.next_rank, self.front_rank)

    def keys_of(self, segment: Segment) -> Iterator[bytes]:
        """The block keys of a segment, from its end."""
        for i in range(segment.end - 1, segment.start - 1, -1):
            yield segment.chain[i] + self._suffix

    def add_row(self, chain: Sequence[bytes], row: Hashable, rank: int) -> None:
        """A row will read all of `chain` (not empty)."""
        segment = self._ending_at(chain, len(chain))
        segment.rows[row] = rank
        self._settle(segment, 1)

    def drop_row(self, chain: Sequence[bytes], row: Hashable) -> None:
        """The row no longer will."""
        segment = self._segment_of(chain[-1])
        del segment.rows[row]
        self._settle(segment, -1)

    def add_hint(
        self, chain: Sequence[bytes], num_blocks: int, hint: Hashable, use: tuple[int, int]
    ) -> None:
        """`use` = (rows to come, first rank) will read `chain[:num_blocks]`; replaces an earlier
        hint of that key there."""
        segment = self._ending_at(chain, num_blocks)
        segment.hints[hint] = use
        self._settle(segment, 0)

    def drop_hint(self, last_hash: bytes, hint: Hashable) -> None:
        """Forget the hint that reaches to this block."""
        segment = self._segment_of(last_hash)
        del segment.hints[hint]
        self._settle(segment, 0)

    def _segment_of(self, block_hash: bytes) -> Segment:
        return self.blocks[block_hash + self._suffix]

    def _ending_at(self, chain: Sequence[bytes], num_blocks: int) -> Segment:
        """The segment that ends with `chain[num_blocks - 1]`, made or cut out as needed."""
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

    def _grow(self, parent: Segment, chain: Sequence[bytes], end: int) -> Segment:
        leaf = Segment(parent, chain, parent.end, end)
        parent.children[chain[leaf.start]] = leaf
        self._map(leaf)
        return leaf

    def _split(self, segment: Segment, at: int) -> None:
        """Cut the blocks from `at` on off into a child that takes over rows, hints, children."""
        below = Segment(segment, segment.chain, at, segment.end)
        below.rows, segment.rows = segment.rows, {}
        below.hints, segment.hints = segment.hints, {}
        below.children, segment.children = segment.children, {segment.chain[at]: below}
        for child in below.children.values():
            child.parent = below
        below.num_rows, below.num_beyond = segment.num_rows, segment.num_beyond
        below.children_beyond = segment.children_beyond
        below.next_rank = segment.next_rank
        segment.children_beyond = segment.num_beyond
        segment.end = at
        self._map(below)

    def _map(self, segment: Segment) -> None:
        blocks, suffix = self.blocks, self._suffix
        for block_hash in segment.chain[segment.start : segment.end]:
            blocks[block_hash + suffix] = segment

    def _settle(self, segment: Segment, num_rows_more: int) -> None:
        """Carry a change of a segment's own rows or hints up to the root; drop what is unused."""
        node = segment
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

    def _remove(self, segment: Segment, parent: Segment) -> None:
        del parent.children[segment.chain[segment.start]]
        for key in self.keys_of(segment):
            del self.blocks[key]

    def check(self) -> None:
        """Recount everything; raises AssertionError when an account does not balance."""
        num_mapped = sum(self._check_below(child) for child in self._root.children.values())
        assert num_mapped == len(self.blocks)

    def _check_below(self, node: Segment) -> int:
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
