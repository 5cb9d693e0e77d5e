"""What an engine has learnt before a run: its online traffic, and how long steps take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from batchrun.estimator import StepLoad
from batchrun.vllm_plugin.virtual.engine import TrafficSource, VirtualEngine
from batchrun.vllm_plugin.virtual.feeder import DAEMON_WINDOW, JobFeeder, OnlineSource
from batchrun.vllm_plugin.virtual.laws import StepItem, StepLaw
from batchrun.vllm_plugin.virtual.setup import EngineShape, stock_scheduler
from batchrun.vllm_plugin.virtual.workload import (
    Order,
    Scenario,
    draw_calls,
    draw_job,
    planned_order,
)

OFFLINE_S = 60.0
KEPT_STEPS = 4_000
SEED_OFFSET = 1_000
"""The warm-up draws from the scenario's generators, but never the run's own requests."""


@dataclass(frozen=True, slots=True, eq=False)
class WarmUp:
    """Observations that end where a run's clock begins, at 0.

    `kv_samples` are (instant in seconds, blocks held by online requests), oldest first: the
    highest use in each second. `steps` are what was computed and the seconds that it took.
    """

    kv_samples: Sequence[tuple[float, int]]
    steps: Sequence[tuple[StepLoad, float]]

    def without_online_use(self) -> WarmUp:
        """The same for an engine that served nobody in that time."""
        return replace(self, kv_samples=[(at_s, 0) for at_s, _ in self.kv_samples])


@runtime_checkable
class Learner(Protocol):
    """A scheduler that takes earlier observations in."""

    def warm_up(
        self, kv_samples: Iterable[tuple[float, int]], steps: Iterable[tuple[StepLoad, float]]
    ) -> None:
        """See `WarmUp`."""
        ...


def observe(
    scenario: Scenario, seed: int, shape: EngineShape, law: StepLaw, *, online_s: float
) -> WarmUp:
    """Watch stock vLLM: a minute of offline work alone, then `online_s` of the online traffic.

    Keeps the last `KEPT_STEPS` steps of each. Takes about 1 s per virtual minute on one core.
    """
    seed += SEED_OFFSET
    job = planned_order(draw_job(scenario.job, seed, Order.SHUFFLED))
    offline = _Watch(JobFeeder(job, window=DAEMON_WINDOW), shape, law)
    offline.run_until(OFFLINE_S)
    calls = draw_calls(replace(scenario, duration_s=online_s), seed)
    online = _Watch(OnlineSource(calls, seed), shape, law)
    online.run_until(online_s)
    return WarmUp(
        [(second - online_s, blocks) for second, blocks in enumerate(online.max_blocks)],
        [*offline.steps, *online.steps],
    )


class _Watch:
    """Runs stock vLLM and notes its steps, and the most blocks held in each second."""

    def __init__(self, source: TrafficSource, shape: EngineShape, law: StepLaw) -> None:
        watched = _WatchedLaw(law)
        self.steps = watched.steps
        self.max_blocks: list[int] = []
        self._block_tokens = shape.block_tokens
        self._engine = VirtualEngine(stock_scheduler(2), shape, watched, [source])
        self._source = source

    def run_until(self, end_s: float) -> None:
        engine, source = self._engine, self._source
        while engine.now_s < end_s:
            if not engine.step():
                engine.now_s = min(max(engine.now_s, source.next_due_s), end_s)
            self._sample(int(min(engine.now_s, end_s - 1)))

    def _sample(self, second: int) -> None:
        blocks, size = 0, self._block_tokens
        for request in self._engine.scheduler.running:
            blocks += -(-request.num_computed_tokens // size)
        while len(self.max_blocks) <= second:
            self.max_blocks.append(blocks)
        self.max_blocks[second] = max(self.max_blocks[second], blocks)


class _WatchedLaw:
    """A law whose durations are noted, as an engine measures them."""

    def __init__(self, law: StepLaw) -> None:
        self._law = law
        self.steps: deque[tuple[StepLoad, float]] = deque(maxlen=KEPT_STEPS)

    @property
    def expected(self) -> StepLaw:
        return self._law.expected

    def step_s(self, items: Sequence[StepItem]) -> float:
        seconds = self._law.step_s(items)
        self.steps.append((StepLoad.of(items), seconds))
        return seconds
