"""One run: a scheduler class through a scenario."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.scheduler import Scheduler

from batchrun.vllm_plugin.virtual.engine import DEFAULT_TIMING, Timing, TrafficSource, VirtualEngine
from batchrun.vllm_plugin.virtual.laws import A100Law, StepLaw
from batchrun.vllm_plugin.virtual.metrics import Slo, summarize
from batchrun.vllm_plugin.virtual.setup import EngineShape
from batchrun.vllm_plugin.virtual.warmup import Learner, WarmUp
from batchrun.vllm_plugin.virtual.workload import Scenario


@dataclass(frozen=True, slots=True)
class Run:
    """What to run. `sources` are used up by it; a noisy `law` goes on drawing.

    `warm_up` is for a scheduler that learns; stock vLLM has no use for it.
    """

    scheduler_cls: type[Scheduler]
    scenario: Scenario
    shape: EngineShape
    sources: Sequence[TrafficSource]
    law: StepLaw = field(default_factory=A100Law)
    timing: Timing = DEFAULT_TIMING
    warm_up: WarmUp | None = None


def run(plan: Run) -> dict[str, object]:
    """The figures of the scenario's duration, with its name, the engine's shape and the SLOs."""
    engine = VirtualEngine(plan.scheduler_cls, plan.shape, plan.law, plan.sources, plan.timing)
    if plan.warm_up is not None and isinstance(engine.scheduler, Learner):
        engine.scheduler.warm_up(plan.warm_up.kv_samples, plan.warm_up.steps)
    # Long prompts are lists that every full collection would walk; none of them is garbage.
    gc.collect()
    gc.freeze()
    try:
        engine.run_until(plan.scenario.duration_s)
    finally:
        gc.unfreeze()
    scenario = plan.scenario
    figures = summarize(engine, Slo(scenario.slo_ttft_s, scenario.slo_tpot_s))
    return {
        "scenario": scenario.name,
        "blocks": plan.shape.num_blocks,
        "budget": plan.shape.token_budget,
        "steps_in_flight": plan.timing.steps_in_flight,
        **figures,
    }
