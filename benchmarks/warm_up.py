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
LONGEST_CALL_S = 400.0
"""Of calls that came later than so long before the end, the lengths are not known yet."""
SEED_OFFSET = 1_000
"""The warm-up draws from the scenario's generators, but never the run's own requests."""


@dataclass(frozen=True, slots=True, eq=False)
class WarmUp:
    """Observations that end where a run's clock begins, at 0.

    `kv_samples` are (instant in seconds, blocks held by online requests), oldest first: the
    highest use in each second. `steps` are what was computed and the seconds that it took. `calls`
    are (arrival, tokens of the answer); those that came last may not have ended.
    """

    kv_samples: Sequence[tuple[float, int]]
    steps: Sequence[tuple[StepLoad, float]]
    calls: Sequence[tuple[float, int]]

    def without_online_use(self) -> WarmUp:
        """The same for an engine that served nobody in that time."""
        return replace(self, kv_samples=[(at_s, 0) for at_s, _ in self.kv_samples], calls=())

    def tell(self, scheduler: object) -> None:
        """Let a scheduler start from it; stock vLLM has no use for it."""
        if isinstance(scheduler, ColocatedScheduler):
            estimates = scheduler.state.estimates
            for at_s, blocks in self.kv_samples:
                estimates.sample(at_s, blocks)
            for load, step_s in self.steps:
                estimates.observe(load, step_s)
            for at_s, num_tokens in self.calls:
                scheduler.state.calls.begun(at_s)
                if at_s < -LONGEST_CALL_S:
                    scheduler.state.calls.ended(num_tokens)


def observe(
    scenario: Scenario, seed: int, shape: EngineShape, law: StepLaw, *, online_s: float
) -> WarmUp:
    """Watch stock vLLM: a minute of offline work alone, then `online_s` of the online traffic.

    Keeps the last `KEPT_STEPS` steps of each. Takes about 1 s per virtual minute on one core.
    """
    seed += SEED_OFFSET
    job = drawn_job(draw_job(scenario.job, seed, Order.SHUFFLED))
    engine = EnginePlan(shape, STOCK_POLICY, law=law)
    offline = _Watch(engine, Calls.of([]), [job], OFFLINE_S)
    drawn = draw_calls(replace(scenario, duration_s=online_s), seed)
    online = _Watch(engine, Calls.of(drawn), [], online_s)
    return WarmUp(
        [(second - online_s, blocks) for second, blocks in enumerate(online.max_blocks)],
        [*offline.steps, *online.steps],
        [(call.arrival_at_s - online_s, call.num_output_tokens) for call in drawn],
    )


class _Watch:
    """Runs stock vLLM and notes its steps, and the most blocks held in each second."""

    def __init__(
        self, engine: EnginePlan, calls: Calls, jobs: Sequence[OfflineJob], end_s: float
    ) -> None:
        self.steps: deque[tuple[StepLoad, float]] = deque(maxlen=KEPT_STEPS)
        self.max_blocks: list[int] = []
        self._end_s = end_s
        self._block_tokens = engine.shape.block_tokens
        engines = Simulation(SimulationPlan(end_s, calls, jobs, engine=engine)).engines
        self._engine = engines.engines[0]
        self._engine.step_listener = self._note
        engines.after_step = self._sample
        engines.run_until(end_s)

    def _note(
        self, start_s: float, duration_s: float, online: list[StepItem], offline: list[StepItem]
    ) -> None:
        self.steps.append((StepLoad.of(online + offline), duration_s))

    def _sample(self, index: int) -> None:
        second = int(min(self._engine.now_s, self._end_s - 1))
        size = self._block_tokens
        running = self._engine.scheduler.running
        blocks = sum(-(-request.num_computed_tokens // size) for request in running)
        while len(self.max_blocks) <= second:
            self.max_blocks.append(blocks)
        self.max_blocks[second] = max(self.max_blocks[second], blocks)
