"""The plan of each step: what a policy gets to see of the engine, and what it is asked for.

`ViewBuilder` makes the `EngineView` of a step from the state and from vLLM's running requests,
`plan_step` asks a policy for the `Plan`. The scheduler says the plan in vLLM's own terms.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter

from vllm.v1.request import Request

from batchrun.hints import URGENT_LEAD
from batchrun.scheduling.online_cost import planned_cost
from batchrun.scheduling.policies import Policy
from batchrun.scheduling.view import EngineView, Plan, PrefixHit, RequestView
from batchrun.types import RequestClass
from batchrun.vllm_plugin.compat import awaits_stale_output, cached_prefix
from batchrun.vllm_plugin.state import EngineState

log = logging.getLogger(__name__)

OFFLINE = RequestClass.OFFLINE
LOOK_STEPS = 8
"""Steps for which what was looked up of an offline request is believed; of an online one only in
the same step, since its promise hangs on the room that it asks for."""


def plan_step(policy: Policy, view: EngineView, state: EngineState) -> Plan:
    """The policy's plan; where it fails, online work only for this step."""
    try:
        return policy.plan(view)
    except Exception:
        state.num_policy_errors += 1
        if state.num_policy_errors == 1:
            log.exception("batchrun: the policy failed; online work only for this step")
        running = [*view.online_running, *view.offline_running]
        admit = with_adapters(view.online_waiting, running, view.max_loras)
        return Plan(tuple(admit), {request.request_id: 0 for request in view.offline_running})


def with_adapters(
    waiting: Iterable[RequestView], running: Iterable[RequestView], max_loras: int
) -> list[RequestView]:
    """Those that wait whose adapters fit beside those of all that run. vLLM counts the adapters of
    a step alone, and dies in a later one that has more."""
    loras = {request.lora_id for request in running}
    fitting = []
    for request in waiting:
        if request.lora_id in loras or len(loras - {0}) < max_loras or not request.lora_id:
            loras.add(request.lora_id)
            fitting.append(request)
    return fitting


def running_order(plan: Plan, seen: EngineView) -> list[Request]:
    """The requests that run in the step as vLLM goes through them, and preempts them from the end:
    online first, by vLLM's priority, who sits the step out last."""
    calls = sorted(seen.online_running, key=attrgetter("priority"))
    running: Sequence[RequestView] = [*calls, *seen.offline_running]
    if plan.preempt:
        gone = {view.request_id for view in plan.preempt}
        running = [view for view in running if view.request_id not in gone]
    waits = {request_id for request_id, tokens in plan.caps.items() if not tokens}
    if not waits:
        return [view.handle for view in running]
    goes_on = [view.handle for view in running if view.request_id not in waits]
    return goes_on + [view.handle for view in running if view.request_id in waits]


class ViewBuilder:
    """Looks at an engine for its policy. Remembers for a few steps what it took long to look up:
    the cached prefixes of waiting requests and the private blocks of running ones."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._step = 0
        self.hits: dict[str, tuple[PrefixHit, int]] = {}
        self._private: dict[str, tuple[int, int]] = {}

    def forget(self, request_id: str) -> None:
        """A request has ended, or was preempted."""
        self.hits.pop(request_id, None)
        self._private.pop(request_id, None)
        self._state.online_blocks.forget(request_id)

    def sample(self, running: Iterable[Request | RequestView], now_s: float) -> int:
        """Note how much KV online requests hold, these and those seen before, and let what has run
        out expire; returns the blocks."""
        num_blocks = self._state.online_blocks.count(running)
        self._state.estimates.sample(now_s, num_blocks)
        self._state.expire(now_s)
        return num_blocks

    def view(
        self, running: Iterable[Request], last_step: int, token_budget: int, max_running: int
    ) -> EngineView:
        """The engine before the next step, with these requests running. vLLM allows the step so
        many tokens and running requests; `last_step` tells how old a look-up is."""
        state = self._state
        self._step = last_step
        online, offline = self._by_class(running)
        now_s = state.clock()
        used = self.sample(online, now_s)
        self._advance(offline or state.queue.offline[:1])
        state.estimates.expect_calls(soon=state.are_calls_near(now_s))
        return EngineView(
            now_s=now_s,
            rest_s=state.steps.rest_s(now_s),
            model=state.estimates.model,
            alone_model=state.estimates.alone_model,
            error_share=state.estimates.error_share,
            online_running=online,
            online_waiting=self._ready_calls(),
            offline_running=offline,
            offline_waiting=state.queue.offline,
            free_blocks=state.manager.block_pool.get_num_free_blocks(),
            total_blocks=state.total_blocks,
            reserve_blocks=state.estimates.reserve_blocks(used),
            online_blocks=used,
            law=state.law,
            token_budget=token_budget,
            max_running=max_running,
            max_loras=state.max_loras,
            look_up=self.look_up,
            wanted_blocks=self._wanted_blocks,
            num_followers=self._num_followers,
            private_blocks=self._private_blocks,
            is_ready=self._is_ready,
            is_offline_on=state.is_offline_on,
            watermark_blocks=state.watermark_blocks if online or offline else 0,
            online_slo_ttft_s=state.slo.ttft_s,
            online_slo_tpot_s=state.slo.tpot_s,
            online_cost=planned_cost(state.settings.cost_in_force),
            calls=state.calls,
            were_calls_lately=state.were_calls_lately(now_s),
            kept_back=state.margin.now,
        )

    def note_admissions(self, admitted: Iterable[RequestView]) -> None:
        """What online requests hit stays cached for a while: others may hit it too."""
        state = self._state
        if state.kv is not None:
            for view in admitted:
                if not view.is_offline:
                    hit_blocks = self.look_up(view).num_tokens // state.block_tokens
                    state.kv.online_hit(view.handle, hit_blocks, state.clock())

    def look_up(self, view: RequestView) -> PrefixHit:
        """What a waiting request finds in the KV cache; looked up again every few steps."""
        known = self.hits.get(view.request_id)
        believed_steps = LOOK_STEPS if view.is_offline else 1
        if known is not None and self._step - known[1] < believed_steps:
            return known[0]
        hit = PrefixHit(*cached_prefix(self._state.manager, view.handle))
        self.hits[view.request_id] = (hit, self._step)
        return hit

    def _by_class(self, running: Iterable[Request]) -> tuple[list[RequestView], list[RequestView]]:
        """The views of online and offline requests, brought up to now, steps in flight counted as
        done. The hot path: half of what a step sees is here.

        What is left is vLLM's own sum (its `schedule`, top of the running loop); it is 0 when the
        output in flight is sure to be the last.
        """
        online: list[RequestView] = []
        offline: list[RequestView] = []
        views = self._state.views
        for request in running:
            view = views[request.request_id]
            placeholders = request.num_output_placeholders
            computed, num_tokens = request.num_computed_tokens, request.num_tokens
            prompt = view.num_prompt_tokens
            left = num_tokens + placeholders - computed
            if placeholders and computed + 2 - placeholders >= prompt + view.max_output_tokens:
                left = 0
            view.work_left_tokens = left
            view.num_computed_tokens = computed
            view.num_output_tokens = num_tokens - prompt + placeholders
            view.num_tokens = num_tokens
            (offline if view.request_class is OFFLINE else online).append(view)
        return online, offline

    def _ready_calls(self) -> list[RequestView]:
        """The waiting calls that vLLM could admit now; most are asked no more than two fields."""
        return [
            view
            for view in self._state.queue.online
            if (
                (request := view.handle).structured_output_request is None
                and not request.num_stale_output_tokens
            )
            or self._is_ready(view)
        ]

    def _advance(self, offline: Sequence[RequestView]) -> None:
        """The engine is as far in the planned order as these rows, urgent ones aside where others
        run; those of a daemon before this one have ranks of their own."""
        kv = self._state.kv
        if kv is None:
            return
        ranks = [view.rank for view in offline if view.is_row and view.epoch == kv.epoch]
        if ranks:
            urgent_rank = max(ranks) - URGENT_LEAD // 2
            kv.advance(min([rank for rank in ranks if rank > urgent_rank]))

    def _wanted_blocks(self, view: RequestView) -> int:
        """Free blocks that rows planned no later than this one will hit."""
        kv = self._state.kv
        return 0 if kv is None else kv.num_wanted_blocks(view.rank)

    def _num_followers(self, view: RequestView) -> int:
        """What hints say now; where no blocks are counted, what the request's own said once."""
        kv = self._state.kv
        return view.announced_followers if kv is None else kv.num_followers(view.request_id)

    def _private_blocks(self, view: RequestView) -> int:
        """Blocks that no other request holds. Who holds a block holds those before it too."""
        known = self._private.get(view.request_id)
        if known is not None and self._step - known[1] < LOOK_STEPS:
            return known[0]
        groups = self._state.manager.get_blocks(view.request_id).blocks
        num_shared = [bisect_left(group, True, key=lambda b: b.ref_cnt == 1) for group in groups]
        num = sum(map(len, groups)) - sum(num_shared)
        self._private[view.request_id] = (num, self._step)
        return num

    def _is_ready(self, view: RequestView) -> bool:
        """Whether vLLM's waiting loop could admit the request now."""
        request = view.handle
        structured = request.structured_output_request
        if structured is not None and structured.grammar is None:
            return False
        return not request.num_stale_output_tokens or not awaits_stale_output(request)
