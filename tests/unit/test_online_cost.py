"""The dial: how long a step may take so that calls are at most so many times as slow as alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from echo_views import (
    NOW_S,
    TOKEN_S,
    Kv,
    call,
    decoding_call,
    decoding_row,
    held,
    plan_of,
    prefilling_call,
    prefilling_row,
    view,
)

from batchrun.estimator.step_time import LinearModel
from batchrun.scheduling.online_cost import (
    ALONE_EVERY,
    DISTRUST_SHARE,
    EARLY_STEPS,
    IDLE_STEP_WAITS,
    LEAST_IDLE_STEPS,
    MOST_OWED_STEPS,
    SPENT_AT_ONCE,
    TRUSTED_ERROR_SHARE,
    OnlineCost,
    alone_step,
)
from batchrun.scheduling.view import EngineView

BASE_S = 0.01
MODEL = LinearModel(BASE_S, TOKEN_S, 0.0, 0.0, 0.0)
DECODE_S = BASE_S + TOKEN_S


def engine(*running: Any, cost: float | None = 1.5, **fields: Any) -> EngineView:
    """An engine whose steps take 10 ms, and 0.1 ms for each token."""
    return view(running=running, model=MODEL, online_cost=cost, **fields)


def test_without_the_dial_nothing_is_bounded() -> None:
    assert OnlineCost().most_s(engine(decoding_call(), cost=None)) == math.inf


def test_a_step_beside_tokens_of_calls_takes_at_most_so_many_times_as_alone() -> None:
    assert OnlineCost().most_s(engine(decoding_call())) == pytest.approx(1.5 * DECODE_S)


def test_where_rows_slow_steps_that_have_none_the_dial_goes_by_what_an_empty_engine_takes() -> None:
    faster = LinearModel(BASE_S / 2, TOKEN_S, 0.0, 0.0, 0.0)
    dial, beside = OnlineCost(), engine(decoding_call(), alone_model=faster)

    assert dial.most_s(beside) == pytest.approx(1.5 * (DECODE_S - BASE_S / 2))


def test_prompts_of_calls_are_granted_what_they_take() -> None:
    beside = engine(decoding_call(), prefilling_call("new", left=300), waiting=[call(prompt=200)])

    assert OnlineCost().most_s(beside) == pytest.approx(1.5 * DECODE_S + 500 * TOKEN_S)


def test_a_first_token_that_others_do_not_wait_beside_is_not_delayed() -> None:
    assert OnlineCost().most_s(engine(prefilling_call(left=300))) == pytest.approx(
        BASE_S + 300 * TOKEN_S
    )


def test_slower_calls_are_more_at_once_than_they_would_be_alone() -> None:
    ten = alone_step(MODEL, [100] * 10, [], 2.0)

    assert ten.decodes_s == ten.whole_s == pytest.approx(BASE_S + 5 * TOKEN_S)


def test_now_and_then_calls_run_alone_so_that_this_is_known() -> None:
    dial, beside = OnlineCost(), engine(decoding_call())
    limits_s = [dial.most_s(beside) for _ in range(EARLY_STEPS + 2 * ALONE_EVERY)]

    assert limits_s[:EARLY_STEPS].count(0.0) == EARLY_STEPS / 2
    assert limits_s[EARLY_STEPS:].count(0.0) == 2


def second_limit_s(first_took_s: float) -> float:
    """The limit of the third step; the two before it, one without rows, took so long together."""
    dial, request = OnlineCost(), decoding_call()
    dial.most_s(engine(request))
    dial.most_s(engine(request))
    return dial.most_s(engine(request, now_s=NOW_S + first_took_s))


def test_what_steps_leave_later_ones_spend_but_not_all_at_once() -> None:
    granted_s = 2 * 1.5 * DECODE_S

    assert second_limit_s(granted_s) == pytest.approx(1.5 * DECODE_S)
    assert second_limit_s(granted_s - 0.001) == pytest.approx(1.5 * DECODE_S + 0.001)
    assert second_limit_s(granted_s - 0.02) == pytest.approx((1 + 0.5 * SPENT_AT_ONCE) * DECODE_S)


def test_what_steps_took_too_long_later_ones_make_up_for() -> None:
    granted_s = 2 * 1.5 * DECODE_S

    assert second_limit_s(granted_s + 0.003) == pytest.approx(1.5 * DECODE_S - 0.003)


def test_of_time_without_rows_no_account_is_kept() -> None:
    dial, request = OnlineCost(), decoding_call()
    dial.most_s(engine(request))
    now_s = NOW_S + 60.0
    limits_s = []
    for _ in range(2 * MOST_OWED_STEPS + 1):
        limits_s.append(dial.most_s(engine(request, now_s=now_s)))
        now_s += DECODE_S

    assert max(limits_s[: MOST_OWED_STEPS // 2]) < DECODE_S
    assert max(limits_s[-2:]) > 1.5 * DECODE_S


def test_the_call_that_was_spared_least_decides() -> None:
    dial, old, new = OnlineCost(), decoding_call("old"), decoding_call("new")
    dial.most_s(engine(old))
    dial.most_s(engine(old))
    both = engine(old, new, now_s=NOW_S + 2 * DECODE_S)

    assert dial.most_s(both) == pytest.approx(1.5 * DECODE_S)


def test_of_a_model_that_is_far_off_less_is_believed() -> None:
    def limit_s(error_share: float) -> float:
        return OnlineCost().most_s(engine(decoding_call(), error_share=error_share))

    assert limit_s(TRUSTED_ERROR_SHARE) == pytest.approx(1.5 * DECODE_S)
    assert limit_s(TRUSTED_ERROR_SHARE + DISTRUST_SHARE / 2) == pytest.approx(1.25 * DECODE_S)
    assert limit_s(1.0) == pytest.approx(DECODE_S)


def idle_limit_s(cost: float, *, num_idle: int, cached_tokens: int = 0) -> float:
    """The limit without calls after four of them, so many of which found no other call."""
    dial = OnlineCost()
    for number in range(4):
        if number < num_idle:
            dial.most_s(engine(cost=cost))
        cached = Kv(hit=held(cached_tokens))
        arrival = call(f"call {number}", prompt=900 + cached_tokens, handle=cached)
        others = [] if number < num_idle else [decoding_call()]
        dial.most_s(engine(*others, waiting=[arrival], cost=cost))
        dial.most_s(engine(decoding_call(arrival.request_id), cost=cost))
    return dial.most_s(engine(cost=cost))


def test_a_step_without_calls_is_as_long_as_an_arrival_may_wait() -> None:
    waits_s = 0.5 * (BASE_S + 900 * TOKEN_S)

    assert idle_limit_s(1.5, num_idle=4) == pytest.approx(IDLE_STEP_WAITS * waits_s)
    cached_s = idle_limit_s(1.5, num_idle=4, cached_tokens=9_000)
    assert cached_s == pytest.approx(IDLE_STEP_WAITS * waits_s)
    assert idle_limit_s(1.5, num_idle=1) == pytest.approx(2 * IDLE_STEP_WAITS * waits_s)
    assert idle_limit_s(1.01, num_idle=4) == pytest.approx(LEAST_IDLE_STEPS * DECODE_S)


def test_before_any_call_a_step_is_as_long_as_the_bounds_allow() -> None:
    assert OnlineCost().most_s(engine()) == math.inf


def test_the_plan_keeps_to_the_dial() -> None:
    requests = [decoding_call(due_in_s=10.0), decoding_row(), prefilling_row("long", left=5_000)]

    free = plan_of(engine(*requests, cost=None))
    dialled = plan_of(engine(*requests, cost=1.5))

    assert free.predicted_s > 2 * DECODE_S
    assert dialled.predicted_s == pytest.approx(1.5 * DECODE_S, abs=TOKEN_S)
