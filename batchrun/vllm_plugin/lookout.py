"""What a policy gets to see of vLLM's scheduler before a step."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from batchrun.scheduling import EngineView, PrefixHit, RequestView
from batchrun.types import RequestClass
from batchrun.vllm_plugin.compat import awaits_stale_output, cached_prefix
from batchrun.vllm_plugin.online_blocks import OnlineBlocks
from batchrun.vllm_plugin.request_views import refresh

if TYPE_CHECKING:
    from batchrun.vllm_plugin.scheduler import ColocatedScheduler

OFFLINE = RequestClass.OFFLINE
LOOK_STEPS = 8
"""Steps for which what was looked up of an offline request is believed; of an online one only in
the same step, since its promise hangs on the room that it asks for."""


class Lookout:
    """Looks at one scheduler. Remembers for a few steps what it took long to look up: the cached
    prefixes of waiting requests and the private blocks of running ones."""

    def __init__(self, engine: ColocatedScheduler) -> None:
        self._engine = engine
        self.hits: dict[str, tuple[PrefixHit, int]] = {}
        self._private: dict[str, tuple[int, int]] = {}
        self._online_blocks = OnlineBlocks(engine.kv_cache_manager, engine.block_size)

    def forget(self, request_id: str) -> None:
        """A request has ended, or was preempted."""
        self.hits.pop(request_id, None)
        self._private.pop(request_id, None)
        self._online_blocks.forget(request_id)

    def forget_hits(self) -> None:
        """Nothing is cached any more."""
        self.hits.clear()

    def sample(self) -> None:
        """Note how much KV online requests hold, and let what has run out expire; all that runs
        is online."""
        engine = self._engine
        now_s = engine.clock()
        engine._estimates.sample(now_s, self._online_blocks.count(engine.running))
        if engine._kv is not None:
            engine._kv.expire(now_s)

    def view(self) -> EngineView:
        """The engine before the next step."""
        engine = self._engine
        online: list[RequestView] = []
        offline: list[RequestView] = []
        views = engine._views
        for request in engine.running:
            view = views[request.request_id]
            refresh(view, request)
            if view.request_class is OFFLINE:
                offline.append(view)
            else:
                online.append(view)
        now_s = engine.clock()
        used = self._online_blocks.count([view.handle for view in online])
        engine._estimates.sample(now_s, used)
        pool = engine.kv_cache_manager.block_pool
        if engine._kv is not None:
            engine._kv.expire(now_s)
            ranks = [view.rank for view in offline if view.is_row]
            if ranks:
                engine._kv.advance(min(ranks))
        return EngineView(
            now_s=now_s,
            rest_s=engine._steps.rest_s(now_s),
            model=engine._estimates.model,
            error_share=engine._estimates.error_share,
            online_running=online,
            online_waiting=[view for view in engine._pool.online if self._is_ready(view)],
            offline_running=offline,
            offline_waiting=engine._pool.offline,
            free_blocks=pool.get_num_free_blocks(),
            total_blocks=engine._total_blocks,
            wanted_blocks=0 if engine._kv is None else engine._kv.num_wanted_blocks(),
            reserve_blocks=engine._estimates.reserve_blocks(used),
            online_blocks=used,
            block_tokens=engine.block_size,
            token_budget=engine.max_num_scheduled_tokens,
            max_running=engine.max_num_active_reqs - engine.num_waiting_for_streaming_input,
            max_loras=engine.lora_config.max_loras if engine.lora_config else 0,
            look_up=self.look_up,
            private_blocks=self._private_blocks,
            is_ready=self._is_ready,
            is_offline_on=engine.planner.is_offline_on,
            online_slo_ttft_s=engine.batchrun.slo.ttft_s,
            online_slo_tpot_s=engine.batchrun.slo.tpot_s,
        )

    def look_up(self, view: RequestView) -> PrefixHit:
        """What a waiting request finds in the KV cache; looked up again every few steps."""
        known = self.hits.get(view.request_id)
        believed_steps = LOOK_STEPS if view.is_offline else 1
        if known is not None and self._engine.current_step - known[1] < believed_steps:
            return known[0]
        hit = PrefixHit(*cached_prefix(self._engine.kv_cache_manager, view.handle))
        self.hits[view.request_id] = (hit, self._engine.current_step)
        return hit

    def _private_blocks(self, view: RequestView) -> int:
        """Blocks that no other request holds. Who holds a block holds those before it too."""
        request_id, step = view.request_id, self._engine.current_step
        known = self._private.get(request_id)
        if known is not None and step - known[1] < LOOK_STEPS:
            return known[0]
        groups = self._engine.kv_cache_manager.get_blocks(request_id).blocks
        num = sum([len(group) - bisect_left(group, True, key=_is_private) for group in groups])
        self._private[request_id] = (num, step)
        return num

    def _is_ready(self, view: RequestView) -> bool:
        """Whether vLLM's waiting loop could admit the request now."""
        request = view.handle
        if awaits_stale_output(request):
            return False
        structured = request.structured_output_request
        return structured is None or structured.grammar is not None


def _is_private(block: KVCacheBlock) -> bool:
    return block.ref_cnt == 1
