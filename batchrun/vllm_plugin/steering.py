"""The daemon's hand inside the engine: its orders are obeyed, and it is told how things stand."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput

from batchrun.last_steps import SUFFIX, LastSteps, make_label
from batchrun.scheduling import RequestView, make_policy
from batchrun.types import RequestClass
from batchrun.vllm_plugin.channel import INTERVAL_S, EngineChannel, open_channel
from batchrun.vllm_plugin.control import Control, InForce
from batchrun.vllm_plugin.hints import AnyHint, Hint
from batchrun.vllm_plugin.meter import Meter
from batchrun.vllm_plugin.telemetry import Reporter
from batchrun.wire import CHANNEL_VARIABLE, KvTelemetry, Orders, Telemetry

if TYPE_CHECKING:
    from batchrun.vllm_plugin.scheduler import ColocatedScheduler

log = logging.getLogger(__name__)


class Steering:
    """What the daemon sees and changes of one scheduler, which calls it around each step."""

    def __init__(self, scheduler: ColocatedScheduler, nonce: str, refusal: str | None) -> None:
        """`refusal`: why this engine cannot be planned, if it cannot."""
        self._scheduler = scheduler
        self._planned_as: str = scheduler.batchrun.policy
        self._channel: EngineChannel | None = None
        self._last_steps: LastSteps | None = None
        self._labels: dict[str, bytes] = {}
        self._report_at_s = float("-inf")
        started = InForce(scheduler.batchrun.policy, scheduler.max_num_scheduled_tokens)
        self.control = Control(started, scheduler.max_num_running_reqs, nonce, refusal)
        self.meter = Meter()

    def open(self) -> None:
        """Listen to the daemon from now on, and be heard by it."""
        self._channel = open_channel(self.control.receive)
        self._last_steps = _open_last_steps(self._scheduler.max_num_running_reqs)
        self._report(self._scheduler.clock())

    def close(self) -> None:
        """Nothing comes in or goes out any more."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._last_steps is not None:
            self._last_steps.close()
            self._last_steps = None

    def arrived(self, view: RequestView, hint: AnyHint | None) -> None:
        """A request has come in. Only rows of jobs can become suspects when the engine dies."""
        self.meter.arrived(view)
        if isinstance(hint, Hint):
            self._labels[view.request_id] = make_label(hint.job, hint.row)
        elif self.control.calls.is_on and view.request_class is RequestClass.ONLINE:
            arrived_at = view.arrival_at_s + self._scheduler.wall_offset_s
            self.control.calls.arrived(view.request_id, arrived_at)

    def left(self, view: RequestView) -> None:
        """A request has ended; the output of its last step may still be read."""
        self.meter.ending[view.request_id] = view
        self._labels.pop(view.request_id, None)
        if self.control.calls.is_on:
            lengths = view.num_prompt_tokens, view.handle.num_output_tokens
            self.control.calls.ended(view.request_id, *lengths)

    def obey(self) -> None:
        """Work by the orders that have come in since the last step. O(1) without any."""
        while (orders := self.control.take()) is not None:
            self._obey(*orders)

    def note(self, output: SchedulerOutput, now_s: float) -> None:
        """A step was scheduled: count it, and report if it is time or nothing is left to do."""
        scheduler = self._scheduler
        if self._last_steps is not None and output.total_num_scheduled_tokens:
            labels, scheduled = self._labels, output.num_scheduled_tokens
            self._last_steps.note(labels[name] for name in scheduled if name in labels)
        self.meter.scheduled(output, scheduler._views)
        self.meter.settle(now_s)
        if self._channel is not None and (now_s >= self._report_at_s or not scheduler.requests):
            self._report(now_s)

    def telemetry(self, now_s: float) -> Telemetry:
        """How things stand. O(requests)."""
        scheduler, in_force = self._scheduler, self.control.in_force
        known = Telemetry(
            start_id=self.meter.start_id,
            sent_at=now_s + scheduler.wall_offset_s,
            policy=in_force.policy,
            token_budget=in_force.token_budget,
            is_offline_on=in_force.is_offline_on,
            kv=KvTelemetry(
                reserve_blocks=scheduler._estimates.reserve_blocks(0),
                forecast_blocks=scheduler._estimates.forecast.forecast_blocks,
            ),
            num_malformed_hints=scheduler.hints.num_malformed,
            num_policy_errors=scheduler.planner.num_errors,
            num_malformed_orders=self.control.num_malformed,
        )
        reporter = Reporter(
            self.meter, scheduler._views, scheduler.kv_cache_manager, scheduler.block_size
        )
        return reporter.fill_in(known, now_s)

    def _report(self, now_s: float) -> None:
        if self._channel is not None:
            self._report_at_s = now_s + INTERVAL_S
            self._channel.publish(self.telemetry(now_s))

    def _obey(self, now: InForce, orders: Orders) -> None:
        scheduler = self._scheduler
        scheduler.max_num_scheduled_tokens = now.token_budget
        scheduler.planner.is_offline_on = now.is_offline_on
        # vLLM's own order knows no way to hold rows back.
        planned_as = "bs+e" if now.policy == "bs" and not now.is_offline_on else now.policy
        if planned_as != self._planned_as:
            self._planned_as = planned_as
            policy = make_policy(planned_as)
            if policy is None:
                scheduler.hand_back()
            else:
                scheduler.take_over(policy)
        if scheduler._kv is not None:
            scheduler._kv.renew(orders.epoch, orders.renew, scheduler.clock())
            for job in orders.forget:
                scheduler._kv.forget(job)


def _open_last_steps(max_rows: int) -> LastSteps | None:
    """The file beside the channel's sockets; None when it cannot be made there."""
    try:
        return LastSteps(Path(os.environ[CHANNEL_VARIABLE] + SUFFIX), max_rows)
    except OSError as error:
        log.warning("batchrun: what runs is not written down for the daemon: %s", error)
        return None
