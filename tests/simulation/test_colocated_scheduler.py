"""`ColocatedScheduler` beside stock vLLM, and what it promises to both classes of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from batchrun.vllm_plugin.virtual import (
    A100Law,
    EngineShape,
    OnlineSource,
    Scenario,
    TrafficSource,
    VirtualEngine,
    a100_8b,
    draw_calls,
)
from batchrun.vllm_plugin.virtual.workload import JobShape

NUM_STEPS = 3_000
JOB_SHAPE = JobShape(40, (300, 3_000), (3, 8), (15, 60), (4, 32))
ONLINE = a100_8b().online

Signature = tuple[Any, ...]


def signature(output: SchedulerOutput) -> Signature:
    """All that a step tells the worker about requests, tokens and blocks, in order."""
    cached = output.scheduled_cached_reqs
    return (
        list(output.num_scheduled_tokens.items()),
        [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs],
        (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens),
        (cached.num_output_tokens, sorted(cached.resumed_req_ids)),
        sorted(output.finished_req_ids),
        sorted(output.preempted_req_ids or ()),
    )


def engine_of(
    scheduler_cls: type[Scheduler],
    sources: Sequence[TrafficSource],
    *,
    policy: str = "echo",
    **shape: Any,
) -> VirtualEngine:
    settings = {"batchrun": {"policy": policy, **shape.pop("settings", {})}}
    engine_shape = EngineShape(additional_config=settings, **shape)
    return VirtualEngine(scheduler_cls, engine_shape, A100Law(), sources)


def record(engine: VirtualEngine) -> list[Signature]:
    """The signature of every step from now on."""
    steps: list[Signature] = []
    schedule = engine.scheduler.schedule

    def recorded(*args: bool) -> SchedulerOutput:
        output = schedule(*args)
        steps.append(signature(output))
        return output

    engine.scheduler.schedule = recorded  # type: ignore[method-assign, assignment]
    return steps


def run_steps(engine: VirtualEngine, num_steps: int) -> list[Signature]:
    steps = record(engine)
    while len(steps) < num_steps:
        if not engine.step():
            due_s = min(source.next_due_s for source in engine._sources)
            assert due_s < math.inf, "the workload is too short"
            engine.now_s = max(engine.now_s, due_s)
    return steps


def online_source(duration_s: float, seed: int) -> OnlineSource:
    scenario = Scenario("online", duration_s, ONLINE)
    return OnlineSource(draw_calls(scenario, seed), seed)
