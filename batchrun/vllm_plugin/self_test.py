"""At the start of an engine: is a plan obeyed? Asked of a scheduler that is thrown away."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from batchrun.errors import BatchrunError
from batchrun.hints import HINT_KEY, RowHint, write_hint
from batchrun.scheduling.policies import Policy
from batchrun.scheduling.view import EngineView, Plan, RequestView
from batchrun.vllm_plugin.compat import missing_hook, preempt, refusal

UNIT_TOKENS = 16
NUM_UNITS = 4
BLOCKS_PER_GROUP = 64
NONCE = "self-test"
HINT = write_hint(RowHint(epoch=0, job=NONCE, row=0, rank=0), NONCE)


class _Scripted:
    """A policy that admits whoever waits and gives every request the cap that was set."""

    def __init__(self) -> None:
        self.caps: dict[str, int] = {}

    def plan(self, view: EngineView) -> Plan:
        waiting: list[RequestView] = [*view.online_waiting, *view.offline_waiting]
        return Plan(admit=tuple(waiting), caps=dict(self.caps))


SchedulerT = TypeVar("SchedulerT", bound=Scheduler)
Rehearse = Callable[[SchedulerT, Policy, str], None]
"""Lets a scheduler plan with a policy, and believe hints with a nonce."""


def check_plans_are_obeyed(
    scheduler_cls: type[SchedulerT],
    rehearse: Rehearse[SchedulerT],
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    arguments: Mapping[str, Any],
) -> None:
    """Cap one chunk, let a request sit a step out, preempt it; see each obeyed.

    `arguments` are those of the engine's own scheduler beside the two configurations. They are
    only read, and nothing here reaches that scheduler. Takes some milliseconds. Raises EngineError
    with one line, the vLLM version and the hook in it, where this vLLM does something else.
    """
    scheduler = _throw_away(scheduler_cls, vllm_config, kv_cache_config, arguments)
    try:
        _check(scheduler, rehearse)
    except BatchrunError:
        raise
    except Exception as error:
        raise refusal(f"the self-test failed with {type(error).__name__}: {error}") from error
    finally:
        scheduler.shutdown()


def _throw_away(
    scheduler_cls: type[SchedulerT],
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    arguments: Mapping[str, Any],
) -> SchedulerT:
    """A scheduler of the same class and settings, of few blocks, that publishes nothing."""
    num_blocks = min(
        kv_cache_config.num_blocks, BLOCKS_PER_GROUP * len(kv_cache_config.kv_cache_groups)
    )
    small = copy(vllm_config)
    small.cache_config = copy(vllm_config.cache_config)
    small.cache_config.num_gpu_blocks = num_blocks
    small.scheduler_config = copy(vllm_config.scheduler_config)
    small.scheduler_config.max_num_seqs = 2
    small.scheduler_config.max_num_active_seqs = None
    small.kv_events_config = None
    # Under `bs` nothing is taken over yet, and no further self-test runs.
    small.additional_config = {HINT_KEY: {"policy": "bs", "channel": False}}
    kv_cache = dataclasses.replace(kv_cache_config, num_blocks=num_blocks)
    return scheduler_cls(small, kv_cache, **{**arguments, "log_stats": False})


def _check(scheduler: SchedulerT, rehearse: Rehearse[SchedulerT]) -> None:
    unit = scheduler.block_size if scheduler.need_mamba_block_aligned_split else UNIT_TOKENS
    prompt = NUM_UNITS * unit
    first = _request("self-test-1", prompt, scheduler.hash_block_size)
    second = _request("self-test-2", prompt, scheduler.hash_block_size)
    missing = missing_hook(scheduler, first)
    if missing is not None:
        raise refusal(missing)
    script = _Scripted()
    rehearse(scheduler, script, NONCE)

    script.caps = {first.request_id: unit}
    scheduler.add_request(first)
    _expect(scheduler, {first.request_id: unit}, "the cap of a chunk")

    script.caps = {first.request_id: 0, second.request_id: unit}
    scheduler.add_request(second)
    _expect(scheduler, {second.request_id: unit}, "that a running request sits a step out")

    free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    preempt(scheduler, first)
    if scheduler.kv_cache_manager.block_pool.get_num_free_blocks() <= free_blocks:
        raise refusal("a preemption frees no blocks")
    if list(scheduler.waiting) != [first]:
        raise refusal("a preempted request does not go back to Scheduler.waiting")


def _expect(scheduler: Scheduler, tokens: dict[str, int], what: str) -> None:
    scheduled = dict(scheduler.schedule().num_scheduled_tokens)
    if scheduled != tokens:
        wanted = ", ".join(map(str, tokens.values()))
        got = ", ".join(map(str, scheduled.values())) or "none"
        raise refusal(f"it does not obey {what} (planned tokens: {wanted}, scheduled: {got})")


def _request(request_id: str, num_tokens: int, hash_block_tokens: int) -> Request:
    """An offline request that shares no prefix with any other."""

    def hash_blocks(request: Request) -> list[BlockHash]:
        new = range(len(request.block_hashes), request.num_tokens // hash_block_tokens)
        return [BlockHash(f"{request_id} {i}".encode()) for i in new]

    return Request(
        request_id=request_id,
        prompt_token_ids=[1] * num_tokens,
        sampling_params=SamplingParams(max_tokens=1, extra_args={HINT_KEY: HINT}),
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=hash_blocks,
    )
