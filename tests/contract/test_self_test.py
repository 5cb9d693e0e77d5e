"""The self-test at the start of an engine: what it refuses, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import vllm
from scheduler_rig import answer, build, make_request, ours
from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from batchrun.errors import EngineError
from batchrun.vllm_plugin.compat import missing_hook
from batchrun.vllm_plugin.scheduler import ColocatedScheduler

Spoil = Callable[[pytest.MonkeyPatch], None]


def without(owner: type, name: str) -> Spoil:
    return lambda patch: patch.delattr(owner, name)


def replaced(owner: type, name: str, value: object) -> Spoil:
    return lambda patch: patch.setattr(owner, name, value, raising=False)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without(Scheduler, "_preempt_request"), "Scheduler._preempt_request is missing"),
        (
            replaced(Scheduler, "_free_request", lambda self, req_id: None),
            "Scheduler._free_request takes req_id, not request",
        ),
        (
            replaced(RequestQueue, "__abstractmethods__", frozenset({"rotate"})),
            "RequestQueue.__bool__ is new or gone",
        ),
        (
            replaced(FreeKVCacheBlockQueue, "swap_n", lambda self: None),
            "FreeKVCacheBlockQueue.swap_n is new",
        ),
        (without(Request, "num_tokens"), "Request.num_tokens is missing"),
    ],
)
def test_a_changed_hook_is_named(monkeypatch: pytest.MonkeyPatch, spoil: Spoil, said: str) -> None:
    scheduler, request = build(AsyncScheduler), make_request("any")
    spoil(monkeypatch)
    assert missing_hook(scheduler, request) == said


def test_a_start_without_a_hook_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    original = AsyncScheduler.__init__

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        del self.deferred_waiting

    monkeypatch.setattr(AsyncScheduler, "__init__", forgetful)
    with pytest.raises(EngineError) as caught:
        build()
    line = str(caught.value)
    assert line.startswith(f"vLLM {vllm.__version__} cannot run batchrun's scheduler: ")
    assert "Scheduler.deferred_waiting is missing" in line
    assert "set `policy: vllm` in batchrun.yaml" in line
    assert "\n" not in line


class Uncapped(ColocatedScheduler):
    """What a vLLM that no longer asks the hook looks like."""

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        return num_new_tokens


class UncappedDecodes(ColocatedScheduler):
    """One that asks it for new requests only."""

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        if request.num_computed_tokens:
            return num_new_tokens
        return super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)


@pytest.mark.parametrize(
    ("scheduler_cls", "said"),
    [
        (Uncapped, "does not obey the cap of a chunk (planned tokens: 16, scheduled: 64)"),
        (UncappedDecodes, "does not obey that a running request sits a step out"),
    ],
)
def test_the_self_test_refuses_a_version_that_does_not_obey(
    scheduler_cls: type[ColocatedScheduler], said: str
) -> None:
    with pytest.raises(EngineError, match="cannot run batchrun's scheduler") as caught:
        build(scheduler_cls)
    assert said in str(caught.value)
    build(scheduler_cls, policy="bs")


@pytest.mark.parametrize("budget", [1, 2, 15, 16])
def test_a_small_token_budget_is_no_wrong_version(budget: int) -> None:
    build(token_budget=budget, max_num_seqs=1)


@pytest.mark.parametrize("threshold", [1, 2, 15, 16])
def test_a_small_threshold_of_long_prefills_is_no_wrong_version(threshold: int) -> None:
    def change(config: VllmConfig) -> None:
        config.scheduler_config.long_prefill_token_threshold = threshold

    build(change=change)


def test_the_self_test_leaves_no_trace() -> None:
    stock, mine = build(AsyncScheduler, log_stats=True), ours(build(log_stats=True))
    for scheduler in (stock, mine):
        manager = scheduler.kv_cache_manager
        assert scheduler.current_step == 0
        assert not scheduler.requests and not scheduler.running and len(scheduler.waiting) == 0
        assert not scheduler.finished_req_ids and not scheduler.deferred_waiting
        stats = manager.prefix_cache_stats
        assert stats is not None and stats.requests == stats.queries == 0
    theirs = stock.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    blocks = mine.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    assert [block.block_id for block in blocks] == [block.block_id for block in theirs]
    assert all(block.block_hash is None for block in blocks)


def test_the_self_test_publishes_no_kv_event_and_requests_do() -> None:
    def with_events(config: VllmConfig) -> None:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")

    scheduler = build(change=with_events)
    assert not list(scheduler.kv_cache_manager.take_events())
    scheduler.add_request(make_request("call", 100, max_tokens=1))
    output = scheduler.schedule()
    events = list(scheduler.kv_cache_manager.take_events())
    assert [type(event) for event in events] == [BlockStored]
    answer(scheduler, output)
