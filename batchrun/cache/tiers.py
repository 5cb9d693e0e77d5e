"""The tier of a block: what planned rows, online prefixes and the last user say, put together.

Prefixes that online requests hit again and again, such as a system prompt: they have a floor.

In Echo's order one offline row to come outranks the blocks of finished online requests, the system
prompt of every later online request among them; losing that costs online TTFT.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchrun.cache.eviction import UNNEEDED_TIER, EvictionOrder
from batchrun.cache.reuse import ReuseIndex

FLOOR_S = 120.0
MAX_FLOOR_BLOCKS = 256


class OnlinePrefixes:
    """Block keys that at least two online requests hit, each within `floor_s` of the last.

    At most `max_blocks` of them, the latest hit ones. A hit covers a whole prefix, so the set is
    closed under prefixes at any time.
    """

    __slots__ = ("_floor_s", "_max_blocks", "_seen_s", "floored")

    def __init__(self, floor_s: float = FLOOR_S, max_blocks: int = MAX_FLOOR_BLOCKS) -> None:
        self._floor_s = floor_s
        self._max_blocks = max_blocks
        self._seen_s: dict[bytes, float] = {}
        self.floored: dict[bytes, float] = {}

    def hit(self, keys: Iterable[bytes], now_s: float) -> list[bytes]:
        """An online request hit this whole prefix, keys from its start, at `now_s` (never falls).

        Returns the keys that lost their floor for it. Cost: dictionary work per block hit, bounded
        by `max_blocks`.
        """
        prefix = [key for key, _ in zip(keys, range(self._max_blocks), strict=False)]
        for key in reversed(prefix):
            seen_s = self._seen_s.pop(key, None)
            last_s = self.floored.pop(key, seen_s)
            is_again = last_s is not None and last_s + self._floor_s > now_s
            (self.floored if is_again else self._seen_s)[key] = now_s
        _drop_first(self._seen_s, len(self._seen_s) - self._max_blocks)
        return _drop_first(self.floored, len(self.floored) - self._max_blocks)

    def expire(self, now_s: float) -> list[bytes]:
        """End the floor of prefixes not hit for `floor_s`; returns their keys, deepest first."""
        _drop_first(self._seen_s, self._num_older(self._seen_s, now_s))
        return _drop_first(self.floored, self._num_older(self.floored, now_s))

    def _num_older(self, hits: dict[bytes, float], now_s: float) -> int:
        num = 0
        for hit_s in hits.values():
            if hit_s + self._floor_s > now_s:
                break
            num += 1
        return num


def _drop_first(hits: dict[bytes, float], num: int) -> list[bytes]:
    dropped = [key for key, _ in zip(hits, range(num), strict=False)]
    for key in dropped:
        del hits[key]
    return dropped


class BlockTiers:
    """`tier_of` for a `TieredFreeQueue`.

    `is_freeing_online` is set by the caller around freeing an online request's blocks, and False
    otherwise. Content that an online request has freed once stays marked until it is evicted, even
    if an offline row hits and frees it later; with the maximum of monotone parts this keeps a
    parent block's tier at or above its child's.

    Measured: about 0.2 us per block (benchmarks/part_costs.py).
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

    def num_wanted_free(self, free_by_tier: list[int]) -> int:
        """Free blocks that planned rows will hit soon, from a queue's counts by tier. O(tiers).

        Blocks that began to be wanted, or wanted soon, while free are counted only once they are
        filed again.
        """
        soon_tier = self._order.soon_tier(self._index.front_rank)
        return sum(free_by_tier[soon_tier : self._floor_tier])
