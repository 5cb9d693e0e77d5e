"""The plan of each step: asked of a policy, then said in vLLM's own terms.

Keeping a `RequestView` of every live request true to vLLM's own `Request`.

What a policy gets to see of vLLM's scheduler before a step.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from batchrun.estimator.step_load import StepLoad
from batchrun.hints import FlexHint, Hint, RowHint, SloHint
from batchrun.scheduling.policies import Policy
from batchrun.scheduling.view import EngineView, Plan, PrefixHit, RequestView
from batchrun.types import USUAL_OUTPUT_TOKENS, RequestClass
from batchrun.vllm_plugin.compat import awaits_stale_output, cached_prefix
from batchrun.vllm_plugin.kv_cache import OnlineBlocks
from batchrun.vllm_plugin.settings import OnlineSlo

if TYPE_CHECKING:
    from batchrun.vllm_plugin.scheduler import ColocatedScheduler


log = logging.getLogger(__name__)


class Planner:
    """Plans the steps of one scheduler while it has a `policy`; without one vLLM's order rules.

    `caps` are the tokens that the step's plan grants by request, `load` what it computes then
    (None: nothing was planned); `is_mamba` says that vLLM itself wants its hook for caps.
    """

    def __init__(self, engine: ColocatedScheduler) -> None:
        self._engine = engine
        self.policy: Policy | None = None
        self.is_offline_on = True
        self.is_mamba = engine.need_mamba_block_aligned_split
        self.caps: dict[str, int] = {}
        self.load: StepLoad | None = None
        self.num_errors = 0

    def stop(self) -> None:
        """No plans from now on."""
        self.policy = None
        self.caps = {}
        self._engine.need_mamba_block_aligned_split = self.is_mamba
        self._set_order(is_planned=False)

    def begin_step(self, *, has_offline: bool) -> None:
        """Plan the step that vLLM schedules next. Without offline work there is nothing to plan:
        vLLM does what it always does."""
        engine = self._engine
        self.caps = {}
        self.load = None
        if self.policy is None:
            if engine._kv is not None:
                engine._kv.expire(engine.clock())
            return
        if engine.pause_state == PauseState.UNPAUSED:
            self._set_order(is_planned=has_offline)
            if has_offline:
                view = engine.lookout.view()
                self._apply(self._make(self.policy, view), view)
            else:
                engine.lookout.sample()
                engine._pool.expose([view.handle for view in engine._pool.online])
        engine.need_mamba_block_aligned_split = self.is_mamba or bool(self.caps)

    def _set_order(self, *, is_planned: bool) -> None:
        """Which of its own rules vLLM follows in this step.

        In a planned one its victim is the tail of `running`, which is offline work, and the plan
        sees to it that a prompt finds its blocks, some of them while it is computed.
        """
        engine, config = self._engine, self._engine.scheduler_config
        engine.policy = SchedulingPolicy.FCFS if is_planned else SchedulingPolicy(config.policy)
        engine.scheduler_reserve_full_isl = not is_planned and config.scheduler_reserve_full_isl

    def _make(self, policy: Policy, view: EngineView) -> Plan:
        try:
            return policy.plan(view)
        except Exception:
            self.num_errors += 1
            if self.num_errors == 1:
                log.exception("batchrun: the policy failed; online work only for this step")
            # Everything online, nothing offline.
            caps = {request.request_id: 0 for request in view.offline_running}
            return Plan(admit=tuple(view.online_waiting), caps=caps)

    def _apply(self, plan: Plan, seen: EngineView) -> None:
        """Make vLLM's own queues say what the plan says: online first, who sits out last."""
        engine = self._engine
        for view in plan.preempt:
            engine.running.remove(view.handle)
            engine._preempt_request(view.handle, time.monotonic())
        caps = self.caps = dict(plan.caps)
        self.load = plan.load
        running = [view.handle for view in (*seen.online_running, *seen.offline_running)]
        if plan.preempt:
            gone = {view.request_id for view in plan.preempt}
            running = [request for request in running if request.request_id not in gone]
        if 0 in caps.values():
            running.sort(key=lambda request: caps.get(request.request_id) == 0)
        engine.running = running
        engine._pool.expose([view.handle for view in plan.admit])
        if engine._kv is not None:
            for view in plan.admit:
                if not view.is_offline:
                    hit_blocks = engine.lookout.look_up(view).num_tokens // engine.block_size
                    engine._kv.online_hit(view.handle, hit_blocks, engine.clock())


MARGIN_SHARE = 0.25
"""Room for an answer that is longer than expected, as a share of what is."""


def make_view(
    request: Request, hint: Hint | None, slo: OnlineSlo, arrival_at_s: float
) -> RequestView:
    """The view of a request that has just come in; without a hint it is online."""
    lora = request.lora_request
    is_offline = isinstance(hint, RowHint | FlexHint)
    view = RequestView(
        request_id=request.request_id,
        request_class=RequestClass.OFFLINE if is_offline else RequestClass.ONLINE,
        arrival_at_s=arrival_at_s,
        num_prompt_tokens=request.num_prompt_tokens,
        max_output_tokens=request.max_tokens,
        lora_id=0 if lora is None else lora.lora_int_id,
        num_tokens=request.num_tokens,
        handle=request,
    )
    if isinstance(hint, RowHint):
        view.is_row, view.epoch, view.rank = True, hint.epoch, hint.rank
        view.expected_output_tokens = _with_margin(hint.output_tokens)
        if hint.nodes:
            view.group = hint.job, hint.nodes[-1].node
            view.num_followers = hint.nodes[-1].num_rows_to_come
    elif is_offline:
        view.expected_output_tokens = _with_margin(UNSET)
    else:
        bounds = hint.slo if isinstance(hint, SloHint) else slo
        view.slo_ttft_s, view.slo_tpot_s = bounds.ttft_s, bounds.tpot_s
        view.slo_jct_s = math.inf if bounds.jct_s is None else bounds.jct_s
    return view


def _with_margin(output_tokens: int | UnsetType) -> int:
    """What to set aside for an answer of about this length, or of one that nobody knows."""
    tokens = USUAL_OUTPUT_TOKENS if output_tokens is UNSET else output_tokens
    return math.ceil((1 + MARGIN_SHARE) * tokens)


def stand_behind(view: RequestView, others: Iterable[RequestView]) -> None:
    """Give an offline call its place: behind all offline requests that are here, and before those
    that come later. So neither a long job nor a stream of calls keeps the other waiting for ever.
    """
    places = ((other.epoch, other.rank) for other in others if other.is_offline)
    view.epoch, view.rank = max(places, default=(0, 0))


def begin_turn(view: RequestView, request: Request, wall_offset_s: float) -> None:
    """The next turn of a streaming session begins; what came before it is its prompt now."""
    view.arrival_at_s = request.arrival_time - wall_offset_s
    view.first_token_at_s = None
    view.num_prompt_tokens = request.num_prompt_tokens
    view.num_tokens = request.num_tokens
    view.max_output_tokens = request.max_tokens


def refresh(view: RequestView, request: Request) -> None:
    """Bring the view of a running request up to now, steps in flight counted as done.

    What is left is vLLM's own sum (its `schedule`, top of the running loop); it is 0 when the
    output in flight is sure to be the last.
    """
    placeholders = request.num_output_placeholders
    computed = request.num_computed_tokens
    num_tokens, prompt = request.num_tokens, view.num_prompt_tokens
    left = num_tokens + placeholders - computed
    if placeholders and computed + 2 - placeholders >= prompt + view.max_output_tokens:
        left = 0
    view.work_left_tokens = left
    view.num_computed_tokens = computed
    view.num_output_tokens = num_tokens - prompt + placeholders
    view.num_tokens = num_tokens


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
