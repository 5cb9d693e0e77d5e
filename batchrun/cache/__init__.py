"""The KV cache: which blocks to keep, which to evict first, how much to leave for online bursts."""

from batchrun.cache.block_tiers import BlockTiers
from batchrun.cache.eviction import (
    ECHO_RC,
    EVICTION_ORDERS,
    LRU,
    NEXT_USE,
    EvictionOrder,
)
from batchrun.cache.free_queue import FreeBlock, TieredFreeQueue
from batchrun.cache.hints import NodeUse, RowUse
from batchrun.cache.online_prefixes import OnlinePrefixes
from batchrun.cache.reserve import FORECAST_RESERVE, ONLINE_RESERVES, KvUse, OnlineReserve
from batchrun.cache.reuse import LEASE_S, ReuseIndex
from batchrun.cache.segments import Segment

__all__ = [
    "ECHO_RC",
    "EVICTION_ORDERS",
    "FORECAST_RESERVE",
    "LEASE_S",
    "LRU",
    "NEXT_USE",
    "ONLINE_RESERVES",
    "BlockTiers",
    "EvictionOrder",
    "FreeBlock",
    "KvUse",
    "NodeUse",
    "OnlinePrefixes",
    "OnlineReserve",
    "ReuseIndex",
    "RowUse",
    "Segment",
    "TieredFreeQueue",
]
