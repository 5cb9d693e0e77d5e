"""One run: a scheduler class through a scenario."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.v1.core.sched.scheduler import Scheduler

from batchrun.vllm_plugin.virtual.engine import DEFAULT_TIMING, Timing, TrafficSource, VirtualEngine
from batchrun.vllm_plugin.virtual.laws import A100Law, StepLaw
from batchrun.vllm_plugin.virtual.metrics import Slo, online_percentiles, summarize
from batchrun.vllm_plugin.virtual.setup import EngineShape
from batchrun.vllm_plugin.virtual.timeline import Timeline
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
    engine = _build(plan)
    with _frozen_heap():
        engine.run_until(plan.scenario.duration_s)
    return _figures(plan, engine)


def run_watched(plan: Run) -> tuple[dict[str, object], dict[str, object]]:
    """The same figures, and the series of the run: the columns of a `Timeline` sampled once per
    virtual second, its `total_blocks`, and the percentiles of online latency."""
    engine = _build(plan)
    timeline = Timeline(engine, plan.warm_up.kv_samples if plan.warm_up else ())
    duration_s = plan.scenario.duration_s
    with _frozen_heap():
        for second in range(1, math.ceil(duration_s) + 1):
            engine.run_until(min(second, duration_s))
            timeline.sample()
    series = {
        "total_blocks": timeline.total_blocks,
        **timeline.columns,
        **online_percentiles(engine, _slo(plan.scenario)),
    }
    return _figures(plan, engine), series


def _build(plan: Run) -> VirtualEngine:
    engine = VirtualEngine(plan.scheduler_cls, plan.shape, plan.law, plan.sources, plan.timing)
    if plan.warm_up is not None and isinstance(engine.scheduler, Learner):
        engine.scheduler.warm_up(plan.warm_up.kv_samples, plan.warm_up.steps)
    return engine


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Long prompts are lists that every full collection would walk; none of them is garbage."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _slo(scenario: Scenario) -> Slo:
    return Slo(scenario.slo_ttft_s, scenario.slo_tpot_s)


def _figures(plan: Run, engine: VirtualEngine) -> dict[str, object]:
    return {
        "scenario": plan.scenario.name,
        "blocks": plan.shape.num_blocks,
        "budget": plan.shape.token_budget,
        "steps_in_flight": plan.timing.steps_in_flight,
        **summarize(engine, _slo(plan.scenario)),
    }
