"""`ColocatedScheduler`: plan each step, then let vLLM schedule it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from batchrun.errors import BatchrunError
from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import AnyModel
from batchrun.hints import FlexHint, Hint, RowHint
from batchrun.scheduling.policies import Policy, make_policy
from batchrun.scheduling.view import RequestView
from batchrun.types import RequestClass
from batchrun.vllm_plugin.control import Steering, names_channel
from batchrun.vllm_plugin.estimates import (
    Estimates,
    StepClock,
    StepRecorder,
    engine_facts,
    read_models,
    scheduled_load,
)
from batchrun.vllm_plugin.hints import HintReader
from batchrun.vllm_plugin.kv_cache import KvTiers
from batchrun.vllm_plugin.plan_queue import PlanQueue
from batchrun.vllm_plugin.planner import Lookout, Planner, begin_turn, make_view, stand_behind
from batchrun.vllm_plugin.self_test import check_plans_are_obeyed
from batchrun.vllm_plugin.settings import check_combinations, read_nonce, read_settings

log = logging.getLogger(__name__)


class ColocatedScheduler(AsyncScheduler):
    """vLLM's scheduler with a plan for each step (design 6.1; `vllm-notes.md` 1 gives the shape).

    Online and offline requests share the engine: a policy decides who is admitted, preempted and
    how many tokens each may get; vLLM's own `schedule` stays the mechanism. `clock` returns
    monotonic seconds and `wall_offset_s` turns vLLM's wall-clock arrivals into them.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **kwargs: Any
    ) -> None:
        self.batchrun = read_settings(vllm_config.additional_config)
        policy = make_policy(self.batchrun.policy)
        has_channel = self.batchrun.channel and names_channel()
        refusal: str | None = None
        if policy is not None or has_channel:
            try:
                check_combinations(vllm_config)
                check_plans_are_obeyed(type(self), vllm_config, kv_cache_config, kwargs)
            except BatchrunError as error:
                if policy is not None:
                    raise
                refusal = str(error)
        super().__init__(vllm_config, kv_cache_config, **kwargs)
        self.wall_offset_s = time.time() - time.monotonic()
        self.hints = HintReader(read_nonce())
        self.planner = Planner(self)
        self._views: dict[str, RequestView] = {}
        self._pool = PlanQueue(self._views)
        self.lookout = Lookout(self)
        self._steps = StepClock()
        self._num_offline = 0
        self._total_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        facts = engine_facts(self.vllm_config, self._total_blocks)
        calibrated = read_models(self.batchrun.profile, facts.engine)
        self._estimates = Estimates(self.batchrun, self._total_blocks, calibrated)
        recorded_to = self.batchrun.record_steps
        self._recorder = None if recorded_to is None else StepRecorder(recorded_to, facts)
        self._kv: KvTiers | None = None
        if policy is not None:
            self.take_over(policy)
        self.steering = Steering(self, self.hints.nonce, refusal)
        if has_channel:
            self.steering.open()

    def take_over(self, policy: Policy) -> None:
        """Plan with `policy`, in our queue, with our cap hook and tiers. Between two steps."""
        self.planner.policy = policy
        if self.waiting is not self._pool:
            waiting = list(self.waiting)
            self.waiting = self._pool
            for request in waiting:
                self._pool.add_request(request)
                self._defer(request)
        self.need_mamba_block_aligned_split = True
        if self._kv is None and self.cache_config.enable_prefix_caching:
            self._kv = KvTiers(self.kv_cache_manager, self.batchrun.eviction)
            for view in self._views.values():
                if view.request_class is RequestClass.OFFLINE:
                    self._announce(view.handle, self.hints.read(view.handle))

    def hand_back(self) -> None:
        """Let vLLM's own order rule again, in its own queue. The tiers stay. Between two steps."""
        self.planner.stop()
        waiting = sorted(self.waiting, key=attrgetter("arrival_time"))
        self.waiting.remove_requests(waiting)
        self.deferred_waiting.difference_update(waiting)
        self.waiting = create_request_queue(self.policy)
        for request in waiting:
            self.waiting.add_request(request)

    def shutdown(self) -> None:
        """Close the channel, then what vLLM has."""
        self.steering.close()
        super().shutdown()

    def warm_up(
        self, kv_samples: Iterable[tuple[float, int]], steps: Iterable[tuple[StepLoad, float]]
    ) -> None:
        """Take in what was observed of this engine before: see `Estimates.warm_up`."""
        self._estimates.warm_up(kv_samples, steps)

    def believe(self, models: Sequence[AnyModel]) -> None:
        """Start from these models, the best first, as from those of a profile. Before any step."""
        self._estimates = Estimates(self.batchrun, self._total_blocks, models)

    def add_request(self, request: Request) -> None:
        """Take a request in, as online work unless a hint says otherwise."""
        if request.request_id not in self.requests:
            arrival_at_s = request.arrival_time - self.wall_offset_s
            hint = self.hints.read(request)
            view = make_view(request, hint, self.batchrun.slo, arrival_at_s)
            if isinstance(hint, FlexHint):
                stand_behind(view, self._views.values())
            self._views[request.request_id] = view
            self._num_offline += view.is_offline
            self.steering.arrived(view, hint)
            self._announce(request, hint)
        super().add_request(request)
        self._defer(request)

    def _announce(self, request: Request, hint: Hint | None) -> None:
        if isinstance(hint, RowHint) and self._kv is not None:
            self._kv.announce(request, hint, self.clock())

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """A streaming session's next input has come: a turn with bounds of its own."""
        waits = session in self._pool
        if waits:
            self._pool.remove_request(session)
        super()._update_request_as_session(session, update)
        begin_turn(self._views[session.request_id], session, self.wall_offset_s)
        if waits:
            self._pool.add_request(session)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """The one place where a request ends."""
        view = self._views.pop(request.request_id, None)
        if view is not None:
            self._num_offline -= view.is_offline
            self.steering.left(view)
        self.lookout.forget(request.request_id)
        if self._kv is None:
            return super()._free_request(request, *args, **kwargs)
        self._kv.finished(request)
        with self._kv.freeing(is_online=view is None or not view.is_offline):
            return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        view = self._views.get(request.request_id)
        if view is not None:
            self.steering.meter.preempted(view, self.clock())
        is_online = view is None or not view.is_offline
        with nullcontext() if self._kv is None else self._kv.freeing(is_online=is_online):
            super()._preempt_request(request, *args, **kwargs)
        self.lookout.forget(request.request_id)
        # Runner V1 would otherwise miss the tokens of a request that comes back at once.
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        self._defer(request)

    def _defer(self, request: Request) -> None:
        """Count a waiting offline request as deferred: no gauge takes it for missing capacity."""
        if self.planner.policy is None or request.status == RequestStatus.RUNNING:
            return
        view = self._views.get(request.request_id)
        if view is not None and view.request_class is RequestClass.OFFLINE:
            self.deferred_waiting.add(request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """After a reset no block has a hash: the tiers begin anew."""
        is_reset = super().reset_prefix_cache(*args, **kwargs)
        self.lookout.forget_hits()
        if is_reset and self._kv is not None:
            self._kv.rebuild()
        return is_reset

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """The first per-request point in vLLM's loops: where a plan's caps go in."""
        cap = self.planner.caps.get(request.request_id)
        capped = num_new_tokens if cap is None else min(cap, num_new_tokens)
        if not self.planner.is_mamba or not capped:
            return capped
        align = super()._mamba_block_aligned_split
        aligned = align(request, capped, *args, **kwargs)
        if aligned:
            return aligned
        # A state is kept at block boundaries only: the smallest chunk goes to the next one.
        block = min(self.cache_config.block_size, num_new_tokens)
        return align(request, block, *args, **kwargs)

    # The signature is vLLM's.
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:  # noqa: FBT001, FBT002
        """Plan the step, apply the plan, let vLLM schedule it."""
        self.steering.obey()
        self.planner.begin_step(has_offline=self._num_offline > 0)
        output = super().schedule(throttle_prefills)
        self._pool.expose(())
        now_s = self.clock()
        load = scheduled_load(output, self.planner.load, self.requests)
        self._steps.scheduled(load, self._estimates.predict_s(load), now_s)
        self.steering.note(output, now_s)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Note when the step ended and who got a first token."""
        now_s = self.clock()
        ended = self._steps.ended(now_s)
        self.steering.meter.ended()
        if ended is not None:
            load, seconds, predicted_s = ended
            self.steering.meter.timed(predicted_s, seconds)
            if self._recorder is None:
                self._estimates.observe(load, seconds)
            else:
                self._recorder.add(load, seconds, self._steps.gap)
        views, ending = self._views, self.steering.meter.ending
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not self.requests:
            self._steps.fell_idle()
        for batch in outputs.values():
            for output in batch.outputs:
                view = views.get(output.request_id) or ending.get(output.request_id)
                if view is None or not output.new_token_ids:
                    continue
                # It may be waiting: a preempted request still gets the tokens that were in flight.
                view.num_tokens = view.handle.num_tokens
                if view.request_class is RequestClass.ONLINE:
                    self.steering.meter.token(view, now_s)
                if view.first_token_at_s is None:
                    view.first_token_at_s = now_s
        return outputs
