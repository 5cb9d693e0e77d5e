"""Virtual engines and their steps, to be compared one by one with stock vLLM's."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from batchrun.routing.engine_book import EngineTraits
from batchrun.simulator.online import Calls, EnginePort, OnlineRouter
from batchrun.simulator.virtual.engine import Timing, TrafficSource, VirtualEngine
from batchrun.simulator.virtual.setup import A100Law, EngineShape
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from benchmarks.row_feeds import callers
from benchmarks.scenarios import Scenario, a100_8b, draw_calls

Signature = tuple[Any, ...]

ABORT_EVERY_STEPS = 41


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
    sources: Sequence[TrafficSource] = (),
    *,
    policy: str = "echo",
    settings: Mapping[str, Any] | None = None,
    **engine: Any,
) -> VirtualEngine:
    """An engine with this scheduler. `engine`: fields of EngineShape, and two of its own.

    `order` is vLLM's own scheduling policy, `steps_in_flight` is 2 where it is not given.
    """
    additional = {"batchrun": {"policy": policy, **(settings or {})}}
    timing = Timing(engine.pop("steps_in_flight", 2))
    order = engine.pop("order", "priority")
    shape = EngineShape(policy=order, additional_config=additional, **engine)
    return VirtualEngine(scheduler_cls, shape, A100Law(), sources, timing)


def ours(engine: VirtualEngine) -> ColocatedScheduler:
    """The engine's scheduler, which is of our class."""
    assert isinstance(engine.scheduler, ColocatedScheduler)
    return engine.scheduler


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


def until_step(engine: VirtualEngine, steps: list[Signature], num_steps: int) -> None:
    """Run until so many steps are recorded."""
    while len(steps) < num_steps:
        if not engine.step():
            due_s = min(source.next_due_s for source in engine._sources)
            assert due_s < math.inf, "the workload is too short"
            engine.now_s = max(engine.now_s, due_s)


def first_difference(
    stock: VirtualEngine, colocated: VirtualEngine, num_steps: int
) -> tuple[Signature, Signature] | None:
    """The first steps of two engines, in step, that are not the same; at most `num_steps`.

    Every now and then the same client is lost in both.
    """
    theirs, mine = record(stock), record(colocated)
    rng = random.Random(num_steps)
    for step in range(1, num_steps + 1):
        until_step(stock, theirs, step)
        until_step(colocated, mine, step)
        if theirs[-1] != mine[-1]:
            return theirs[-1], mine[-1]
        if step % ABORT_EVERY_STEPS == 0 and stock.scheduler.requests:
            lost = rng.choice(list(stock.scheduler.requests))
            stock.abort(lost)
            colocated.abort(lost)
    assert sum(len(step[0]) for step in mine) > num_steps
    return None


def online_source(
    duration_s: float, seed: int, scenario: Scenario | None = None, *, num_systems: int = 0
) -> EnginePort:
    """The calls of a scenario (default: a100-8b); `num_systems` system prompts before most."""
    calls = draw_calls(replace(scenario or a100_8b(), duration_s=duration_s), seed)
    return _Users(calls, seed, num_systems) if num_systems else callers(calls, seed)


class _Users(EnginePort):
    """Users behind a few applications, each with its system prompt; some call with none."""

    def __init__(self, calls: Sequence[Any], seed: int, num_systems: int) -> None:
        router = OnlineRouter(Calls.of(calls), [EngineTraits()], seed, EngineShape().max_model_len)
        super().__init__(router)
        router.ports = [self]
        self._choice = random.Random(seed)
        self._systems: list[list[int]] = [[]]
        for i in range(num_systems):
            tokens = [self._choice.randint(5, 2_000) for _ in range(60 + 130 * i)]
            self._systems.append(tokens)

    def take_due(self, now_s: float) -> list[Any]:
        return [
            replace(
                call, prompt_token_ids=self._choice.choice(self._systems) + call.prompt_token_ids
            )
            for call in super().take_due(now_s)
        ]
