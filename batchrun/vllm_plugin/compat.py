"""What the plug-in uses of vLLM's inside, and the one place that knows how versions differ.

vLLM says that a scheduler class is no public interface, so every hook is looked at when an engine
starts. 0.32 and 0.33 have all of them in one form. What differs between the two needs no code:
0.32 counts the LoRA adapters of the requests scheduled in a step and 0.33 those of all running
ones, and a plan never exceeds `max_loras` over the running and the admitted together; 0.33 moved
`_update_request_with_output` into the base class, and nothing here overrides it. Whether plans are
obeyed is asked of a scheduler that is thrown away (`check_plans_are_obeyed`).
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, TypeVar

import vllm
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
)
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from batchrun.cache.free_queue import TieredFreeQueue
from batchrun.errors import BatchrunError, EngineError
from batchrun.hints import HINT_KEY, RowHint, write_hint
from batchrun.scheduling.policies import Policy
from batchrun.scheduling.view import BlockKind, BlockLaw, EngineView, Plan, RequestView

TESTED_VERSIONS = ("0.32", "0.33")

SCHEDULER_FIELDS = (
    "block_size",
    "current_step",
    "deferred_waiting",
    "finished_req_ids",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "max_num_running_reqs",
    "need_mamba_block_aligned_split",
    "num_waiting_for_streaming_input",
    "policy",
    "prev_step_scheduled_req_ids",
    "requests",
    "running",
    "scheduler_config",
    "scheduler_reserve_full_isl",
    "waiting",
)
REQUEST_FIELDS = (
    "block_hashes",
    "drop_stale_output",
    "lora_request",
    "max_tokens",
    "mm_features",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_output_tokens",
    "num_prompt_tokens",
    "num_stale_output_tokens",
    "num_tokens",
    "num_tokens_with_spec",
    "resumable",
    "skip_reading_prefix_cache",
    "structured_output_request",
)
METHODS: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (Scheduler, "_mamba_block_aligned_split", ("request", "num_new_tokens")),
    (Scheduler, "_preempt_request", ("request", "timestamp")),
    (Scheduler, "_free_request", ("request",)),
    (Scheduler, "_update_request_as_session", ("session", "update")),
    (Scheduler, "schedule", ("throttle_prefills",)),
    (Scheduler, "update_from_output", ("scheduler_output", "model_runner_output")),
    (Scheduler, "reset_prefix_cache", ()),
    (Scheduler, "set_pause_state", ("pause_state",)),
    (KVCacheManager, "get_computed_blocks", ("request",)),
    (KVCacheManager, "get_blocks", ("request_id",)),
    (KVCacheManager, "prefix_cache_lookup_enabled", ("request",)),
    (BlockPool, "get_cached_block", ("block_hash", "kv_cache_group_ids")),
)
"""Methods that are called or overridden, with their first parameters after `self`."""
QUEUE_METHODS = frozenset({
    "__bool__", "__iter__", "__len__", "add_request", "peek_request", "pop_request",
    "prepend_request", "prepend_requests", "remove_request", "remove_requests",
})  # fmt: skip
"""What `PlanQueue` implements of vLLM's `RequestQueue`."""
STATUSES = ("FINISHED_ABORTED", "RUNNING", "WAITING", "WAITING_FOR_STREAMING_REQ")
COORDINATOR_FIELDS = ("eagle_group_ids", "single_type_managers")
POOL_FIELDS = (
    "blocks", "cached_block_hash_to_block", "free_block_queue", "hash_block_size", "null_block",
    "num_gpu_blocks",
)  # fmt: skip
BLOCK_FIELDS = (
    "block_hash",
    "block_id",
    "is_null",
    "next_free_block",
    "prev_free_block",
    "ref_cnt",
)


def refusal(problem: str) -> EngineError:
    """The error for a vLLM that the plug-in cannot work with."""
    tested = " or ".join(TESTED_VERSIONS)
    return EngineError(
        f"vLLM {vllm.__version__} cannot run batchrun's scheduler: {problem}; install vLLM "
        f"{tested}, or set `policy: vllm` in batchrun.yaml to run vLLM's own scheduler"
    )


def cuts_no_image(config: VllmConfig) -> bool:
    """Whether the tokens of an image must come in one step, as where they see each other."""
    is_whole = config.scheduler_config.disable_chunked_mm_input
    return is_whole and config.model_config.supports_multimodal_inputs


def largest_chunk_tokens(scheduler: Scheduler) -> int:
    """Tokens that one of several prompts gets in a step at most."""
    most = scheduler.max_num_scheduled_tokens
    return min(most, scheduler.scheduler_config.long_prefill_token_threshold or most)


def awaits_stale_output(request: Request) -> bool:
    """Whether output of before a preemption is still to come: vLLM admits no such request."""
    return bool(request.num_stale_output_tokens and not request.drop_stale_output)


def cached_prefix(manager: KVCacheManager, request: Request) -> tuple[int, int]:
    """What of a waiting request is cached: its leading tokens, and how many of their blocks no
    request holds.

    A missing block implies that every later one is missing, and who holds a block holds those
    before it too, so for one kind of full attention both are found by search; vLLM looks at every
    block when it admits the request.
    """
    if not has_plain_blocks(manager):
        blocks, num_tokens, *_ = manager.get_computed_blocks(request)
        found = [block for group in blocks.blocks for block in group]
        return int(num_tokens), sum([not b.ref_cnt and not b.is_null for b in found])
    if not manager.prefix_cache_lookup_enabled(request):
        return 0, 0
    pool, hashes = manager.block_pool, request.block_hashes
    block_tokens = pool.hash_block_size
    most = min(len(hashes), (request.num_tokens - 1) // block_tokens)

    def find(number: int) -> KVCacheBlock | None:
        blocks = pool.get_cached_block(hashes[number], [0])
        return blocks[0] if blocks else None

    def is_idle(number: int) -> bool:
        block = find(number)
        return block is None or block.ref_cnt == 0

    num_blocks = bisect_left(range(most), True, key=lambda number: find(number) is None)
    num_held = bisect_left(range(num_blocks), True, key=is_idle)
    return num_blocks * block_tokens, num_blocks - num_held


def block_law(manager: KVCacheManager, block_tokens: int) -> BlockLaw:
    """How many blocks of the manager's pool tokens take, in all KV groups that share it; of
    `block_tokens` where there is none."""
    groups = manager.coordinator.single_type_managers
    kinds = Counter(_kind(group) for group in groups if group.block_pool is manager.block_pool)
    alike = [dataclasses.replace(kind, num_groups=num) for kind, num in kinds.items()]
    return BlockLaw(*(alike or [BlockKind(block_tokens)]))


def _kind(group: SingleTypeKVCacheManager) -> BlockKind:
    """One KV group: full attention, a window (or chunks) of it, or a state of fixed size."""
    spec: Any = group.kv_cache_spec
    size = group.block_size
    most = getattr(group, "max_admission_blocks_per_request", None)
    if most is not None:
        window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", 0)
        kept = min(most, -(-window // size) + 1) if window else most
        return BlockKind(size, most_blocks=most, kept_blocks=kept)
    mode = getattr(spec, "mamba_cache_mode", None)
    if mode == "align":
        # The states of this step and of the one before it, and what the prompt leaves to others.
        num = 2 + spec.num_speculative_blocks + getattr(spec, "num_prefill_checkpoint_blocks", 0)
        return BlockKind(size, most_blocks=num, kept_blocks=num)
    if mode == "none" or type(group).__name__ == "CircularBufferManager":
        return BlockKind(size, most_blocks=1, kept_blocks=1)
    return BlockKind(size)


def has_plain_blocks(manager: KVCacheManager) -> bool:
    """Whether a request holds one list of blocks, of full attention, that only grows."""
    coordinator = manager.coordinator
    return (
        isinstance(coordinator, UnitaryKVCacheCoordinator)
        and type(coordinator.single_type_managers[0]) is FullAttentionManager
        and coordinator.dcp_world_size == coordinator.pcp_world_size == 1
        and not coordinator.eagle_group_ids
    )


def preempt(scheduler: Scheduler, request: Request) -> None:
    """Take a running request out of the batch, as vLLM does with a victim of its own."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())


def cached_block_ids(pool: BlockPool, key: BlockHashWithGroupId) -> Iterable[int]:
    """The blocks with this content; more than one where requests computed it side by side."""
    found = pool.cached_block_hash_to_block._cache.get(key)
    if found is None:
        return ()
    return (found.block_id,) if isinstance(found, KVCacheBlock) else found


def missing_hook(scheduler: Scheduler, request: Request) -> str | None:
    """The first hook that this vLLM lacks or has in another form; None when all are there.

    `scheduler` is any scheduler of this vLLM before the plug-in changed it, `request` any request.
    """
    return (
        _missing_method()
        or _missing_field(scheduler, request)
        or _changed_waiting_queue(scheduler)
        or _changed_free_queue(scheduler)
    )


def _missing_method() -> str | None:
    for owner, name, wanted in METHODS:
        method = getattr(owner, name, None)
        if method is None:
            return f"{owner.__name__}.{name} is missing"
        names = tuple(inspect.signature(method).parameters)[1 : 1 + len(wanted)]
        if names != wanted:
            return f"{owner.__name__}.{name} takes {', '.join(names)}, not {', '.join(wanted)}"
    return None


def _missing_field(scheduler: Scheduler, request: Request) -> str | None:
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    for kind, owner, names in (
        (Scheduler, scheduler, SCHEDULER_FIELDS),
        (Request, request, REQUEST_FIELDS),
        (RequestStatus, RequestStatus, STATUSES),
        (KVCacheManager, manager, ("block_pool", "coordinator")),
        (KVCacheCoordinator, manager.coordinator, COORDINATOR_FIELDS),
        (BlockPool, pool, POOL_FIELDS),
        (BlockHashToBlockMap, pool.cached_block_hash_to_block, ("_cache",)),
        (KVCacheBlock, pool.null_block, BLOCK_FIELDS),
    ):
        for name in names:
            if not hasattr(owner, name):
                return f"{kind.__name__}.{name} is missing"
    return None


def _changed_waiting_queue(scheduler: Scheduler) -> str | None:
    waiting: object = scheduler.waiting
    if not isinstance(waiting, RequestQueue):
        return "Scheduler.waiting is not a RequestQueue"
    changed = RequestQueue.__abstractmethods__ ^ QUEUE_METHODS
    return f"RequestQueue.{min(changed)} is new or gone" if changed else None


def _changed_free_queue(scheduler: Scheduler) -> str | None:
    queue: object = scheduler.kv_cache_manager.block_pool.free_block_queue
    if not isinstance(queue, FreeKVCacheBlockQueue):
        return "BlockPool.free_block_queue is not a FreeKVCacheBlockQueue"
    public = {name for name in dir(FreeKVCacheBlockQueue) if not name.startswith("_")}
    new = public - set(dir(TieredFreeQueue))
    return f"FreeKVCacheBlockQueue.{min(new)} is new" if new else None


UNIT_TOKENS = 16
NUM_UNITS = 4
BLOCKS_PER_GROUP = 64
SELF_TEST_NONCE = "self-test"
SELF_TEST_HINT = write_hint(RowHint(epoch=0, job=SELF_TEST_NONCE, row=0, rank=0), SELF_TEST_NONCE)


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
    most, block_tokens = largest_chunk_tokens(scheduler), scheduler.cache_config.block_size
    unit = min(UNIT_TOKENS, max(most // 2, 1))
    if scheduler.need_mamba_block_aligned_split and block_tokens <= most:
        unit = block_tokens
    prompt = NUM_UNITS * unit
    first = _request("self-test-1", prompt, scheduler.hash_block_size)
    second = _request("self-test-2", prompt, scheduler.hash_block_size)
    missing = missing_hook(scheduler, first)
    if missing is not None:
        raise refusal(missing)
    script = _Scripted()
    rehearse(scheduler, script, SELF_TEST_NONCE)

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
        sampling_params=SamplingParams(max_tokens=1, extra_args={HINT_KEY: SELF_TEST_HINT}),
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=hash_blocks,
    )
