"""What calls are spared beyond late tokens: bursts, sparse calls, a new engine."""

from __future__ import annotations

import math

import pytest
from echo_views import NOW_S, call, decoding_call, decoding_row, names, prefilling_row, row, view

from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.online_queue import RISK_SHARE, ArrivalOrder
from batchrun.scheduling.slack import (
    EARLY_IDLE_STEPS,
    IDLE_SHARE,
    PRACTICE_EVERY,
    PRACTICE_TPOTS,
    Practice,
    alone_s,
)


def echo() -> EchoPolicy:
    """Echo on an engine that it has not seen before."""
    return EchoPolicy(EchoOptions(), ArrivalOrder())


def test_rows_sit_out_while_a_call_waits_for_the_room_of_calls() -> None:
    engine = view(
        running=[decoding_call(), decoding_row()],
        waiting=[call("large", prompt=9_000)],
        free_blocks=20,
    )

    plan = echo().plan(engine)

    assert plan.caps == {"row": 0}
    assert plan.admit == ()


def test_rows_go_on_where_no_call_runs_whose_end_would_make_room() -> None:
    engine = view(running=[decoding_row()], waiting=[call("large", prompt=9_000)], free_blocks=20)

    assert "row" not in echo().plan(engine).caps


def test_without_calls_a_step_waits_for_the_one_in_flight() -> None:
    policy = echo()
    policy.plan(view(running=[decoding_call()]))
    documents = [row(prompt=2_000)]

    beside = policy.plan(view(waiting=documents, rest_s=0.05))
    after = policy.plan(view(waiting=documents, rest_s=0.0))

    assert beside.admit == ()
    assert names(after.admit) == ["row"]


def test_where_no_call_came_for_a_minute_steps_follow_one_another() -> None:
    assert names(echo().plan(view(waiting=[row(prompt=2_000)], rest_s=0.05)).admit) == ["row"]


def test_an_engine_without_calls_tries_short_steps_now_and_then() -> None:
    practice, engine = Practice(), view()
    limits_s = [practice.most_s(engine) for _ in range(EARLY_IDLE_STEPS + 3 * PRACTICE_EVERY)]

    early, later = limits_s[:EARLY_IDLE_STEPS], limits_s[EARLY_IDLE_STEPS:]
    assert sum(limit_s < math.inf for limit_s in early) == EARLY_IDLE_STEPS / 2
    assert sum(limit_s < math.inf for limit_s in later) == 3
    assert {limit_s / 0.05 for limit_s in limits_s} == {*PRACTICE_TPOTS, math.inf}


def test_steps_that_rows_sit_out_are_no_practice() -> None:
    order, decides = ArrivalOrder(), []
    order.limits(view(running=[decoding_call()]))
    for number in range(4):
        in_flight = view(rest_s=0.02 * (number % 2), now_s=NOW_S + 1)
        decides.append(order.limits(in_flight).offline_s < IDLE_SHARE)

    assert [number for number, is_short in enumerate(decides) if is_short] == [2]


def test_in_a_burst_the_first_prompt_moves_and_the_others_wait_for_time() -> None:
    late = decoding_call(due_in_s=-1.0)
    burst = [call(f"call {i}", prompt=400, arrival_at_s=NOW_S) for i in range(4)]

    plan = echo().plan(view(running=[late], waiting=burst))

    assert plan.caps == {"call 0": 249}


def test_first_tokens_at_risk_take_small_chunks_past_the_limit() -> None:
    late = decoding_call(due_in_s=-1.0)
    waited = [call(f"call {i}", prompt=400, arrival_at_s=NOW_S - RISK_SHARE) for i in range(4)]

    plan = echo().plan(view(running=[late], waiting=waited))

    assert plan.caps == {"call 0": 249, "call 1": 32, "call 2": 32, "call 3": 32}


def test_a_long_line_puts_calls_at_risk_before_they_have_waited() -> None:
    late = decoding_call(due_in_s=-1.0)
    cluster = [call(f"call {i}", prompt=400, arrival_at_s=NOW_S) for i in range(20)]

    caps = echo().plan(view(running=[late], waiting=cluster)).caps

    assert caps == {"call 0": 249} | {f"call {i}": 32 for i in range(1, 20)}


def test_calls_whose_first_token_is_late_do_not_make_others_late() -> None:
    decoding = decoding_call(due_in_s=-1.0)
    lost = [call(f"call {i}", prompt=400, arrival_at_s=NOW_S - 1.5) for i in range(4)]

    assert echo().plan(view(running=[decoding], waiting=lost)).caps == {"call 0": 249}


def test_alone_a_step_has_the_prompts_and_tokens_of_calls() -> None:
    engine = view(
        running=[decoding_call(), prefilling_row(left=700)], waiting=[call("new", prompt=200)]
    )

    assert alone_s(engine) == pytest.approx(201 * 0.0001, rel=1e-3)
    assert alone_s(view(running=[prefilling_row(left=700)])) == 0.0
