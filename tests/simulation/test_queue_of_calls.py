"""Every order of calls inside vLLM's scheduler, on the virtual engine: promises of classes are
planned for without offline work, orders change while calls run, and room is given away once."""

from __future__ import annotations

import math
from typing import Any

import pytest
from echo_views import TOKEN_S, row, view
from engine_pairs import engine_of, first_difference, ours

from batchrun.scheduling.on_time import OnTimeOrder
from batchrun.scheduling.policies import QUEUES, VLLMS_QUEUES
from batchrun.simulator.virtual.engine import VirtualEngine
from batchrun.simulator.virtual.setup import NONCE
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.wire import Orders, encode
from benchmarks.queue_calls import VOICE, PromisedCall, PromisedCalls, bursty_calls, classed_calls

CALLS_S = 6.0
NUM_STEPS = 300


def engine_with(calls: list[PromisedCall], order: str, **shape: Any) -> VirtualEngine:
    """An engine that these calls come to, let in by this order."""
    settings = {"online_queue": order, "larry_alpha": 1e6}
    return engine_of(ColocatedScheduler, [PromisedCalls(calls, 0)], settings=settings, **shape)


@pytest.mark.parametrize("order", QUEUES)
def test_every_order_serves_every_call_of_every_class_in_little_room(order: str) -> None:
    calls = classed_calls(6.0, CALLS_S, 0)
    engine = engine_with(calls, order, num_blocks=2_600)
    engine.run_until(math.inf)

    lengths = {f"call-{i}": call.num_output_tokens for i, call in enumerate(calls)}
    served = {name: len(record.output_token_ids) for name, record in engine.records.items()}
    assert served == lengths
    assert ours(engine).state.num_policy_errors == 0
    assert ours(engine).state.num_malformed_hints == 0


def test_larry_with_a_very_large_alpha_takes_the_steps_of_arrival() -> None:
    calls = classed_calls(6.0, CALLS_S, 1)
    larry, arrival = (engine_with(calls, order) for order in ("larry", "arrival"))

    assert first_difference(larry, arrival, NUM_STEPS) is None


@pytest.mark.parametrize("order", sorted(VLLMS_QUEUES))
def test_with_classes_steps_are_planned_without_offline_work_and_without_them_not(
    order: str,
) -> None:
    classed = engine_with(classed_calls(6.0, 3.0, 0), order)
    plain = engine_with(bursty_calls(6.0, 3.0, 0), order)
    for engine in (classed, plain):
        engine.run_until(2.0)

    assert ours(classed).plan.load is not None
    assert ours(plain).plan.load is None


def test_the_order_changes_while_calls_run() -> None:
    calls = classed_calls(6.0, CALLS_S, 0)
    engine = engine_with(calls, "arrival")
    engine.run_until(3.0)
    control = ours(engine).daemon_link.control
    refused = control.receive(encode(Orders(NONCE, 1, 0, online_queue="lifo")))
    assert b"online_queue must be one of" in refused
    control.receive(encode(Orders(NONCE, 1, 1, online_queue="on-time")))
    engine.run_until(math.inf)

    policy = ours(engine).step_policy
    assert isinstance(getattr(policy, "_queue", None), OnTimeOrder)
    assert ours(engine).daemon_link.telemetry(engine.now_s).online_queue == "on-time"
    assert all(record.finished_at_s for record in engine.records.values())
    assert len(engine.records) == len(calls)


def test_a_policy_knows_the_bounds_of_calls_that_came_under_the_one_before() -> None:
    engine = engine_with(classed_calls(6.0, 2.0, 0), "arrival")
    engine.run_until(math.inf)
    scheduler = ours(engine)
    scheduler.daemon_link.control.receive(encode(Orders(NONCE, 1, 1, "bs+e")))
    scheduler.obey()

    assert scheduler.step_policy is not None
    document = view(waiting=[row(prompt=9_000)], now_s=engine.now_s)
    assert scheduler.step_policy.plan(document).caps == {"row": int(0.1 * VOICE.ttft_s / TOKEN_S)}


def test_prompts_in_the_middle_keep_the_room_that_they_were_let_in_with() -> None:
    long = [call for call in classed_calls(20.0, 60.0, 0) if call.num_prompt_tokens > 8_000]
    calls = [PromisedCall(0.2 * i, c.num_prompt_tokens, 8, c.promise) for i, c in enumerate(long)]
    engine = engine_with(calls, "on-time", num_blocks=2_600)
    engine.run_until(math.inf)

    assert sum(record.num_preemptions for record in engine.records.values()) == 0
    assert len(engine.records) == len(calls) > 40
