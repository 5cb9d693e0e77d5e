"""What an engine has learnt before a run: its online traffic, and how long steps take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchrun.config import STOCK_POLICY
from batchrun.estimator.step_load import StepLoad
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import OfflineJob
from batchrun.simulator.online import Calls
from batchrun.simulator.simulation import Simulation, SimulationPlan
from batchrun.simulator.virtual.setup import EngineShape, StepItem, StepLaw
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.row_feeds import drawn_job
from benchmarks.scenarios import Order, Scenario, draw_calls, draw_job

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

    def tell(self, scheduler: object) -> None:
        """Let a scheduler start from it; stock vLLM has no use for it."""
        if isinstance(scheduler, ColocatedScheduler):
            scheduler.warm_up(self.kv_samples, self.steps)


def observe(
    scenario: Scenario, seed: int, shape: EngineShape, law: StepLaw, *, online_s: float
) -> WarmUp:
    """Watch stock vLLM: a minute of offline work alone, then `online_s` of the online traffic.

    Keeps the last `KEPT_STEPS` steps of each. Takes about 1 s per virtual minute on one core.
    """
    seed += SEED_OFFSET
    job = drawn_job(draw_job(scenario.job, seed, Order.SHUFFLED))
    offline = _Watch(shape, law, Calls.of([]), [job], OFFLINE_S)
    calls = Calls.of(draw_calls(replace(scenario, duration_s=online_s), seed))
    online = _Watch(shape, law, calls, [], online_s)
    return WarmUp(
        [(second - online_s, blocks) for second, blocks in enumerate(online.max_blocks)],
        [*offline.steps, *online.steps],
    )


class _Watch:
    """Runs stock vLLM and notes its steps, and the most blocks held in each second."""

    def __init__(
        self,
        shape: EngineShape,
        law: StepLaw,
        calls: Calls,
        jobs: Sequence[OfflineJob],
        end_s: float,
    ) -> None:
        watched = _WatchedLaw(law)
        self.steps = watched.steps
        self.max_blocks: list[int] = []
        self._end_s = end_s
        self._block_tokens = shape.block_tokens
        plan = EnginePlan(shape, STOCK_POLICY, law=watched)
        engines = Simulation(SimulationPlan(end_s, calls, jobs, engine=plan)).engines
        self._engine = engines.engines[0]
        engines.after_step = self._sample
        engines.run_until(end_s)

    def _sample(self, index: int) -> None:
        second = int(min(self._engine.now_s, self._end_s - 1))
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
