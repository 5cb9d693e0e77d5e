"""A call that is planned comes in: vLLM finds the room for it that the plan said there is."""

from __future__ import annotations

from typing import Any

import pytest
import scheduler_rig as rig
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from batchrun.scheduling.view import BlockKind, BlockLaw
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

SIZE = rig.BLOCK_TOKENS
FULL = FullAttentionSpec(SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16)
SLIDING = SlidingWindowSpec(
    SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16, sliding_window=64
)
MAMBA = MambaSpec(SIZE, shapes=((1,),), dtypes=(torch.float16,), mamba_cache_mode="align")


def full_of_rows(num_rows: int, **more: Any) -> ColocatedScheduler:
    """A scheduler whose rows have taken all the KV that they may."""
    scheduler = rig.ours(rig.build(**more))
    for row in range(num_rows):
        scheduler.add_request(rig.make_request(f"{row}-row", 200, row=row, max_tokens=100))
    for _ in range(20):
        rig.step(scheduler)
    return scheduler


def steps_until(scheduler: ColocatedScheduler, name: str) -> int:
    """How many steps a request waits, 20 at most."""
    return next((n for n in range(20) if name in rig.step(scheduler)), 20)


def test_rows_make_room_for_the_watermark_too() -> None:
    def marked(config: VllmConfig) -> None:
        config.scheduler_config.watermark = 0.2

    scheduler = full_of_rows(10, change=marked)
    scheduler.add_request(rig.make_request("call", 300))

    assert steps_until(scheduler, "call") == 0
    rig.run(scheduler, 2_000)


def test_rows_make_room_in_every_kv_group_of_the_model() -> None:
    scheduler = full_of_rows(10, specs=[FULL, SLIDING, SLIDING, SLIDING], num_blocks=400)
    scheduler.add_request(rig.make_request("call", 600))

    assert steps_until(scheduler, "call") == 0
    rig.run(scheduler, 2_000)


def test_a_prompt_longer_than_the_pool_comes_in_where_a_window_is_all_that_is_kept() -> None:
    scheduler = full_of_rows(10, specs=[SLIDING], token_budget=256)
    scheduler.add_request(rig.make_request("call", 2_000))

    assert steps_until(scheduler, "call") < 20
    rig.run(scheduler, 2_000)


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 160, 2_000])
def test_full_attention_alone_takes_a_block_for_each_of_its_lengths(num_tokens: int) -> None:
    plain, twice = BlockLaw(BlockKind(SIZE)), BlockLaw(BlockKind(SIZE, 2))
    blocks = -(-num_tokens // SIZE)

    assert plain.blocks(num_tokens) == plain.new_blocks(num_tokens, 0) == blocks
    assert plain.kept([num_tokens], 3) == [-(-(num_tokens + 3) // SIZE)]
    assert plain.begun([num_tokens]) == [num_tokens % SIZE == 0]
    assert plain.room_tokens(num_tokens, 5) == 5 * SIZE + -num_tokens % SIZE
    assert twice.blocks(num_tokens) == 2 * blocks
    assert twice.kept([num_tokens]) == [2 * blocks]
    assert twice.begun([num_tokens]) == [2 * (num_tokens % SIZE == 0)]
    assert twice.room_tokens(num_tokens, 5) == 2 * SIZE + -num_tokens % SIZE


def test_windows_and_states_take_no_more_than_they_hold() -> None:
    def aligned(config: VllmConfig) -> None:
        config.cache_config.mamba_cache_mode = "align"

    scheduler = rig.build(
        specs=[FULL, SLIDING, SLIDING, MAMBA], change=aligned, token_budget=256, max_num_seqs=8
    )
    law = rig.ours(scheduler).state.law
    window = (63 + 2 * 256) // SIZE + 2

    assert law.blocks(160) == 10 + 2 * 10 + 2
    assert law.blocks(20_000) == 1_250 + 2 * window + 2
    assert law.new_blocks(20_000, 19_840) == 10 + 2 * 10 + 2
    assert law.kept([20_000]) == [1_250 + 2 * 5 + 2]
