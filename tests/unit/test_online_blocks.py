"""The KV blocks that online requests hold, counted once each."""

from __future__ import annotations

import scheduler_rig as rig

from batchrun.vllm_plugin.kv_cache import OnlineBlocks


def test_shared_blocks_count_once_and_until_the_last_holder_has_gone() -> None:
    scheduler = rig.build(policy="bs")
    blocks = OnlineBlocks(scheduler.kv_cache_manager, rig.BLOCK_TOKENS)
    scheduler.add_request(rig.make_request("ab", 100, max_tokens=30))
    rig.step(scheduler)
    rig.step(scheduler)
    scheduler.add_request(rig.make_request("ba", 100, max_tokens=30))
    rig.step(scheduler)

    assert blocks.count(scheduler.running) == 7 + 1
    blocks.forget("ab")
    assert blocks.count([]) == 7
    blocks.forget("ba")
    blocks.forget("never seen")
    assert blocks.count([]) == 0


def test_a_request_that_grows_adds_its_new_blocks() -> None:
    scheduler = rig.build(policy="bs")
    blocks = OnlineBlocks(scheduler.kv_cache_manager, rig.BLOCK_TOKENS)
    scheduler.add_request(rig.make_request("a", 30, max_tokens=40))

    counts = []
    for _ in range(20):
        rig.step(scheduler)
        counts.append(blocks.count(scheduler.running))

    assert counts == [2] * 3 + [3] * 16 + [4]
