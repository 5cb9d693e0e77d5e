"""The tiered queue inside vLLM's block pool: the same as its own for `lru`, accounts for others."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from cache_builders import row_hint

from batchrun.cache.eviction import ECHO_RC, EVICTIONS, NEXT_USE, EvictionOrder
from batchrun.cache.free_queue import BlockTiers, OnlinePrefixes, TieredFreeQueue
from batchrun.cache.reuse import ReuseIndex
from batchrun.hints import NodeHint, RowHint

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own imports warn of deprecations in torch
    import torch
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import (
        FreeKVCacheBlockQueue,
        KVCacheBlock,
        get_request_block_hasher,
        init_none_hash,
        make_block_hash_with_group_id,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

BLOCK_TOKENS = 16
NUM_BLOCKS = 60
GROUP_0 = b"\0\0\0\0"

init_none_hash(sha256)
HASHER = get_request_block_hasher(BLOCK_TOKENS, sha256)


def make_manager() -> KVCacheManager:
    spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float16)
    config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 4096, BLOCK_TOKENS, BLOCK_TOKENS)


def make_request(name: str, tokens: list[int]) -> Request:
    sampling = SamplingParams(max_tokens=64)
    return Request(name, tokens, sampling, None, arrival_time=0.0, block_hasher=HASHER)


class Cache:
    """A manager whose pool holds our queue, with hints as the plug-in would give them."""

    def __init__(self, order: EvictionOrder) -> None:
        self.manager = make_manager()
        self.pool = self.manager.block_pool
        self.order = order
        self.reuse = ReuseIndex(order, GROUP_0)
        self.tiers = BlockTiers(order, self.reuse, OnlinePrefixes(), NUM_BLOCKS)
        self.refill()

    def refill(self) -> None:
        free = self.pool.free_block_queue.get_all_free_blocks()
        queue = TieredFreeQueue(free, self.order.num_tiers, self.tiers.tier_of)
        self.pool.free_block_queue = queue  # type: ignore[assignment]
        self.queue = queue

    def finish(self, request: Request) -> None:
        self.reuse.finished(request.request_id)
        self.manager.free(request)

    def abort_waiting(self, request: Request) -> None:
        fallen = self.reuse.finished(request.request_id)
        found = self.pool.cached_block_hash_to_block
        blocks = [found.get_one_block(k) for s in fallen for k in self.reuse.keys_of(s)]  # type: ignore[arg-type]
        self.queue.retier(block.block_id for block in blocks if block is not None)


def admit(manager: KVCacheManager, request: Request) -> int | None:
    """Hit what is cached, compute the rest in one step; the hit tokens, or None if it won't fit."""
    blocks, hit_tokens, _ = manager.get_computed_blocks(request)
    left = request.num_tokens - hit_tokens
    if manager.allocate_slots(request, left, hit_tokens, blocks) is None:
        return None
    request.num_computed_tokens = request.num_tokens
    return hit_tokens


def decode(manager: KVCacheManager, request: Request, token: int) -> bool:
    request.append_output_token_ids(token)
    is_done = manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens += is_done
    return is_done


def apply(queue: Any, blocks: list[KVCacheBlock], name: str, argument: Any) -> list[int]:
    """One operation on a queue; the ids of the blocks that it returns."""
    match name:
        case "popleft":
            return [queue.popleft().block_id]
        case "popleft_n":
            return [block.block_id for block in queue.popleft_n(argument)]
        case "remove":
            queue.remove(blocks[argument])
        case "iter_blocks_after":
            return [block.block_id for block in queue.iter_blocks_after(blocks[argument])]
        case "append":
            queue.append(blocks[argument])
        case _:
            getattr(queue, name)([blocks[i] for i in argument])
    return []


def some_operation(rng: random.Random, free: list[int], used: list[int]) -> tuple[str, Any]:
    one_of_free = rng.choice(free) if free else None
    options: list[tuple[str, Any]] = [
        ("popleft_n", rng.randint(0, len(free))),
        ("append_n", rng.sample(used, rng.randint(0, len(used)))),
        ("prepend_n", rng.sample(used, rng.randint(0, len(used)))),
    ]
    if free:
        options += [("popleft", None), ("remove", one_of_free), ("iter_blocks_after", one_of_free)]
    if used:
        options += [("append", rng.choice(used)), ("iter_blocks_after", rng.choice(used))]
    return rng.choice(options)


@pytest.mark.parametrize("seed", range(20))
def test_a_queue_of_one_tier_is_vllms_queue_operation_for_operation(seed: int) -> None:
    rng = random.Random(seed)
    stock_blocks, our_blocks = ([KVCacheBlock(i) for i in range(20)] for _ in range(2))
    stock, ours = FreeKVCacheBlockQueue(stock_blocks), TieredFreeQueue(our_blocks)
    for _ in range(200):
        free = [block.block_id for block in stock.get_all_free_blocks()]
        name, argument = some_operation(rng, free, sorted(set(range(20)) - set(free)))
        wanted = apply(stock, stock_blocks, name, argument)
        assert apply(ours, our_blocks, name, argument) == wanted
        order = [block.block_id for block in stock.get_all_free_blocks()]
        assert [block.block_id for block in ours.get_all_free_blocks()] == order
        assert ours.num_free_blocks == stock.num_free_blocks
        ours.check()


class Load:
    """Random requests over a few documents, the same for every cache that is driven by one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.running: dict[str, list[Request]] = {}
        self.num_requests = 0

    def tokens(self, document: int) -> list[int]:
        rng = random.Random(document)
        shared = [rng.randrange(1_000) for _ in range(BLOCK_TOKENS * (3 + document))]
        return shared + [self.rng.randrange(1_000) for _ in range(self.rng.randint(1, 40))]

    def step(self, managers: list[KVCacheManager], finish: list[Callable[[Request], None]]) -> None:
        """One random operation on every manager alike; each must answer as the first does."""
        operation = self.rng.randrange(10)
        names = sorted(self.running)
        if operation < 4 or not names:
            self._admit(managers)
        elif operation < 7:
            token = self.rng.randrange(1_000)
            requests = self.running[self.rng.choice(names)]
            pairs = zip(managers, requests, strict=True)
            assert len({decode(manager, request, token) for manager, request in pairs}) == 1
        elif operation < 9:
            for end, request in zip(finish, self.running.pop(self.rng.choice(names)), strict=True):
                end(request)
        else:
            ids = {self.rng.randrange(1, NUM_BLOCKS) for _ in range(2)}
            for manager in managers:
                manager.evict_blocks(ids)

    def _admit(self, managers: list[KVCacheManager]) -> None:
        self.num_requests += 1
        name, tokens = f"request-{self.num_requests}", self.tokens(self.rng.randrange(5))
        requests = [make_request(name, tokens) for _ in managers]
        pairs = zip(managers, requests, strict=True)
        answers = {admit(manager, request) for manager, request in pairs}
        assert len(answers) == 1
        if answers != {None}:
            self.running[name] = requests


@pytest.mark.parametrize("seed", range(8))
def test_lru_in_a_block_pool_gives_the_blocks_that_vllm_gives(seed: int) -> None:
    stock, ours, load = make_manager(), Cache(EVICTIONS["lru"]), Load(seed)
    for _ in range(5):
        for _ in range(120):
            load.step([stock, ours.manager], [stock.free, ours.finish])
            for theirs, mine in load.running.values():
                name = theirs.request_id
                assert ours.manager.get_block_ids(name) == stock.get_block_ids(name)
                assert mine.request_id == name
        for theirs, mine in load.running.values():
            stock.free(theirs)
            ours.finish(mine)
        load.running.clear()
        assert stock.reset_prefix_cache() and ours.manager.reset_prefix_cache()


def hint_of(row: int, document: int, rng: random.Random) -> RowHint:
    return row_hint(row, row, (NodeHint(document, rng.randint(0, 9), row + rng.randint(1, 50)),))


@pytest.mark.parametrize("order", [ECHO_RC, NEXT_USE], ids=lambda order: order.name)
@pytest.mark.parametrize("seed", range(6))
def test_no_block_is_lost_when_hints_come_and_go(order: EvictionOrder, seed: int) -> None:
    cache, load = Cache(order), Load(seed)
    waiting: list[Request] = []
    for row in range(400):
        document = load.rng.randrange(5)
        request = make_request(f"row-{row}", load.tokens(document))
        hint = hint_of(row, document, load.rng)
        cache.reuse.announce(request.request_id, hint, request.block_hashes, row / 10)
        waiting.append(request)
        waiting.append(waiting.pop(load.rng.randrange(len(waiting))))
        if load.rng.random() < 0.3:
            cache.abort_waiting(waiting.pop())
        elif admit(cache.manager, waiting[-1]) is not None:
            request = waiting.pop()
            load.running[request.request_id] = [request]
        while load.running and load.rng.random() < 0.6:
            cache.finish(load.running.pop(load.rng.choice(sorted(load.running)))[0])
        check_accounts(cache, load)


def check_accounts(cache: Cache, load: Load) -> None:
    cache.queue.check()
    cache.reuse.check()
    free = {block.block_id for block in cache.queue.get_all_free_blocks()}
    held = {i for name in load.running for i in cache.manager.get_block_ids(name)[0]}
    assert not free & held
    assert free | held == set(range(1, NUM_BLOCKS))


def hits_after_pressure(order: EvictionOrder) -> tuple[int, int]:
    """Hit tokens of a document used soon and of one used late, after 20 blocks were needed."""
    cache, load = Cache(order), Load(1)
    soon, late = load.tokens(3)[:96] + [1] * 224, load.tokens(4)[:96] + [2] * 224
    for rank, (name, tokens) in enumerate([("soon", soon), ("late", late)]):
        request = make_request(name, [*tokens, 7])
        nodes = (NodeHint(rank, 3, 10 + 500 * rank),)
        cache.reuse.announce(name, row_hint(rank, rank, nodes), request.block_hashes, 0.0)
        assert admit(cache.manager, request) == 0
        cache.finish(request)
    assert admit(cache.manager, make_request("online", list(range(500)))) == 0
    found = [cache.manager.get_computed_blocks(make_request("?", [*t, 8]))[1] for t in (soon, late)]
    return found[0], found[1]


def test_the_document_that_is_read_soon_survives_only_under_next_use() -> None:
    soon, late = hits_after_pressure(NEXT_USE)
    assert soon == 320 > late
    soon, late = hits_after_pressure(EVICTIONS["lru"])
    assert soon < 320 == late


def test_keys_are_vllms_block_keys() -> None:
    request = make_request("one", list(range(40)))
    index = ReuseIndex(key_suffix=GROUP_0)
    index.announce("one", row_hint(0, 0), request.block_hashes, 0.0)
    assert set(index.blocks) == {
        make_block_hash_with_group_id(block_hash, 0) for block_hash in request.block_hashes
    }
