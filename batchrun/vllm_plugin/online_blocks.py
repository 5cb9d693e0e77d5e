"""The KV blocks that online requests hold: those that several share count once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from batchrun.vllm_plugin.compat import has_plain_blocks


class OnlineBlocks:
    """Counts the distinct blocks of the online requests of one engine.

    A request's blocks are looked at only when its computed tokens have reached another block, so
    that a step costs little however long the contexts are.
    """

    def __init__(self, manager: KVCacheManager, block_tokens: int) -> None:
        self._manager = manager
        self._block_tokens = block_tokens
        self._only_grow = has_plain_blocks(manager)
        self._num_seen: dict[str, int] = {}
        self._ids: dict[str, list[int]] = {}
        self._num_holders: dict[int, int] = {}

    def count(self, running: Iterable[Request]) -> int:
        """The blocks that these and all online requests seen before hold together."""
        size, num_seen = self._block_tokens, self._num_seen
        for request in running:
            num_blocks = -(-request.num_computed_tokens // size)
            if num_seen.get(request.request_id) != num_blocks:
                num_seen[request.request_id] = num_blocks
                self._look_at(request.request_id)
        return len(self._num_holders)

    def forget(self, request_id: str) -> None:
        """A request holds nothing any more. Does nothing for one that was never seen."""
        if self._num_seen.pop(request_id, None) is not None:
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
