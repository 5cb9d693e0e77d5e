"""Our scheduler with vLLM's own beside it, which is told our admissions and schedules the same."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from batchrun.simulator.virtual.engine import Arrival, TrafficSource, VirtualEngine, begin
from batchrun.simulator.virtual.laws import StepLaw
from batchrun.simulator.virtual.setup import EngineShape, build_scheduler, stock_scheduler
from batchrun.vllm_plugin.scheduler import ColocatedScheduler


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by the clock on the wall, and of this thread's CPU time."""

    wall_s: float
    cpu_s: float

    @classmethod
    def since(cls, begin: tuple[float, float]) -> Spent:
        """What has passed since `now()`."""
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        return cls(wall_s - begin[1], cpu_s - begin[0])


def now() -> tuple[float, float]:
    """The CPU clock and the wall clock."""
    return time.thread_time(), time.perf_counter()


@dataclass(frozen=True, slots=True)
class Pair:
    """One step: what both `schedule()` calls took, and how much there was to plan."""

    ours: Spent
    stock: Spent
    num_running: int
    num_waiting: int


class StockFollower:
    """vLLM's scheduler with no choice of its own: each step it gets what our plan admitted."""

    def __init__(self, shape: EngineShape) -> None:
        fcfs = replace(shape, policy="fcfs", additional_config={})
        scheduler = cast(Any, build_scheduler(stock_scheduler(2), fcfs, is_async=True))
        scheduler._mamba_block_aligned_split = self._cap
        self._scheduler = scheduler
        self._tokens: dict[str, int] = {}
        self._held: dict[str, Any] = {}
        self._in_flight: deque[Any] = deque()

    def hold(self, request: Any) -> None:
        """Keep a request of its own until it is admitted."""
        self._held[request.request_id] = request

    def preempt(self, request_ids: Sequence[str]) -> None:
        """Preempt as our plan did, and hold the requests again."""
        scheduler = self._scheduler
        for request_id in request_ids:
            request = scheduler.requests[request_id]
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic())
            scheduler.prev_step_scheduled_req_ids.discard(request_id)
            scheduler.waiting.remove_request(request)
            self._held[request_id] = request

    def admit(self, request_ids: Sequence[str]) -> None:
        """Let these wait, in this order, to be admitted in the next step."""
        scheduler = self._scheduler
        for request_id in request_ids:
            request = self._held.pop(request_id)
            if request_id in scheduler.requests:
                scheduler.waiting.add_request(request)
            else:
                scheduler.add_request(request)

    def schedule(self, running: Sequence[str], tokens: dict[str, int], *, is_capped: bool) -> Spent:
        """Schedule a step. Raises AssertionError if it is another one than ours."""
        scheduler = self._scheduler
        scheduler.running = [scheduler.requests[request_id] for request_id in running]
        scheduler.need_mamba_block_aligned_split = is_capped
        self._tokens = tokens
        begun = now()
        output = scheduler.schedule()
        spent = Spent.since(begun)
        assert output.num_scheduled_tokens == tokens, "vLLM scheduled another step than ours"
        self._in_flight.append(output)
        return spent

    def update(self, result: Any) -> None:
        """Process the output of the oldest step in flight."""
        self._scheduler.update_from_output(self._in_flight.popleft(), result)

    def _cap(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
        return min(num_new_tokens, self._tokens.get(request.request_id, 0))


class PairedScheduler(ColocatedScheduler):
    """Ours, timed against a follower. Without one it is just ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._follower: StockFollower | None = None
        self._preempted: list[str] = []
        self._pairs: list[Pair] = []
        super().__init__(*args, **kwargs)

    def follow(self, follower: StockFollower) -> None:
        """Time this follower from now on. Nothing has been added yet."""
        self._follower = follower

    def take_pairs(self) -> list[Pair]:
        """The pairs since the last call."""
        pairs, self._pairs = self._pairs, []
        return pairs

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._preempted.append(request.request_id)
        super()._preempt_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Ours, then the follower's."""
        follower = self._follower
        if follower is None:
            return super().schedule(*args, **kwargs)
        num_waiting = len(self.waiting)
        self._preempted = []
        begun = now()
        output = super().schedule(*args, **kwargs)
        ours = Spent.since(begun)
        tokens = output.num_scheduled_tokens
        came_in = {new.req_id for new in output.scheduled_new_reqs}
        came_in |= output.scheduled_cached_reqs.resumed_req_ids
        admitted = [r.request_id for r in self.running if r.request_id in came_in]
        before = [r.request_id for r in self.running if r.request_id not in came_in]
        is_capped = len(tokens) < len(self.running) or any(
            self.requests[request_id].is_prefill_chunk for request_id in tokens
        )
        follower.preempt(self._preempted)
        follower.admit(admitted)
        stock = follower.schedule(before, tokens, is_capped=is_capped)
        if tokens:
            self._pairs.append(Pair(ours, stock, len(self.running), num_waiting))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Both process the same output."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._follower is not None:
            self._follower.update(model_runner_output)
        return outputs


class PairedEngine(VirtualEngine):
    """A virtual engine of our scheduler in which vLLM's follows."""

    def __init__(self, shape: EngineShape, law: StepLaw, sources: Sequence[TrafficSource]) -> None:
        super().__init__(PairedScheduler, shape, law, sources)
        assert isinstance(self.scheduler, PairedScheduler)
        self.ours = self.scheduler
        self._block_tokens = shape.block_tokens
        self._follower = StockFollower(shape)
        self.ours.follow(self._follower)

    def add(self, arrival: Arrival) -> None:
        """Both get a request of their own."""
        self._follower.hold(begin(arrival, self._block_tokens).request)
        super().add(arrival)
