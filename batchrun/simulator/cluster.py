"""The engines of a simulation, each behind its API server, which takes one request after another.

Every engine has a clock of its own, and none is ahead of another by more than a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from batchrun.config import STOCK_POLICY
from batchrun.daemon.engine_link import RENEW_S
from batchrun.daemon.prices import prices_of, speed_of
from batchrun.estimator.step_time import AnyModel
from batchrun.hints import HINT_KEY
from batchrun.routing.engine_book import EngineTraits, Prices
from batchrun.simulator.feeding import EPOCH, RowFeed
from batchrun.simulator.online import OnlineRouter
from batchrun.simulator.virtual.engine import (
    Arrival,
    RequestRecord,
    Timing,
    TrafficSource,
    VirtualEngine,
)
from batchrun.simulator.virtual.quick_decode import QuickDecode, quick
from batchrun.simulator.virtual.setup import A100Law, EngineShape, StepLaw, stock_scheduler
from batchrun.vllm_plugin.scheduler import ColocatedScheduler


@dataclass(frozen=True, slots=True)
class FrontEndTimes:
    """What the server needs for a request, and beside that for each token of its prompt.

    `latency_s` passes for each, however many there are.
    """

    request_s: float = 0.0
    token_s: float = 0.0
    latency_s: float = 0.0

    def seconds(self, num_prompt_tokens: int) -> float:
        """For one request."""
        return self.request_s + self.token_s * num_prompt_tokens


class _Line:
    """Requests that are rendered and tokenized one after another."""

    def __init__(self, times: FrontEndTimes) -> None:
        self._times = times
        self._rendered: deque[tuple[float, Arrival]] = deque()
        self._free_at_s = 0.0

    @property
    def next_due_s(self) -> float:
        return self._rendered[0][0] if self._rendered else math.inf

    def add(self, arrival: Arrival) -> None:
        begin_s = max(self._free_at_s, arrival.arrival_at_s)
        self._free_at_s = begin_s + self._times.seconds(len(arrival.prompt_token_ids))
        self._rendered.append((self._free_at_s + self._times.latency_s, arrival))

    def take_due(self, now_s: float) -> Iterator[Arrival]:
        while self._rendered and self._rendered[0][0] <= now_s:
            yield self._rendered.popleft()[1]


class FrontEnd:
    """Hands requests on when they are rendered and tokenized: calls in the order of arrival, and
    beside them rows in theirs (`batchrun.engine.door`). What the few rows beside a call take of its
    process is left out.

    A `TrafficSource` of one engine. Waiting here counts as waiting: arrivals keep their instants.
    """

    def __init__(self, sources: Sequence[TrafficSource], times: FrontEndTimes) -> None:
        self._sources = sources
        self._calls = _Line(times)
        self._rows = _Line(times)

    @property
    def next_due_s(self) -> float:
        """When a request is rendered, or may come."""
        first_s = min(source.next_due_s for source in self._sources)
        return min(first_s, self._calls.next_due_s, self._rows.next_due_s)

    def take_due(self, now_s: float) -> list[Arrival]:
        """The requests rendered by now."""
        new = [arrival for source in self._sources for arrival in source.take_due(now_s)]
        for arrival in sorted(new, key=attrgetter("arrival_at_s")):
            (self._calls if arrival.is_online else self._rows).add(arrival)
        return [*self._calls.take_due(now_s), *self._rows.take_due(now_s)]

    def on_finished(self, request_id: str) -> None:
        """The sources want to know."""
        for source in self._sources:
            source.on_finished(request_id)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What an engine is, and how long its steps take.

    `policy` is a name of the scheduler's, or `vllm` for vLLM's own. `settings` are those of the
    plug-in beside it. `believed` are the models that the scheduler starts from; without any it
    starts cold and learns, as an engine without a profile does. `steps_one_by_one` leaves every
    step to vLLM itself, which changes nothing but the time that a simulation takes. `front_end` is
    what a request takes before it is in the engine; None: nothing.
    """

    shape: EngineShape = field(default_factory=EngineShape)
    policy: str = "echo"
    settings: Mapping[str, object] = field(default_factory=dict)
    law: StepLaw = field(default_factory=A100Law)
    timing: Timing = field(default_factory=Timing)
    believed: Sequence[AnyModel] = ()
    steps_one_by_one: bool = False
    front_end: FrontEndTimes | None = None

    @property
    def traits(self) -> EngineTraits:
        """What the gateway knows of such an engine; its speed where there is a profile."""
        shape = self.shape
        return EngineTraits(
            kv_tokens=(shape.num_blocks - 1) * shape.block_tokens,
            max_running=shape.max_num_seqs,
            budget_tokens=shape.token_budget,
            prices=prices_of(self.believed[0]) if self.believed else Prices(),
        )


class Engines:
    """Runs an engine for each plan side by side, fed by a gateway and a daemon.

    `after_step` is told of each engine that has moved, `at_end` of the record of each request that
    ended, its request still there; both get the engine's number.
    """

    def __init__(self, plans: Sequence[EnginePlan], router: OnlineRouter, feed: RowFeed) -> None:
        self.engines = [
            _engine(plan, [router.ports[index], feed.ports[index]])
            for index, plan in enumerate(plans)
        ]
        self.after_step: Callable[[int], None] = lambda index: None
        self.at_end: Callable[[int, RequestRecord], None] = lambda index, record: None
        self._router, self._feed = router, feed
        self._living = list(range(len(plans)))
        self._renew_at_s = [0.0] * len(plans)
        self._is_idle = [False] * len(plans)
        feed.num_running = self._num_running
        for slot, plan in zip(feed.assigner.slots, plans, strict=True):
            slot.load.first_speed = speed_of(plan.traits.prices)
        for index, engine in enumerate(self.engines):
            engine.start_listeners.append(partial(self._started, index))
            engine.end_listeners.append(partial(self._ended, index))

    @property
    def num_quick_steps(self) -> int:
        """Steps that only decoded, and took the short way."""
        schedulers = [engine.scheduler for engine in self.engines]
        return sum(each.num_quick_steps for each in schedulers if isinstance(each, QuickDecode))

    def run_until(self, end_s: float) -> None:
        """Run until every clock has reached `end_s` (infinity: until all work is done)."""
        engines, is_idle = self.engines, self._is_idle
        while True:
            index = min(self._living, key=lambda i: (engines[i].now_s, is_idle[i]))
            engine = engines[index]
            if engine.now_s >= end_s:
                return
            self._renew(index, engine)
            is_idle[index] = not engine.step()
            if is_idle[index] and not self._wake_later(index, end_s):
                return
            self.after_step(index)

    def lose(self, index: int) -> None:
        """The engine dies, and stays away: its rows go elsewhere, its calls are never answered."""
        self._living.remove(index)
        self._feed.lose(index)

    def _wake_later(self, index: int, end_s: float) -> bool:
        """Move the clock of an engine that has nothing to do; False when nobody ever will have."""
        engine = self.engines[index]
        busy_s = [self.engines[other].now_s for other in self._living if not self._is_idle[other]]
        wake_s = min(engine.next_due_s(), end_s, *busy_s)
        if wake_s == math.inf:
            return False
        engine.now_s = max(engine.now_s, wake_s)
        return True

    def _renew(self, index: int, engine: VirtualEngine) -> None:
        scheduler = engine.scheduler
        if engine.now_s < self._renew_at_s[index]:
            return
        self._renew_at_s[index] = engine.now_s + RENEW_S
        if isinstance(scheduler, ColocatedScheduler) and scheduler.state.kv is not None:
            scheduler.state.kv.renew(EPOCH, self._feed.running_jobs, engine.now_s)

    def _num_running(self, index: int) -> int:
        records = self.engines[index].records
        running = self.engines[index].scheduler.running
        return sum(not records[request.request_id].is_online for request in running)

    def _started(self, index: int, record: RequestRecord) -> None:
        if record.is_online:
            self._router.started(record.request_id, self.engines[index].now_s)

    def _ended(self, index: int, record: RequestRecord) -> None:
        self.at_end(index, record)
        now_s = self.engines[index].now_s
        if record.is_online:
            self._router.ended(record, now_s)
        else:
            self._feed.ended(record, now_s)


def _engine(plan: EnginePlan, sources: Sequence[TrafficSource]) -> VirtualEngine:
    is_stock = plan.policy == STOCK_POLICY
    scheduler_cls = stock_scheduler(plan.timing.steps_in_flight) if is_stock else ColocatedScheduler
    settings = {"policy": plan.policy, "channel": False, **plan.settings}
    shape = plan.shape if is_stock else replace(plan.shape, additional_config={HINT_KEY: settings})
    if plan.front_end is not None:
        sources = [FrontEnd(sources, plan.front_end)]
    engine = VirtualEngine(
        scheduler_cls if plan.steps_one_by_one else quick(scheduler_cls),
        shape,
        plan.law,
        sources,
        plan.timing,
        forgets_ended=True,
    )
    if plan.believed and isinstance(engine.scheduler, ColocatedScheduler):
        engine.scheduler.state.believe(plan.believed)
    return engine
