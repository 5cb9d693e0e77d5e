"""Models with several kinds of KV: vLLM's own free queue, chunks that end where state is kept."""

from __future__ import annotations

import pytest
import torch
from scheduler_rig import BLOCK_TOKENS, answer, build, make_request, run
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from batchrun.scheduling.view import EngineView, Plan
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

FULL = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float16)
SLIDING = SlidingWindowSpec(
    BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float16, sliding_window=64
)
MAMBA = MambaSpec(BLOCK_TOKENS, shapes=((1,),), dtypes=(torch.float16,), mamba_cache_mode="align")


def aligned(config: VllmConfig) -> None:
    config.cache_config.mamba_cache_mode = "align"


class Sparing:
    """A policy that grants 5 tokens of every prefill, less than a block."""

    def plan(self, view: EngineView) -> Plan:
        running = [*view.online_running, *view.offline_running]
        waiting = [*view.online_waiting, *view.offline_waiting]
        caps = {r.request_id: 5 for r in (*running, *waiting) if not r.is_decode}
        return Plan(admit=tuple(waiting), caps=caps)


def mixed(specs: list[KVCacheSpec], **more: object) -> ColocatedScheduler:
    """A scheduler with three calls and five rows, some of which share a prefix."""
    scheduler = build(specs=specs, num_blocks=200, **more)  # type: ignore[arg-type]
    assert isinstance(scheduler, ColocatedScheduler)
    for number in range(3):
        scheduler.add_request(make_request(f"call-{number}", 150 + number))
    for row in range(5):
        scheduler.add_request(make_request(f"row-{row}", 300, row=row, max_tokens=8))
    return scheduler


def test_several_kv_groups_keep_vllms_free_queue_and_everybody_finishes() -> None:
    scheduler = mixed([FULL, SLIDING])
    pool = scheduler.kv_cache_manager.block_pool
    assert scheduler.state.kv is None
    assert type(pool.free_block_queue) is FreeKVCacheBlockQueue
    run(scheduler)
    assert pool.get_num_free_blocks() == 199
    assert scheduler.state.num_policy_errors == 0


def test_chunks_of_a_mamba_model_end_on_block_boundaries_however_small_the_caps() -> None:
    scheduler = mixed([FULL, MAMBA], change=aligned, block_tokens=BLOCK_TOKENS)
    scheduler.step_policy = Sparing()
    num_chunks = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        assert output.total_num_scheduled_tokens, "it stands still"
        for name in output.num_scheduled_tokens:
            request = scheduler.requests[name]
            if request.is_prefill_chunk:
                num_chunks += 1
                assert request.num_computed_tokens % BLOCK_TOKENS == 0
        answer(scheduler, output)
    assert num_chunks > 50


@pytest.mark.parametrize(("budget", "threshold"), [(12, 0), (2_048, 10)])
def test_a_state_larger_than_any_chunk_takes_several(budget: int, threshold: int) -> None:
    def change(config: VllmConfig) -> None:
        aligned(config)
        config.scheduler_config.long_prefill_token_threshold = threshold

    more = {"token_budget": budget, "max_num_seqs": 8, "block_tokens": BLOCK_TOKENS}
    scheduler = mixed([FULL, MAMBA], change=change, **more)
    rests = set()
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        assert output.total_num_scheduled_tokens, "it stands still"
        for name, num_tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            rest = request.num_computed_tokens % BLOCK_TOKENS
            if request.is_prefill_chunk:
                rests.add(rest)
                assert not rest or rest >= num_tokens, "it ends in another block, in the middle"
        answer(scheduler, output)
    assert len(rests) > 1
    assert scheduler.state.num_policy_errors == 0


def test_children_of_n_choices_count_their_row_once() -> None:
    scheduler = build()
    assert isinstance(scheduler, ColocatedScheduler) and scheduler.state.kv is not None
    uses = scheduler.state.kv._reuse
    children = [make_request("row", row=4, max_tokens=length) for length in (2, 6)]
    for number, child in enumerate(children):
        child.request_id = f"{number}_row"
        scheduler.add_request(child)
    (node,) = set(uses.blocks.values())
    assert node.reuse_count == 1
    while "0_row" in scheduler.requests:
        answer(scheduler, scheduler.schedule())
    assert node.reuse_count == 1
    run(scheduler)
    assert not uses.blocks
