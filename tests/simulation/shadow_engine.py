"""vLLM's engine loop on a virtual clock, around a scheduler and a `ShadowWorker`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shadow_worker import ShadowWorker
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput


@dataclass(slots=True)
class _Launched:
    output: SchedulerOutput
    result: ModelRunnerOutput
    end_s: float


class ShadowEngine:
    """`EngineCore.step_with_batch_queue` (vLLM 0.32) with `depth` steps in flight; 1: its `step`.

    `outputs` and `reasons` hold what every request got and how it ended. `before_update` is called
    where vLLM takes in the aborts that came during a step. `idle_steps` counts the steps in a row
    that computed nothing with nothing in flight, as far as the last one.
    """

    def __init__(self, scheduler: Scheduler, worker: ShadowWorker, depth: int) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.num_steps = 0
        self.idle_steps = 0
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.before_update: Callable[[], None] = lambda: None
        self._worker = worker
        self._depth = depth
        self._in_flight: deque[_Launched] = deque()
        self._worker_free_at_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether the loop would wait for input now."""
        return not self._in_flight and not self.scheduler.has_requests()

    def step(self) -> None:
        """One turn of the loop. A step takes 2 ms and 50 us per token; an empty one 1 ms."""
        if self.scheduler.has_requests():
            is_computing = self._launch()
            is_full = len(self._in_flight) >= self._depth
            if not is_full and (is_computing or self.scheduler.has_requests()):
                return
        elif not self._in_flight:
            return
        self._collect()

    def _launch(self) -> bool:
        is_alone = not self._in_flight
        output = self.scheduler.schedule()
        num_tokens = output.total_num_scheduled_tokens
        result = self._worker.execute(output)
        start_s = max(self.now_s, self._worker_free_at_s)
        self._worker_free_at_s = start_s + (0.002 + 50e-6 * num_tokens if num_tokens else 0.001)
        self._in_flight.append(_Launched(output, result, self._worker_free_at_s))
        self.num_steps += 1
        self.idle_steps = 0 if num_tokens or not is_alone else self.idle_steps + 1
        return num_tokens > 0

    def _collect(self) -> None:
        launched = self._in_flight.popleft()
        self.now_s = max(self.now_s, launched.end_s)
        self.before_update()
        by_client = self.scheduler.update_from_output(launched.output, launched.result)
        for outputs in by_client.values():
            for output in outputs.outputs:
                self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    assert output.request_id not in self.reasons
                    self.reasons[output.request_id] = str(output.finish_reason)
