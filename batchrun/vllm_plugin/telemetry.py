"""The picture of an engine that goes to the daemon a few times a second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus

from batchrun.cache import TieredFreeQueue
from batchrun.cache.eviction import FINISHED_ONLINE_TIER, FIRST_WANTED_TIER, UNNEEDED_TIER
from batchrun.scheduling import RequestView
from batchrun.vllm_plugin.meter import OFFLINE, ONLINE, Meter, due_at_s
from batchrun.wire import KvTelemetry, Telemetry


@dataclass(slots=True)
class _ClassNow:
    num_running: int = 0
    num_waiting: int = 0
    longest_wait_s: float = 0.0
    num_blocks: int = 0
    num_full_blocks: int = 0


@dataclass(slots=True)
class _Now:
    online: _ClassNow = field(default_factory=_ClassNow)
    offline: _ClassNow = field(default_factory=_ClassNow)
    awaited_slack_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Reporter:
    """Puts the picture together. Each is the scheduler's own and only read."""

    meter: Meter
    views: Mapping[str, RequestView]
    manager: KVCacheManager
    block_tokens: int

    def fill_in(self, blank: Telemetry, now_s: float) -> Telemetry:
        """`blank`, which holds what the scheduler itself knows, with all the rest. O(requests)."""
        meter = self.meter
        now = self._look(now_s)
        shared, alone = meter.latencies()
        return msgspec.structs.replace(
            blank,
            online=meter.of_class(ONLINE, *_queue(now.online)),
            offline=meter.of_class(OFFLINE, *_queue(now.offline)),
            shared=shared,
            alone=alone,
            slo=meter.slo(now.awaited_slack_s),
            step=meter.steps(),
            kv=self._kv(blank.kv, now),
        )

    def _look(self, now_s: float) -> _Now:
        now = _Now()
        online, offline = now.online, now.offline
        preempted_at_s = self.meter.preempted_at_s
        running, streaming = RequestStatus.RUNNING, RequestStatus.WAITING_FOR_STREAMING_REQ
        for view in self.views.values():
            own = online if view.request_class is ONLINE else offline
            status = view.handle.status
            if status is running:
                self._look_at_running(view, own)
            elif status is not streaming:
                own.num_waiting += 1
                wait_s = now_s - preempted_at_s.get(view.request_id, view.arrival_at_s)
                if wait_s > own.longest_wait_s:
                    own.longest_wait_s = wait_s
            if own is online:
                slack_s = due_at_s(view, view.handle.num_output_tokens) - now_s
                if slack_s < now.awaited_slack_s:
                    now.awaited_slack_s = slack_s
        return now

    def _look_at_running(self, view: RequestView, own: _ClassNow) -> None:
        request = view.handle
        own.num_running += 1
        for blocks in self.manager.get_blocks(view.request_id).blocks:
            own.num_blocks += len(blocks)
        num_kept_tokens = min(request.num_computed_tokens, request.num_tokens)
        own.num_full_blocks += num_kept_tokens // self.block_tokens

    def _kv(self, known: KvTelemetry, now: _Now) -> KvTelemetry:
        """Who holds the blocks. Nothing is counted block by block."""
        pool = self.manager.block_pool
        total = pool.num_gpu_blocks - 1
        free = pool.get_num_free_blocks()
        online = min(now.online.num_blocks, total - free)
        kv = msgspec.structs.replace(
            known,
            total_blocks=total,
            online_blocks=online,
            offline_blocks=total - free - online,
            free_blocks=free,
        )
        queue = pool.free_block_queue
        if not isinstance(queue, TieredFreeQueue) or len(tiers := queue.free_by_tier()) == 1:
            return kv
        # Blocks that are in use without a hash belong to one request each; the others in use are
        # cached. What is cached and not in use is free.
        held = now.online, now.offline
        num_partial = sum(own.num_blocks - own.num_full_blocks for own in held)
        num_cached_in_use = total - free - num_partial
        num_cached_free = len(pool.cached_block_hash_to_block) - num_cached_in_use
        empty = min(max(free - num_cached_free, 0), tiers[UNNEEDED_TIER])
        return msgspec.structs.replace(
            kv,
            empty_blocks=empty,
            unneeded_blocks=tiers[UNNEEDED_TIER] - empty,
            finished_online_blocks=tiers[FINISHED_ONLINE_TIER],
            wanted_blocks=sum(tiers[FIRST_WANTED_TIER:-1]),
            online_prefix_blocks=tiers[-1],
        )


def _queue(own: _ClassNow) -> tuple[int, int, float]:
    return own.num_running, own.num_waiting, own.longest_wait_s
