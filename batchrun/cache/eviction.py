"""Which KV stays: eviction orders by name, and the reserve.

An order's eviction key is the tier of the free queue that a wanted block belongs to.

A tier is a small whole number; free blocks of the lowest tier are evicted first, and inside a tier
the least recently used goes first. Three things are common to every order with more than one tier:

- tier 0: blocks without a hash, and blocks that nothing is known to need;
- tier 1: blocks of finished calls (priority 0.5 in Echo, section 4.2), online and flex: nobody
  knows who will read them again;
- the highest tier: prefixes that online requests hit again and again, such as a system prompt.

Between them stand the blocks that planned offline rows will read. Everything is monotone: more rows
to come, or a sooner use, never gives a lower tier. Since every row that reads a block also reads
the blocks before it, a parent block's tier is never below its child's.

The reserve is the threshold on offline KV (Echo, section 4.2): room kept for a burst of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

UNNEEDED_TIER = 0
FINISHED_CALL_TIER = 1
FIRST_WANTED_TIER = 2

NO_RANK = 1 << 62
"""The next rank of something that no planned row reads."""

_USE_LEVELS = 10
_NUM_USE_TIERS = 3 * _USE_LEVELS + 1
_NUM_COUNT_TIERS = 31
_EXACT_COUNTS = 16


@dataclass(frozen=True, slots=True)
class EvictionOrder:
    """A named order. `eviction_key(reuse_count, next_rank, front_rank)` is pure.

    Its arguments: offline rows that will read the block (> 0), the rank of the first of them in
    the planned order, and the rank at which the engine is working now (never falls).
    `goes_by_rank` is whether it heeds ranks, so that a tier tells when its blocks are used.
    """

    name: str
    num_tiers: int
    eviction_key: Callable[[int, int, int], int]
    goes_by_rank: bool = False

    def wanted_tier(self, rank: int, front_rank: int) -> int:
        """The lowest tier of blocks that keep new work of this rank out: rows up to that rank read
        them. Above all that are wanted where the order does not go by rank: were everything kept
        that some row will read, the cache would fill with prefixes of rows whose turn never comes.
        """
        if self.goes_by_rank:
            return self.eviction_key(1, rank, front_rank)
        return self.online_floor_tier

    @property
    def finished_call_tier(self) -> int:
        """The tier of a finished call's blocks."""
        return min(FINISHED_CALL_TIER, self.num_tiers - 1)

    @property
    def online_floor_tier(self) -> int:
        """The tier of prefixes that online requests hit again and again: the highest."""
        return self.num_tiers - 1


def lru_key(reuse_count: int, next_rank: int, front_rank: int) -> int:
    """vLLM's own order: one tier."""
    return UNNEEDED_TIER


def echo_rc_key(reuse_count: int, next_rank: int, front_rank: int) -> int:
    """Echo, section 4.2: the more rows to come, the longer a block stays (priority rc).

    Exact up to 16 rows, then four tiers per doubling, up to 31 tiers.
    """
    if reuse_count <= _EXACT_COUNTS:
        return FIRST_WANTED_TIER + reuse_count - 1
    doublings = reuse_count.bit_length() - _EXACT_COUNTS.bit_length()
    quarter = (reuse_count >> (doublings + 2)) & 3
    step = _EXACT_COUNTS + 4 * doublings + quarter
    return FIRST_WANTED_TIER + min(step, _NUM_COUNT_TIERS - 1)


def next_use_key(reuse_count: int, next_rank: int, front_rank: int) -> int:
    """Belady's rule over the planned order: the block whose next use is latest goes first.

    Ranks are bucketed as in a radix heap with base-4 digits: the highest digit in which the rank
    differs from the front's, and that digit's value: geometric in the distance, 31 buckets. The
    buckets of blocks that were filed earlier stay in the right order while the front advances;
    only the bucket that the front enters is split into finer, sooner ones. So a tier only rises as
    time passes, which the free queue repairs when it pops; nothing must be re-filed eagerly. A
    rank at or behind the front is due now.
    """
    if next_rank <= front_rank:
        return FIRST_WANTED_TIER + _NUM_USE_TIERS - 1
    level = ((next_rank ^ front_rank).bit_length() - 1) >> 1
    if level >= _USE_LEVELS:
        return FIRST_WANTED_TIER
    digit = (next_rank >> (2 * level)) & 3
    return FIRST_WANTED_TIER + _NUM_USE_TIERS - 1 - (3 * level + digit)


LRU = EvictionOrder("lru", 1, lru_key)
ECHO_RC = EvictionOrder("echo-rc", FIRST_WANTED_TIER + _NUM_COUNT_TIERS + 1, echo_rc_key)
NEXT_USE = EvictionOrder("next-use", FIRST_WANTED_TIER + _NUM_USE_TIERS + 1, next_use_key, True)

EVICTIONS: Mapping[str, EvictionOrder] = {each.name: each for each in (LRU, ECHO_RC, NEXT_USE)}
"""Every order by name. A new one is a function and an entry here."""


COLD_START_SHARE = 0.15
"""Share of all blocks kept until the forecast has enough data."""


def reserve_blocks(
    share: float | None, total_blocks: int, online_blocks: int, forecast_blocks: float | None
) -> int:
    """Blocks kept from offline work, beside the `online_blocks` that online requests hold now.

    `share` is a constant share of all blocks (0-1), None to follow `forecast_blocks`, which is None
    while there is not enough data for a forecast.
    """
    expected = forecast_blocks
    if share is not None or expected is None:
        expected = (COLD_START_SHARE if share is None else share) * total_blocks
    return max(0, min(total_blocks, round(expected)) - online_blocks)
