"""What calls are spared beyond late tokens: long answers, bursts, sparse calls, a new engine."""

from __future__ import annotations

import math

import pytest
from echo_views import (
    NOW_S,
    call,
    decoding_call,
    decoding_row,
    names,
    prefilling_row,
    row,
    view,
)

from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.online_queue import RISK_SHARE, ArrivalOrder
from batchrun.scheduling.step_pace import (
    EARLY_IDLE_STEPS,
    KV_SHARE,
    PRACTICE_EVERY,
    PRACTICE_TPOTS,
    KvPace,
    Practice,
    alone_s,
)
from batchrun.scheduling.view import EngineView, Plan


def echo() -> EchoPolicy:
    """Echo on an engine that it has not seen before."""
    return EchoPolicy(EchoOptions(), ArrivalOrder())


def with_a_call(step: int, *, step_s: float, held_blocks: int) -> EngineView:
    """An engine of 1,000 blocks after so many steps beside one call that generates."""
    return view(
        running=[decoding_call()],
        now_s=NOW_S + step * step_s,
        online_blocks=held_blocks,
        total_blocks=1_000,
    )


def pace_after_steps(step_s: float, held_blocks: int) -> float:
    """The pace after 50 equal steps."""
    pace = KvPace()
    views = [with_a_call(i, step_s=step_s, held_blocks=held_blocks) for i in range(50)]
    return [pace.most_s(each) for each in views][-1]


def test_calls_that_hold_their_share_of_kv_keep_the_pace_of_their_steps() -> None:
    assert pace_after_steps(0.04, round(KV_SHARE * 1_000)) == pytest.approx(0.04)


def test_calls_that_hold_twice_their_share_get_steps_half_as_long() -> None:
    assert pace_after_steps(0.04, round(2 * KV_SHARE * 1_000)) == pytest.approx(0.02)


def test_what_calls_wait_for_counts_as_held() -> None:
    pace, waiting = KvPace(), [call(prompt=round(10_000 * KV_SHARE) - 10)]
    for i in range(2):
        running = view(
            running=[decoding_call()],
            waiting=waiting,
            now_s=NOW_S + i * 0.04,
            online_blocks=1,
            total_blocks=1_000,
        )
        most_s = pace.most_s(running)

    assert most_s == pytest.approx(0.04)


def test_a_pause_is_no_step() -> None:
    pace = KvPace()
    for now_s in (0.0, 0.04, 20.0):
        most_s = pace.most_s(view(running=[decoding_call()], now_s=NOW_S + now_s, online_blocks=1))

    assert most_s < math.inf
    assert pace.most_s(view()) == math.inf


def test_long_answers_shorten_the_steps_of_rows() -> None:
    policy = echo()
    plans: list[Plan] = []
    for step in range(3):
        engine = view(
            running=[decoding_call(), prefilling_row(left=5_000)],
            now_s=NOW_S + step * 0.04,
            online_blocks=800,
            total_blocks=1_000,
        )
        plans.append(policy.plan(engine))

    assert plans[0].caps["row"] > 400
    assert plans[2].predicted_s == pytest.approx(0.04 * KV_SHARE / 0.8, rel=0.01)


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
