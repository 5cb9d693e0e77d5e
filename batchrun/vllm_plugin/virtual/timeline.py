"""What a virtual engine holds and does, once per virtual second."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

from batchrun.estimator import KvForecast
from batchrun.vllm_plugin.virtual.engine import VirtualEngine
from batchrun.vllm_plugin.virtual.requests import RequestRecord

GROUP_SUFFIX = b"\0\0\0\0"
"""vLLM keys a cached block by its hash and its KV group's number; here there is one group."""


class Timeline:
    """Samples of one run, as columns of equal length.

    `at_s` is the instant. Blocks by class, as in Echo's figure 10: held by running requests
    (`online_running_blocks`, `offline_running_blocks`), and free with content that can still be hit
    (`online_cached_blocks`, `offline_cached_blocks`); the rest of `total_blocks` is empty.
    `forecast_blocks` is what the rule of section 5.3 expects online requests to want, from
    `kv_samples` of earlier traffic and the samples so far; None without enough of them.
    `online_active` and `offline_active` requests run. `offline_hit_tokens` and
    `offline_prompt_tokens` add up over first admissions.

    A sample walks over the free blocks (`BlocksByClass`).
    """

    def __init__(self, engine: VirtualEngine, kv_samples: Sequence[tuple[float, int]] = ()) -> None:
        self.columns: dict[str, list[float | int | None]] = {}
        self._engine = engine
        self._blocks = BlocksByClass(engine)
        self._forecast = KvForecast()
        for at_s, blocks in kv_samples:
            self._forecast.sample(at_s, blocks)

    @property
    def total_blocks(self) -> int:
        """Blocks that requests can have; vLLM keeps one for itself."""
        return self._engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def sample(self) -> None:
        """Add one row of figures as of now."""
        engine = self._engine
        records = engine.records
        running = [records[request.request_id] for request in engine.scheduler.running]
        num_online = sum(record.is_online for record in running)
        online_blocks, offline_blocks = self._blocks.running()
        online_cached, offline_cached = self._blocks.cached()
        self._forecast.sample(engine.now_s, online_blocks)
        admitted = [r for r in records.values() if r.admitted_at_s is not None and not r.is_online]
        self._add({
            "at_s": engine.now_s,
            "online_running_blocks": online_blocks,
            "offline_running_blocks": offline_blocks,
            "online_cached_blocks": online_cached,
            "offline_cached_blocks": offline_cached,
            "forecast_blocks": self._forecast.forecast_blocks,
            "online_active": num_online,
            "offline_active": len(running) - num_online,
            "offline_hit_tokens": sum(r.num_hit_tokens for r in admitted),
            "offline_prompt_tokens": sum(r.num_prompt_tokens for r in admitted),
        })

    def _add(self, row: dict[str, float | int | None]) -> None:
        for name, value in row.items():
            self.columns.setdefault(name, []).append(value)


class BlocksByClass:
    """Counts the KV blocks of one engine by class. Make it before the first request comes."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self._online_keys: set[BlockHashWithGroupId] = set()
        engine.end_listeners.append(self._note_online_keys)

    def running(self) -> tuple[int, int]:
        """Distinct blocks that online requests hold, and that only offline ones hold."""
        pool = self._engine.scheduler.kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        num_online = self._blocks_of(self._online_running())
        return num_online, held - num_online

    def cached(self) -> tuple[int, int]:
        """Free blocks with content of online requests that can be hit, and of offline ones.

        Walks over the free blocks: about 1 ms for 8,600.
        """
        pool = self._engine.scheduler.kv_cache_manager.block_pool
        online = self._online_running()
        for record in online:
            self._note_online_keys(record)
        free = pool.free_block_queue.get_all_free_blocks()
        keys = [key for block in free if (key := block.block_hash)]
        num_online = sum([key in self._online_keys for key in keys])
        if len(self._online_keys) > 2 * pool.num_gpu_blocks:
            self._forget_evicted(online, keys)
        return num_online, len(keys) - num_online

    def _online_running(self) -> list[RequestRecord]:
        records = self._engine.records
        running = [records[request.request_id] for request in self._engine.scheduler.running]
        return [record for record in running if record.is_online]

    def _note_online_keys(self, record: RequestRecord) -> None:
        if record.is_online and record.request is not None:
            self._online_keys.update(
                BlockHashWithGroupId(block_hash + GROUP_SUFFIX)
                for block_hash in record.request.block_hashes
            )

    def _forget_evicted(
        self, running: Sequence[RequestRecord], cached: Sequence[BlockHashWithGroupId]
    ) -> None:
        self._online_keys.intersection_update(cached)
        for record in running:
            self._note_online_keys(record)

    def _blocks_of(self, records: Sequence[RequestRecord]) -> int:
        """Distinct blocks that these requests hold."""
        manager = self._engine.scheduler.kv_cache_manager
        held: set[int] = set()
        for record in records:
            for group in manager.get_blocks(record.request_id).blocks:
                held.update(block.block_id for block in group)
        return len(held)
