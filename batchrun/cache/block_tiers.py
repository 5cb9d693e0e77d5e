"""The tier of a block: what planned rows, online prefixes and the last user say, put together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchrun.cache.eviction import UNNEEDED_TIER, EvictionOrder
from batchrun.cache.online_prefixes import OnlinePrefixes
from batchrun.cache.reuse import ReuseIndex


class BlockTiers:
    """`tier_of` for a `TieredFreeQueue`.

    `is_freeing_online` is set by the caller around freeing an online request's blocks, and False
    otherwise. Content that an online request has freed once stays marked until it is evicted, even
    if an offline row hits and frees it later; with the maximum of monotone parts this keeps a
    parent block's tier at or above its child's.

    Measured: about 0.2 us per block (benchmarks/free_queue.py).
    """

    __slots__ = (
        "_blocks", "_floor_tier", "_floored", "_index", "_online_content", "_online_tier",
        "_order", "_segment_tier", "is_freeing_online",
    )  # fmt: skip

    def __init__(
        self, order: EvictionOrder, reuse: ReuseIndex, online: OnlinePrefixes, num_blocks: int
    ) -> None:
        self._index = reuse
        self._blocks = reuse.blocks
        self._segment_tier = reuse.tier
        self._floored = online.floored
        self._online_tier = order.finished_online_tier
        self._floor_tier = order.online_floor_tier
        self._order = order
        self._online_content: list[bytes | None] = [None] * num_blocks
        self.is_freeing_online = False

    def tier_of(self, block: Any) -> int:
        """The tier this block belongs to now."""
        key = block.block_hash
        if key is None:
            return UNNEEDED_TIER
        if self.is_freeing_online:
            self._online_content[block.block_id] = key
        if self._floored and key in self._floored:
            return self._floor_tier
        segment = self._blocks.get(key)
        if segment is not None:
            return self._segment_tier(segment)
        if self._online_content[block.block_id] is key:
            return self._online_tier
        return UNNEEDED_TIER

    def num_wanted(self, blocks: Iterable[Any]) -> int:
        """How many of these blocks a planned row will hit. O(blocks).

        With more than one tier, `num_wanted_free` of the queue's counts is the cheap way.
        """
        return sum(block.block_hash in self._blocks for block in blocks)

    def num_wanted_free(self, free_by_tier: list[int]) -> int:
        """Free blocks that planned rows will hit soon, from a queue's counts by tier. O(tiers).

        Blocks that began to be wanted, or wanted soon, while free are counted only once they are
        filed again.
        """
        soon_tier = self._order.soon_tier(self._index.front_rank)
        return sum(free_by_tier[soon_tier : self._floor_tier])
