"""`ColocatedScheduler`: plan each step, then let vLLM schedule it."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from batchrun.errors import BatchrunError
from batchrun.scheduling.policies import VLLMS_QUEUES, Policy, make_policy
from batchrun.scheduling.view import EngineView, Plan
from batchrun.types import RequestClass
from batchrun.vllm_plugin.compat import check_plans_are_obeyed, largest_chunk_tokens, preempt
from batchrun.vllm_plugin.control import DaemonLink, InForce
from batchrun.vllm_plugin.estimates import StepRecorder, scheduled_load
from batchrun.vllm_plugin.planner import ViewBuilder, plan_step, running_order, with_adapters
from batchrun.vllm_plugin.settings import check_combinations, read_settings
from batchrun.vllm_plugin.state import EngineState, begin_turn, ends_on_string
from batchrun.wire import CHANNEL_VARIABLE

NO_PLAN = Plan()


class ColocatedScheduler(AsyncScheduler):
    """vLLM's scheduler with a plan for each step (Echo, arXiv 2504.03651, section 4.1).

    Online and offline requests share the engine: a policy decides who is admitted, preempted and
    how many tokens each may get; vLLM's own `schedule` stays the mechanism. `state` is what is
    known of the engine, `plan` that of the step. Only this class touches vLLM's scheduler.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **kwargs: Any
    ) -> None:
        settings = read_settings(vllm_config.additional_config)
        self._planned_as = settings.policy, settings.online_queue
        self._ttft_seen_at_s: dict[float, float] = {}
        policy = make_policy(*self._planned_as, settings.queue_options, self._ttft_seen_at_s)
        has_channel = settings.channel and bool(os.environ.get(CHANNEL_VARIABLE))
        refusal: str | None = None
        if policy is not None or has_channel:
            try:
                check_combinations(vllm_config)
                cls = type(self)
                check_plans_are_obeyed(cls, cls.rehearse, vllm_config, kv_cache_config, kwargs)
            except BatchrunError as error:
                if policy is not None:
                    raise
                refusal = str(error)
        super().__init__(vllm_config, kv_cache_config, **kwargs)
        self.state = EngineState(settings, self.vllm_config, self.kv_cache_manager, self.block_size)
        self.step_policy: Policy | None = None
        self.view_builder = ViewBuilder(self.state)
        self.plan = NO_PLAN
        self._lacks_image_room = self._stands_still = False
        self._begun_turns: set[str] = set()
        started = InForce(
            settings.policy, self.max_num_scheduled_tokens, online_queue=settings.online_queue
        )
        self.daemon_link = DaemonLink(self.state, started, self.max_num_running_reqs, refusal)
        self._is_mamba = self.need_mamba_block_aligned_split
        self._keeps_items_whole = self.scheduler_config.disable_chunked_mm_input
        self._recorder: StepRecorder | None = None
        if settings.record_steps is not None:
            self._recorder = StepRecorder(settings.record_steps, self.state.facts)
        if policy is not None:
            self.take_over(policy)
        if has_channel:
            self.daemon_link.open()

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Take the time from `clock`; arrivals are on its scale too. Before any request."""
        self.state.clock, self.state.wall = clock, None
        self.state.wall_offset_s = 0.0

    def rehearse(self, policy: Policy, nonce: str) -> None:
        """Plan with `policy`, and believe hints with `nonce`: for the self-test."""
        self.state.nonce = nonce
        self.take_over(policy)

    def take_over(self, policy: Policy) -> None:
        """Plan with `policy`, in our queue, with our cap hook and tiers. Between two steps."""
        self.step_policy = policy
        queue = self.state.queue
        if self.waiting is not queue:
            waiting = list(self.waiting)
            self.waiting = queue
            for request in waiting:
                queue.add_request(request)
                self._defer(request)
        self.need_mamba_block_aligned_split = True
        self.state.keep_by_use()

    def hand_back(self) -> None:
        """Let vLLM's own order rule again, in its own queue. The tiers stay. Between two steps."""
        self.step_policy = None
        self.plan = NO_PLAN
        self.daemon_link.meter.num_left_out = 0
        self.need_mamba_block_aligned_split = self._is_mamba
        self._set_order(is_planned=False)
        waiting = sorted(self.waiting, key=attrgetter("arrival_time"))
        self.waiting.remove_requests(waiting)
        self.deferred_waiting.difference_update(waiting)
        self.waiting = create_request_queue(self.policy)
        for request in waiting:
            self.waiting.add_request(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on, and say so: no step may come that would."""
        super().set_pause_state(pause_state)
        with self.state.surviving:
            self.daemon_link.paused(pause_state.value)

    def shutdown(self) -> None:
        """Close the channel, then what vLLM has."""
        self.daemon_link.close()
        super().shutdown()

    def add_request(self, request: Request) -> None:
        """Take a request in, as online work unless a hint says otherwise."""
        if request.request_id not in self.requests:
            view, hint = self.state.enter(request)
            with self.state.surviving:
                self.daemon_link.arrived(view, hint)
        super().add_request(request)
        self._defer(request)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """A streaming session's next input has come: a turn with bounds of its own."""
        state = self.state
        waits = session in state.queue
        if waits:
            state.queue.remove_request(session)
        super()._update_request_as_session(session, update)
        view = state.views[session.request_id]
        begin_turn(view, session, state.arrived_at_s(session))
        self._begun_turns.add(session.request_id)
        with state.surviving:
            state.call_began(view.arrival_at_s)
            self.daemon_link.meter.costs.arrived(view)
        if waits:
            state.queue.add_request(session)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """The one place where a request ends."""
        if ends_on_string(request):
            with self.state.surviving:
                self._note_last(request)
        view = self.state.leave(request)
        if view is not None:
            with self.state.surviving:
                self.daemon_link.left(view)
        self.view_builder.forget(request.request_id)
        self.state.mark_call(request, view)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """A running request, vLLM's victim or the plan's, waits again."""
        view = self.state.views.get(request.request_id)
        if view is not None:
            self.daemon_link.meter.preempted(view, self.state.clock())
        self.state.mark_call(request, view)
        super()._preempt_request(request, *args, **kwargs)
        self.view_builder.forget(request.request_id)
        # Runner V1 would otherwise miss the tokens of a request that comes back at once.
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        self._defer(request)

    def _defer(self, request: Request) -> None:
        """Count a waiting offline request as deferred: no gauge takes it for missing capacity."""
        if self.step_policy is None or request.status == RequestStatus.RUNNING:
            return
        view = self.state.views.get(request.request_id)
        if view is not None and view.request_class is RequestClass.OFFLINE:
            self.deferred_waiting.add(request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """After a reset no block has a hash: the tiers start again."""
        is_reset = super().reset_prefix_cache(*args, **kwargs)
        self.view_builder.hits.clear()
        if is_reset and self.state.kv is not None:
            self.state.kv.rebuild()
        return is_reset

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """The first per-request point in vLLM's loops: where a plan's caps go in."""
        cap = self.plan.caps.get(request.request_id)
        capped = num_new_tokens if cap is None else min(cap, num_new_tokens)
        if self._keeps_items_whole and capped and request.mm_features:
            start = request.num_computed_tokens + sum(args) + sum(kwargs.values())
            capped = self._whole_item(request, start, capped, num_new_tokens)
        if not self._is_mamba or not capped:
            return capped
        align = super()._mamba_block_aligned_split
        aligned = align(request, capped, *args, **kwargs)
        if aligned:
            return aligned
        # A state is kept at block boundaries only: the smallest chunk goes to the next one.
        block = min(self.cache_config.block_size, num_new_tokens)
        return align(request, block, *args, **kwargs)

    def _whole_item(self, request: Request, start: int, capped: int, most: int) -> int:
        """The chunk of `capped` tokens or, where it would end in the image or video that it begins
        in, up to the end of that: its tokens see each other. vLLM itself stops before one that
        begins later. 0 where `most`, what is left of the step, is too little; where that is so in
        every step, vLLM's own chunk."""
        features = request.mm_features or ()
        number = bisect_right(features, start, key=lambda each: each.mm_position.offset) - 1
        if number < 0:
            return capped
        place = features[number].mm_position
        rest = place.offset + place.length - start
        if rest <= capped:
            return capped
        if rest <= most:
            return rest
        return 0 if rest <= largest_chunk_tokens(self) else most

    # The signature is vLLM's.
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002
        """Plan the step, apply the plan, let vLLM schedule it."""
        self.obey()
        self._begin_step()
        output = super().schedule(throttle_prefills)
        self.state.queue.expose(())
        if self.max_num_encoder_input_tokens:
            self._look_for_images(output)
        with self.state.surviving:
            self._note(output)
        return output

    def _look_for_images(self, output: SchedulerOutput) -> None:
        """Whether a call got none of the tokens that the plan has for it, since its next image does
        not fit into vLLM's encoder cache; and whether no prompt got any."""
        got, views = output.num_scheduled_tokens, self.state.views
        self._lacks_image_room = any(
            tokens and request_id not in got and self._is_kept_out(request_id)
            for request_id, tokens in self.plan.caps.items()
        )
        self._stands_still = self._lacks_image_room and all(
            request_id in views and views[request_id].is_decode for request_id in got
        )

    def _is_kept_out(self, request_id: str) -> bool:
        view, cache = self.state.views.get(request_id), self.encoder_cache_manager
        if view is None or view.is_offline:
            return False
        request: Request = view.handle
        encoded, done = cache.get_cached_input_ids(request), request.num_computed_tokens
        for number, feature in enumerate(request.mm_features or ()):
            place = feature.mm_position
            if number not in encoded and place.offset + place.length > done:
                return bool(request.get_num_encoder_embeds(number) > cache.num_freeable_slots)
        return False

    def _make_image_room(self) -> bool:
        """The last step had tokens for a call whose image found no room in vLLM's encoder cache:
        rows in the middle of theirs give way. Whether there was one."""
        cache, views = self.encoder_cache_manager, self.state.views
        rows = [row for row in self.running if views[row.request_id].is_offline]
        rows = [row for row in rows if row.mm_features and cache.get_cached_input_ids(row)]
        for row in rows:
            preempt(self, row)
        return bool(rows)

    def obey(self) -> None:
        """Work by the orders that have come in since the last step. O(1) without any."""
        while (taken := self.daemon_link.control.take()) is not None:
            now, orders = taken
            self.max_num_scheduled_tokens = now.token_budget
            self.state.is_offline_on = now.is_offline_on
            if now.planned_as != self._planned_as:
                self._planned_as = now.planned_as
                options = self.state.settings.queue_options
                policy = make_policy(*now.planned_as, options, self._ttft_seen_at_s)
                if policy is None:
                    self.hand_back()
                else:
                    self.take_over(policy)
            with self.state.surviving:
                self.state.count_jobs(orders)
                self.state.hear_callers(orders.felt)

    def _begin_step(self) -> None:
        """Plan the step that vLLM schedules next. Where there is nothing to plan, as without
        offline work, classes and an order of calls, vLLM does what it always does."""
        state, policy = self.state, self.step_policy
        self.plan = NO_PLAN
        if policy is None:
            state.expire(state.clock())
            return
        if self.pause_state == PauseState.UNPAUSED:
            is_planned = (
                state.num_offline > 0
                or self._planned_as[1] not in VLLMS_QUEUES
                or state.has_classes(state.clock())
            )
            self._set_order(is_planned=is_planned)
            if is_planned:
                self._plan_step(policy)
            else:
                with state.surviving:
                    self.view_builder.sample(self.running, state.clock())
                state.queue.expose([view.handle for view in state.queue.online])
        self.daemon_link.meter.num_left_out = self.plan.num_left_out
        self.need_mamba_block_aligned_split = self._is_mamba or bool(self.plan.caps)

    def _plan_step(self, policy: Policy) -> None:
        """Plan by what is seen. Where nothing can be seen, or a plan stands still for images that
        calls are in the middle of, whatever runs goes on as vLLM has it."""
        state = self.state
        seen: EngineView | None = None
        is_stuck = self._lacks_image_room and not self._make_image_room() and self._stands_still
        places = self.max_num_active_reqs - self.num_waiting_for_streaming_input
        with state.surviving:
            seen = self.view_builder.view(
                self.running, self.current_step, self.max_num_scheduled_tokens, places
            )
        if seen is None or is_stuck:
            running = [state.views[request.request_id] for request in self.running]
            calls = with_adapters(state.queue.online, running, state.max_loras)
            state.queue.expose([view.handle for view in calls])
        else:
            self._apply(plan_step(policy, seen, state), seen)

    def _set_order(self, *, is_planned: bool) -> None:
        """Which of its own rules vLLM follows in this step.

        In a planned one its victim is the tail of `running`, which is offline work, and the plan
        sees to it that a prompt finds its blocks, some of them while it is computed.
        """
        config = self.scheduler_config
        self.policy = SchedulingPolicy.FCFS if is_planned else SchedulingPolicy(config.policy)
        self.scheduler_reserve_full_isl = not is_planned and config.scheduler_reserve_full_isl

    def _apply(self, plan: Plan, seen: EngineView) -> None:
        """Make vLLM's own queues say what the plan says."""
        for view in plan.preempt:
            preempt(self, view.handle)
        self.plan = plan
        self.running = running_order(plan, seen)
        self.state.queue.expose([view.handle for view in plan.admit])
        with self.state.surviving:
            self.view_builder.note_admissions(plan.admit)

    def _note(self, output: SchedulerOutput) -> None:
        """A step was handed to the engine."""
        state, now_s = self.state, self.state.clock()
        load = scheduled_load(output, self.plan.load, self.requests)
        predicted_s = state.estimates.predict_s(load)
        state.steps.scheduled(load, predicted_s, now_s)
        self.daemon_link.note(output, predicted_s, now_s)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Note when the step ended and who got a first token."""
        state, now_s = self.state, self.state.clock()
        with state.surviving:
            self._note_end(now_s)
        self._begun_turns.clear()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        while state.queue.added_again:
            session = state.queue.added_again.pop()
            if session.request_id in self.requests and session not in state.queue:
                self._enqueue_waiting_request(session)
        if not self.requests:
            state.steps.fell_idle()
        with state.surviving:
            self._note_tokens(outputs, now_s)
        return outputs

    def _note_end(self, now_s: float) -> None:
        state = self.state
        ended = state.steps.ended(now_s)
        self.daemon_link.meter.ended(now_s)
        if ended is not None:
            load, seconds, predicted_s = ended
            self.daemon_link.meter.timed(load.num_tokens, predicted_s, seconds)
            if self._recorder is None:
                state.estimates.observe(load, seconds)
                if not state.num_offline:
                    state.estimates.observe_alone(load, seconds, now_s)
            else:
                self._recorder.add(load, seconds, state.steps.gap)

    def _note_last(self, request: Request) -> None:
        """An answer has ended outside the engine, with the token that it got last."""
        view, now_s = self.state.views.get(request.request_id), self.state.clock()
        if view is not None and view.request_class is RequestClass.ONLINE:
            self.state.got_token(view, now_s, is_last=True)
            self.daemon_link.meter.costs.token(view, now_s, is_last=True)

    def _note_tokens(self, outputs: Mapping[int, EngineCoreOutputs], now_s: float) -> None:
        views, meter = self.state.views, self.daemon_link.meter
        for batch in outputs.values():
            for output in batch.outputs:
                view = views.get(output.request_id) or meter.ending.get(output.request_id)
                if view is None or not output.new_token_ids:
                    continue
                if output.request_id in self._begun_turns:
                    continue  # The last token of the turn before.
                # It may be waiting: a preempted request still gets the tokens that were in flight.
                view.num_tokens = view.handle.num_tokens
                if view.request_class is RequestClass.ONLINE:
                    meter.tokens(view, now_s, len(output.new_token_ids))
                    self.state.got_token(view, now_s, is_last=output.finished)
                if view.first_token_at_s is None:
                    view.first_token_at_s = now_s
