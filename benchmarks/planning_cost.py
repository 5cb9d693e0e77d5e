"""What a plan costs: our `schedule()` beside vLLM's own on the same admitted set, step by step.

    python -m benchmarks.planning_cost [--steps N] [--json FILE]

`echo` drives a virtual engine. In every step vLLM's own scheduler, a second one with requests of
its own, is told what was admitted, preempted and capped, and schedules the same. The two calls are
timed one right after the other, so that whatever else the machine does hits both; their difference
is the planning. Times do not repeat exactly; what is planned does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any, cast

from batchrun.simulator.offline_jobs import JobShape, LogNormalTokens
from batchrun.simulator.online import OnlineTraffic
from batchrun.simulator.virtual.engine import Arrival, TrafficSource, VirtualEngine, begin
from batchrun.simulator.virtual.setup import (
    A100Law,
    EngineShape,
    StepLaw,
    build_scheduler,
    stock_scheduler,
)
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.ablation_runs import Record
from benchmarks.records import describe, finish, parser
from benchmarks.row_feeds import RowSource, callers, planned_order
from benchmarks.scenarios import Order, Scenario, a100_8b, draw_calls, draw_job
from benchmarks.warm_up import observe


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


NUM_ROWS = 256 + 512
"""Running and waiting."""
WINDOW = 256
"""Rows in the engine of the reference scenario."""
WARM_UP_S = 300.0
FULL_RUNNING, FULL_CANDIDATES = 240, 480
"""Steps with fewer running or waiting requests than these do not count as full."""


@dataclass(frozen=True, slots=True)
class Load:
    """A scenario with the rows that are in the engine at once, and the engine."""

    name: str
    scenario: Scenario
    num_rows: int
    shape: EngineShape
    is_full: bool


def loads() -> Iterator[Load]:
    """256 running and 512 waiting requests, of short documents and of long ones; and the reference
    scenario as it is."""
    online = OnlineTraffic(
        rate_per_s=6.0,
        burst_factor=1.0,
        burst_length_s=8.0,
        burst_period_s=90.0,
        prompt=LogNormalTokens(5.3, 1.0, (8, 2000)),
        output=LogNormalTokens(5.0, 0.8, (4, 800)),
    )
    short = JobShape(1_000, (200, 800), (6, 18), (15, 60), (100, 400))
    long = JobShape(120, (8_000, 28_000), (30, 60), (15, 60), (100, 400))
    settings = {"batchrun": {"slo": {"ttft_s": 60.0, "tpot_s": 2.0}}}
    shape = EngineShape(num_blocks=40_000, additional_config={"batchrun": {}})
    loose = EngineShape(num_blocks=120_000, additional_config=settings)
    yield Load("full-short", Scenario("full-short", 600.0, online, short), NUM_ROWS, shape, True)
    yield Load("full-long", Scenario("full-long", 600.0, online, long), NUM_ROWS, loose, True)
    yield Load("a100-8b", a100_8b(), WINDOW, EngineShape(additional_config={"batchrun": {}}), False)


def measure(load: Load, num_steps: int) -> Record:
    """The cost in the first `num_steps` steps that count."""
    scenario = load.scenario
    law = A100Law()
    job = planned_order(draw_job(scenario.job, 0, Order.SHUFFLED))
    sources: list[TrafficSource] = [
        callers(draw_calls(scenario, 0), 0),
        RowSource(job, load.num_rows),
    ]
    engine = PairedEngine(load.shape, law, sources)
    warm_up = observe(scenario, 0, load.shape, law, online_s=WARM_UP_S)
    warm_up.tell(engine.ours)
    pairs: list[Pair] = []
    steps_s: list[float] = []
    while len(pairs) < num_steps and engine.now_s < scenario.duration_s:
        busy_s = engine.totals.busy_s
        engine.step()
        for pair in engine.ours.take_pairs():
            if not load.is_full or is_full(pair):
                pairs.append(pair)
                steps_s.append(engine.totals.busy_s - busy_s)
    return {"load": load.name, **figures(pairs, steps_s)}


def is_full(pair: Pair) -> bool:
    """Whether about 256 requests run and about 512 wait."""
    return pair.num_running >= FULL_RUNNING and pair.num_waiting >= FULL_CANDIDATES


def figures(pairs: Sequence[Pair], steps_s: Sequence[float]) -> Record:
    """Medians over the steps; the share is that of each step's virtual time. Planning is the
    difference of a pair, by the wall and by CPU time, which other programs disturb less."""
    wall_ms = [1e3 * (pair.ours.wall_s - pair.stock.wall_s) for pair in pairs]
    cpu_ms = [1e3 * (pair.ours.cpu_s - pair.stock.cpu_s) for pair in pairs]
    return {
        "steps": len(pairs),
        "running": median(pair.num_running for pair in pairs),
        "candidates": median(pair.num_waiting for pair in pairs),
        "step_ms": 1e3 * median(steps_s),
        "ours_ms": 1e3 * median(pair.ours.wall_s for pair in pairs),
        "stock_ms": 1e3 * median(pair.stock.wall_s for pair in pairs),
        "planning_ms": median(wall_ms),
        "planning_cpu_ms": median(cpu_ms),
        "planning_cpu_p90_ms": quantiles(cpu_ms, n=10)[-1],
        "planning_step_share": median(
            ms / 1e3 / step_s for ms, step_s in zip(wall_ms, steps_s, strict=True)
        ),
    }


def main() -> int:
    """Measure, print, save."""
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=1_500)
    options = made.parse_args()
    records = []
    for load in loads():
        record = measure(load, options.steps)
        records.append(record)
        print(describe(record), flush=True)
    return finish(options.json, records)


if __name__ == "__main__":
    raise SystemExit(main())
