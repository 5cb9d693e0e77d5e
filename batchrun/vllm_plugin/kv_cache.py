"""The KV blocks of one engine: which vLLM evicts first, and how many online requests hold.

`KvTiers` puts our tiers in the place of vLLM's free queue and keeps them true to what hints and
online hits say; `OnlineBlocks` counts the blocks of online requests, those that several share once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from batchrun.cache.block_tree import RadixNode
from batchrun.cache.eviction import EVICTIONS
from batchrun.cache.free_queue import BlockTiers, OnlinePrefixes, TieredFreeQueue
from batchrun.cache.reuse import ReuseIndex
from batchrun.hints import RowHint
from batchrun.scheduling.view import RequestView
from batchrun.vllm_plugin.compat import cached_block_ids, has_plain_blocks

KEY_SUFFIX = b"\0\0\0\0"
"""vLLM keys a cached block by its hash and its KV group's number, 0 where there is one group."""
EXPIRE_INTERVAL_S = 1.0


class KvTiers:
    """The tiered free queue of one engine, with what the hints say of its blocks."""

    def __init__(self, manager: KVCacheManager, eviction: str) -> None:
        order = EVICTIONS[eviction]
        self._pool = manager.block_pool
        self._num_tiers = order.num_tiers
        self._reuse = ReuseIndex(order, KEY_SUFFIX)
        self._online = OnlinePrefixes()
        self.tiers = BlockTiers(order, self._reuse, self._online, self._pool.num_gpu_blocks)
        self._expired_at_s = float("-inf")
        self.rebuild()

    def rebuild(self) -> None:
        """Take all free blocks over: at the start, and after every hash was forgotten."""
        free = self._pool.free_block_queue.get_all_free_blocks()
        in_use = [block for block in self._pool.blocks if block.ref_cnt]
        self._pool.free_block_queue = TieredFreeQueue(  # type: ignore[assignment]  # duck-typed
            free, self._num_tiers, self.tiers.tier_of, in_use
        )

    def announce(self, request: Request, hint: RowHint, now_s: float) -> None:
        """An offline request has come in."""
        self._refile(self._reuse.announce(request.request_id, hint, request.block_hashes, now_s))

    def finished(self, request: Request) -> None:
        """A request ends; call it before its blocks are freed."""
        self._refile(self._reuse.finished(request.request_id))

    def renew(self, epoch: int, jobs: Collection[str], now_s: float) -> None:
        """The daemon lives and runs these jobs: their hints count for another lease."""
        self._refile(self._reuse.renew(epoch, now_s, jobs))

    def forget(self, job: str) -> None:
        """The daemon no longer runs this job: its hints count no more."""
        self._refile(self._reuse.forget(job))

    @property
    def epoch(self) -> int:
        """The start of the daemon whose ranks count."""
        return self._reuse.epoch

    def advance(self, rank: int) -> None:
        """The engine works at this rank of the planned order now."""
        self._reuse.advance(rank)

    def online_hit(self, request: Request, hit_blocks: int, now_s: float) -> None:
        """An online request is admitted with a prefix hit: its prefix gets a floor."""
        if hit_blocks:
            keys = (block_hash + KEY_SUFFIX for block_hash in request.block_hashes[:hit_blocks])
            self._retier(self._online.hit(keys, now_s))

    def expire(self, now_s: float) -> None:
        """Void what has run out; works about once a second."""
        if now_s - self._expired_at_s >= EXPIRE_INTERVAL_S:
            self._expired_at_s = now_s
            self._refile(self._reuse.expire(now_s))
            self._retier(self._online.expire(now_s))

    def num_followers(self, request_id: str) -> int:
        """Rows besides this request's that still have to read its key portion. O(1)."""
        return self._reuse.num_followers(request_id)

    def num_wanted_blocks(self, rank: int) -> int:
        """Free blocks whose KV a row planned up to this rank will hit. 0 under `lru`, which has no
        tiers."""
        if self._num_tiers == 1:
            return 0
        queue = self._pool.free_block_queue
        assert isinstance(queue, TieredFreeQueue)
        return self.tiers.num_wanted_free(queue.free_by_tier(), rank)

    def _refile(self, fallen: Iterable[RadixNode]) -> None:
        for node in fallen:
            self._retier(self._reuse.keys_of(node))

    def _retier(self, keys: Iterable[Any]) -> None:
        blocks = [block_id for key in keys for block_id in cached_block_ids(self._pool, key)]
        queue = self._pool.free_block_queue
        if blocks and isinstance(queue, TieredFreeQueue):
            queue.retier(blocks)


class OnlineBlocks:
    """Counts the distinct blocks of the online requests of one engine.

    A request's blocks are looked at only when its computed tokens have reached another block, so
    that a step costs little however long the contexts are.
    """

    def __init__(self, manager: KVCacheManager, block_tokens: int) -> None:
        self._manager = manager
        self._block_tokens = block_tokens
        self._only_grow = has_plain_blocks(manager)
        self._seen_tokens: dict[str, int] = {}
        self._ids: dict[str, list[int]] = {}
        self._num_holders: dict[int, int] = {}

    def count(self, running: Iterable[Request | RequestView]) -> int:
        """The blocks that these and all online requests seen before hold together."""
        size, seen_tokens = self._block_tokens, self._seen_tokens
        for request in running:
            computed = request.num_computed_tokens
            if computed > seen_tokens.get(request.request_id, 0):
                # Tokens up to the end of the last block are in blocks that are known.
                seen_tokens[request.request_id] = -(-computed // size) * size
                self._look_at(request.request_id)
        return len(self._num_holders)

    def forget(self, request_id: str) -> None:
        """A request holds nothing any more. Does nothing for one that was never seen."""
        if self._seen_tokens.pop(request_id, None) is not None:
            self._drop(self._ids.pop(request_id))

    def _look_at(self, request_id: str) -> None:
        groups = self._manager.get_blocks(request_id).blocks
        known = self._ids.setdefault(request_id, [])
        if self._only_grow:
            new = [block.block_id for block in groups[0][len(known) :]]
        else:
            # Sliding windows give blocks back while the request runs.
            self._drop(known)
            known.clear()
            new = [b.block_id for group in groups for b in group if not b.is_null]
        num_holders = self._num_holders
        for block_id in new:
            num_holders[block_id] = num_holders.get(block_id, 0) + 1
        known += new

    def _drop(self, block_ids: Sequence[int]) -> None:
        num_holders = self._num_holders
        for block_id in block_ids:
            if num_holders[block_id] == 1:
                del num_holders[block_id]
            else:
                num_holders[block_id] -= 1
