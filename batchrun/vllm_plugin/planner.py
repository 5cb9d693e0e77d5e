"""The plan of each step: asked of a policy, then said in vLLM's own terms."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy

from batchrun.estimator import StepLoad
from batchrun.scheduling import EngineView, Plan, Policy

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
