"""Blocks, chains and hints for tests of `batchrun.cache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchrun.cache.block_tree import RadixNode
from batchrun.cache.eviction import EvictionOrder
from batchrun.cache.free_queue import BlockTiers, OnlinePrefixes, TieredFreeQueue
from batchrun.cache.reuse import ReuseIndex
from batchrun.hints import NodeHint, RowHint


@dataclass(slots=True, eq=False)
class Block:
    """A block as vLLM's: the hash stands behind a property; `==` is identity."""

    block_id: int
    ref_cnt: int = 0
    prev_free_block: Any = None
    next_free_block: Any = None
    hash_key: bytes | None = None

    @property
    def block_hash(self) -> bytes | None:
        """The key of the cached content."""
        return self.hash_key


def row_hint(
    row: int, rank: int, nodes: tuple[NodeHint, ...] = (), epoch: int = 1, job: str = "job"
) -> RowHint:
    """A row's hint."""
    return RowHint(epoch=epoch, job=job, row=row, rank=rank, nodes=nodes)


def chain_of(text: str) -> list[bytes]:
    """Chained hashes of a text with one block per letter: readable, equal for equal prefixes."""
    return [text[: i + 1].encode() for i in range(len(text))]


class SmallCache:
    """A KV cache as vLLM's block pool keeps it, around the queue under test.

    Requests compute their whole chain at once; whatever is cached is hit. An eviction that leaves
    a cached child behind its parent is an assertion error.
    """

    def __init__(self, order: EvictionOrder, num_blocks: int) -> None:
        self.reuse = ReuseIndex(order)
        self.online = OnlinePrefixes()
        self.tiers = BlockTiers(order, self.reuse, self.online, num_blocks)
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.queue = TieredFreeQueue(self.blocks, order.num_tiers, self.tiers.tier_of)
        self.cached: dict[bytes, Block] = {}
        self.held: dict[str, list[Block]] = {}

    def admit(self, request: str, chain: list[bytes]) -> int | None:
        """Give the request its blocks; returns how many were hits, or None if they do not fit."""
        num_hits = next((i for i, key in enumerate(chain) if key not in self.cached), len(chain))
        hits = [self.cached[key] for key in chain[:num_hits]]
        num_hits_free = sum(block.ref_cnt == 0 for block in hits)
        if len(chain) - num_hits + num_hits_free > self.queue.num_free_blocks:
            return None
        for block in hits:
            if block.ref_cnt == 0:
                self.queue.remove(block)
            block.ref_cnt += 1
        fresh = self.queue.popleft_n(len(chain) - num_hits)
        for block in fresh:
            assert block.ref_cnt == 0
            block.ref_cnt = 1
            self._evict(block)
        self._check_closed()
        for key, block in zip(chain[num_hits:], fresh, strict=True):
            block.hash_key = key
            self.cached[key] = block
        self.held[request] = hits + fresh
        return num_hits

    def _evict(self, block: Block) -> None:
        if block.hash_key is not None:
            del self.cached[block.hash_key]
            block.hash_key = None

    def _check_closed(self) -> None:
        for key in self.cached:
            assert len(key) == 1 or key[:-1] in self.cached, f"{key!r} has lost its parent"

    def free(self, request: str, *, is_online: bool) -> None:
        """Take the request's blocks back, the end of the chain first, as vLLM does."""
        if is_online:
            self.tiers.mark_call(self.held[request])
        unused = []
        for block in reversed(self.held.pop(request)):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                unused.append(block)
        self.queue.append_n(unused)

    def refile(self, fallen: list[RadixNode]) -> None:
        """File blocks whose tier fell again."""
        self.refile_keys([key for node in fallen for key in self.reuse.keys_of(node)])

    def refile_keys(self, keys: list[bytes]) -> None:
        self.queue.retier(self.cached[key].block_id for key in keys if key in self.cached)

    def check(self) -> None:
        """No block lost or owned twice; nothing that is in use can be handed out."""
        self.queue.check()
        self.reuse.check()
        free = {block.block_id for block in self.queue.get_all_free_blocks()}
        held = {block.block_id for blocks in self.held.values() for block in blocks}
        assert not free & held
        assert free | held == set(range(len(self.blocks)))
        for block in self.blocks:
            uses = sum(block in blocks for blocks in self.held.values())
            assert block.ref_cnt == uses
