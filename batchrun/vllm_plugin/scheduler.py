"""`ColocatedScheduler`: plan each step, then let vLLM schedule it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from batchrun.estimator import StepLoad
from batchrun.scheduling import EngineView, Plan, Policy, RequestView, make_policy
from batchrun.types import RequestClass
from batchrun.vllm_plugin.estimating import Estimates
from batchrun.vllm_plugin.hints import Hint, parse_hint
from batchrun.vllm_plugin.kv_cache import KvTiers
from batchrun.vllm_plugin.plan_queue import PlanQueue
from batchrun.vllm_plugin.request_views import make_view, refresh
from batchrun.vllm_plugin.settings import read_nonce, read_settings
from batchrun.vllm_plugin.step_clock import StepClock

logger = logging.getLogger(__name__)

HIT_STEPS = 8
"""Steps for which a prefix lookup of a waiting request is believed."""


class ColocatedScheduler(AsyncScheduler):
    """vLLM's scheduler with a plan for each step (design 6.1; `vllm-notes.md` 1 gives the shape).

    Online and offline requests share the engine: a policy decides who is admitted, preempted and
    how many tokens each may get; vLLM's own `schedule` stays the mechanism. `clock` returns
    monotonic seconds and `wall_offset_s` turns vLLM's wall-clock arrivals into them.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batchrun = read_settings(self.vllm_config.additional_config)
        self.wall_offset_s = time.time() - time.monotonic()
        self._nonce = read_nonce()
        self._is_mamba = self.need_mamba_block_aligned_split
        self._policy = make_policy(self.batchrun.policy)
        self._views: dict[str, RequestView] = {}
        self._pool = PlanQueue(self._views)
        self._hits: dict[str, tuple[int, int]] = {}
        self._caps: dict[str, int] = {}
        self._steps = StepClock()
        self._num_malformed_hints = 0
        self._num_policy_errors = 0
        self._total_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        self._estimates = Estimates(self.batchrun, self._total_blocks)
        self._kv: KvTiers | None = None
        if self._policy is not None:
            self._take_over()

    def _take_over(self) -> None:
        """Put our queue and cap hook in place. Nothing waits yet."""
        self.waiting = self._pool
        self.need_mamba_block_aligned_split = True
        # vLLM's own victim is then the tail of `running`, which is offline work.
        self.policy = SchedulingPolicy.FCFS
        if self.cache_config.enable_prefix_caching:
            self._kv = KvTiers(self.kv_cache_manager, self.batchrun.eviction)

    def warm_up(
        self, kv_samples: Iterable[tuple[float, int]], steps: Iterable[tuple[StepLoad, float]]
    ) -> None:
        """Take in what was observed of this engine before: see `Estimates.warm_up`."""
        self._estimates.warm_up(kv_samples, steps)

    def add_request(self, request: Request) -> None:
        """Take a request in, as online work unless it carries the daemon's hint."""
        if request.request_id not in self.requests:
            arrival_at_s = request.arrival_time - self.wall_offset_s
            hint = self._read_hint(request)
            view = make_view(request, hint, self.batchrun.slo, arrival_at_s)
            self._views[request.request_id] = view
            if hint is not None and self._kv is not None:
                self._kv.announce(request, hint, self.clock())
        super().add_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """The one place where a request ends."""
        view = self._views.pop(request.request_id, None)
        self._hits.pop(request.request_id, None)
        if self._kv is None:
            return super()._free_request(request, *args, **kwargs)
        self._kv.finished(request, was_waiting=request.num_computed_tokens == 0)
        with self._freeing(view):
            return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        with self._freeing(self._views.get(request.request_id)):
            super()._preempt_request(request, *args, **kwargs)
        # Runner V1 would otherwise miss the tokens of a request that comes back at once.
        self.prev_step_scheduled_req_ids.discard(request.request_id)

    @contextmanager
    def _freeing(self, view: RequestView | None) -> Iterator[None]:
        """Tell the tiers whose blocks are being freed."""
        is_online = view is None or view.request_class is RequestClass.ONLINE
        if self._kv is None or not is_online:
            yield
            return
        self._kv.freeing_online(is_freeing=True)
        try:
            yield
        finally:
            self._kv.freeing_online(is_freeing=False)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """After a reset no block has a hash: the tiers begin anew."""
        is_reset = super().reset_prefix_cache(*args, **kwargs)
        self._hits.clear()
        if is_reset and self._kv is not None:
            self._kv.rebuild()
        return is_reset

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """The first per-request point in vLLM's loops: where a plan's caps go in."""
        cap = self._caps.get(request.request_id)
        if cap is not None and cap < num_new_tokens:
            num_new_tokens = cap
        if self._is_mamba and num_new_tokens:
            return super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        return num_new_tokens

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002
        """Plan the step, apply the plan, let vLLM schedule it."""
        policy = self._policy
        if policy is None:
            return super().schedule(throttle_prefills)
        self._caps = {}
        if self.pause_state == PauseState.UNPAUSED:
            self._apply(self._make_plan(policy))
        output = super().schedule(throttle_prefills)
        self._pool.expose(())
        load = self._load_of(output)
        self._steps.scheduled(load, self._estimates.predict_s(load), self.clock())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Note when the step ended and who got a first token."""
        now_s = self.clock()
        ended = self._steps.ended(now_s)
        if ended is not None:
            load, seconds, _ = ended
            self._estimates.observe(load, seconds)
        views = self._views
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for batch in outputs.values():
            for output in batch.outputs:
                view = views.get(output.request_id)
                if view is None or not output.new_token_ids:
                    continue
                # It may be waiting: a preempted request still gets the tokens that were in flight.
                view.num_tokens = view.handle.num_tokens
                if view.first_token_at_s is None:
                    view.first_token_at_s = now_s
        return outputs

    def _make_plan(self, policy: Policy) -> Plan:
        view = self._look()
        try:
            return policy.plan(view)
        except Exception:
            self._num_policy_errors += 1
            if self._num_policy_errors == 1:
                logger.exception("batchrun: the policy failed; online work only for this step")
            return self._online_only(view)

    def _online_only(self, view: EngineView) -> Plan:
        """Everything online, nothing offline: the plan when planning went wrong."""
        caps = {request.request_id: 0 for request in view.offline_running}
        return Plan(admit=tuple(view.online_waiting), caps=caps)

    def _look(self) -> EngineView:
        online: list[RequestView] = []
        offline: list[RequestView] = []
        views = self._views
        for request in self.running:
            view = views[request.request_id]
            refresh(view, request)
            (online if view.request_class is RequestClass.ONLINE else offline).append(view)
        now_s = self.clock()
        used = sum(-(-view.num_computed_tokens // self.block_size) for view in online)
        self._estimates.sample(now_s, used)
        pool = self.kv_cache_manager.block_pool
        if self._kv is not None:
            self._kv.expire(now_s)
            if offline:
                self._kv.advance(min(view.rank for view in offline))
        return EngineView(
            now_s=now_s,
            rest_s=self._steps.rest_s(now_s),
            model=self._estimates.model,
            online_running=online,
            online_waiting=[view for view in self._pool.online if self._is_ready(view)],
            offline_running=offline,
            offline_waiting=self._pool.offline,
            free_blocks=pool.get_num_free_blocks(),
            total_blocks=self._total_blocks,
            wanted_blocks=0 if self._kv is None else self._kv.num_wanted_blocks(),
            reserve_blocks=self._estimates.reserve_blocks(used),
            block_tokens=self.block_size,
            token_budget=self.max_num_scheduled_tokens,
            max_running=self.max_num_running_reqs,
            max_loras=self.lora_config.max_loras if self.lora_config else 0,
            hit_tokens=self._hit_tokens,
            private_blocks=self._private_blocks,
            is_ready=self._is_ready,
            online_slo_ttft_s=self.batchrun.slo.ttft_s,
        )

    def _apply(self, plan: Plan) -> None:
        """Make vLLM's own queues say what the plan says."""
        for view in plan.preempt:
            self.running.remove(view.handle)
            self._preempt_request(view.handle, time.monotonic())
        caps = self._caps = dict(plan.caps)
        first: list[Request] = []
        offline: list[Request] = []
        sitting_out: list[Request] = []
        for request in self.running:
            if caps.get(request.request_id) == 0:
                sitting_out.append(request)
            elif self._views[request.request_id].request_class is RequestClass.ONLINE:
                first.append(request)
            else:
                offline.append(request)
        self.running = first + offline + sitting_out
        self._pool.expose([view.handle for view in plan.admit])
        if self._kv is not None:
            for view in plan.admit:
                if view.request_class is RequestClass.ONLINE:
                    hit_blocks = self._hit_tokens(view) // self.block_size
                    self._kv.online_hit(view.handle, hit_blocks, self.clock())

    def _hit_tokens(self, view: RequestView) -> int:
        """Tokens of a waiting request whose KV is cached; looked up again every few steps."""
        known = self._hits.get(view.request_id)
        if known is not None and self.current_step - known[1] < HIT_STEPS:
            return known[0]
        hit = int(self.kv_cache_manager.get_computed_blocks(view.handle)[1])
        self._hits[view.request_id] = (hit, self.current_step)
        return hit

    def _private_blocks(self, view: RequestView) -> int:
        groups = self.kv_cache_manager.get_blocks(view.request_id).blocks
        return sum(block.ref_cnt == 1 for group in groups for block in group)

    def _is_ready(self, view: RequestView) -> bool:
        """Whether vLLM's waiting loop could admit the request now."""
        request = view.handle
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return False
        structured = request.structured_output_request
        return structured is None or structured.grammar is not None

    def _load_of(self, output: SchedulerOutput) -> StepLoad | None:
        """What the step computes, as it was really scheduled."""
        if not output.total_num_scheduled_tokens:
            return None
        load = StepLoad()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            context = request.num_computed_tokens
            is_decode = num_tokens == 1 and context > request.num_prompt_tokens
            load.add(num_tokens, context, is_decode=is_decode)
        return load

    def _read_hint(self, request: Request) -> Hint | None:
        params = request.sampling_params
        if params is None or request.resumable:
            return None
        try:
            return parse_hint(params.extra_args, self._nonce)
        except ValueError:
            self._num_malformed_hints += 1
            return None
