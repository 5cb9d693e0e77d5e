"""How long a step may take: what the tightest online promise leaves (section 5.1)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from echo_views import NOW_S, Kv, call, decoding_call, held, plan_of, prefilling_call, row, view

from batchrun.scheduling.echo import EchoOptions, EchoPolicy
from batchrun.scheduling.online_queue import ArrivalOrder
from batchrun.scheduling.slack import (
    IDLE_SHARE,
    LATE_SHARE,
    LEAST_MARGIN_SHARE,
    MAX_MARGIN_SHARE,
    PREFILL_COST,
    PREFILL_SHARE,
    TARGET_SHARE,
    UNUSED_SHARE,
    StepLimits,
    completion_pace_s,
    deadline_s,
    step_limits,
)
from batchrun.scheduling.view import GROWTH_TOKENS, RequestView


def limits_beside(*running: RequestView, **fields: Any) -> StepLimits:
    """The limits of a step beside these running calls."""
    return step_limits(view(running=running, **fields), was_online_lately=True)


def with_end(jct_s: float, *, first_at_s: float, generated: int = 5) -> RequestView:
    """A call of 21 tokens that came a second ago and has a bound for its completion."""
    return decoding_call(
        generated=generated,
        output=21,
        arrival_at_s=NOW_S - 1.0,
        first_token_at_s=first_at_s,
        slo_jct_s=jct_s,
    )


def test_a_token_is_due_a_ttft_and_its_number_of_tpots_after_the_arrival() -> None:
    request = decoding_call(generated=3, arrival_at_s=NOW_S - 1.0, first_token_at_s=None)

    assert deadline_s(request) == pytest.approx(NOW_S + 3 * 0.05)


def test_a_late_first_token_does_not_press_those_after_it() -> None:
    late = decoding_call(generated=3, arrival_at_s=NOW_S - 9.0, first_token_at_s=NOW_S - 0.1)
    in_flight = decoding_call(generated=1, arrival_at_s=NOW_S - 9.0, first_token_at_s=None)

    assert deadline_s(late) == pytest.approx(NOW_S - 0.1 + 3 * 0.05)
    assert deadline_s(in_flight, start_s=NOW_S + 0.02) == pytest.approx(NOW_S + 0.02 + 0.05)


def test_credit_of_an_early_first_token_is_not_spent_on_slow_ones() -> None:
    early = decoding_call(generated=10, arrival_at_s=NOW_S - 1.0, first_token_at_s=NOW_S - 0.9)

    assert deadline_s(early) == pytest.approx(NOW_S - 0.9 + 10 * 0.05)


def test_the_smallest_slack_after_the_steps_in_flight_is_the_limit() -> None:
    tight, loose = decoding_call("call 1", due_in_s=0.04), decoding_call("call 2", due_in_s=0.19)

    limits = limits_beside(loose, tight, rest_s=0.005)

    assert limits.online_s == pytest.approx(0.035 - LEAST_MARGIN_SHARE * 0.05)
    assert limits.offline_s == limits.online_s


def test_offline_work_aims_below_tpot_whatever_the_credit() -> None:
    limits = limits_beside(decoding_call(due_in_s=0.9))

    assert limits.online_s == pytest.approx(0.9 - LEAST_MARGIN_SHARE * 0.05)
    assert limits.offline_s == pytest.approx(TARGET_SHARE * 0.05)


def test_a_late_call_gets_short_steps_not_none() -> None:
    limits = limits_beside(decoding_call("call 1", due_in_s=-0.9), decoding_call("call 2"))

    assert limits.online_s == pytest.approx(LATE_SHARE * 0.05)
    assert limits.offline_s == pytest.approx(LATE_SHARE * 0.05)


def test_rows_leave_a_margin_of_the_mean_error_of_predictions() -> None:
    limits = limits_beside(decoding_call(due_in_s=0.04), error_share=0.2)

    assert limits.online_s == pytest.approx(0.04 - LEAST_MARGIN_SHARE * 0.05)
    assert limits.offline_s == pytest.approx(0.04 - 0.2 * 0.05)


def test_the_margin_for_errors_is_a_share_of_tpot_at_most() -> None:
    limits = limits_beside(decoding_call(due_in_s=0.06), error_share=5.0)

    assert limits.offline_s == pytest.approx(0.06 - MAX_MARGIN_SHARE * 0.05)


def test_a_call_whose_last_token_is_in_flight_still_counts() -> None:
    ending = decoding_call("call 1", due_in_s=0.03)
    ending.work_left_tokens = 0

    limits = limits_beside(ending, decoding_call("call 2", due_in_s=0.04))

    assert limits.offline_s == pytest.approx(0.03 - LEAST_MARGIN_SHARE * 0.05)


def test_beside_first_tokens_to_come_a_step_is_little_longer_than_alone() -> None:
    waiting = step_limits(view(waiting=[call(prompt=300)]), was_online_lately=True)
    prefilling = limits_beside(prefilling_call(prompt=300, left=300))

    assert waiting == prefilling
    assert waiting.online_s == math.inf
    assert waiting.offline_s == pytest.approx(PREFILL_COST * 0.03, rel=1e-3)


def test_what_is_cached_of_prompts_takes_no_time_alone() -> None:
    turn = call(prompt=2_300, handle=Kv(hit=held(2_000)))
    cached = step_limits(view(waiting=[turn]), was_online_lately=True)

    assert cached == step_limits(view(waiting=[call(prompt=300)]), was_online_lately=True)


def test_without_online_decodes_ttft_bounds_offline_work() -> None:
    limits = step_limits(view(waiting=[call(prompt=5_000)]), was_online_lately=True)

    assert limits.offline_s == pytest.approx(PREFILL_SHARE * 1.0)


def test_without_calls_steps_are_short_enough_for_an_arrival_and_longer_after_a_pause() -> None:
    lately = step_limits(view(), was_online_lately=True)
    long_ago = step_limits(view(), was_online_lately=False)

    assert lately.offline_s == pytest.approx(IDLE_SHARE * 1.0)
    assert long_ago.offline_s == pytest.approx(UNUSED_SHARE * 1.0)


def test_an_arrival_is_expected_for_a_minute_after_the_last_call() -> None:
    policy, document = EchoPolicy(EchoOptions(), ArrivalOrder()), row(prompt=9_000)
    policy.plan(view(running=[decoding_call()]))

    def chunk_after(pause_s: float) -> int:
        return policy.plan(view(waiting=[document], now_s=NOW_S + pause_s)).caps["row"]

    assert chunk_after(59.5) == 1_000
    assert chunk_after(60.5) < chunk_after(60.6) == 4_000
    # One that came while no step was planned.
    assert plan_of(view(waiting=[document], were_calls_lately=True)).caps["row"] == 1_000


def test_a_tight_class_of_late_shortens_steps() -> None:
    beside = step_limits(view(running=[decoding_call()]), was_online_lately=True, least_ttft_s=0.2)
    quiet = step_limits(view(), was_online_lately=True, least_ttft_s=0.2)

    assert beside.offline_s == pytest.approx(PREFILL_SHARE * 0.2)
    assert quiet.offline_s == pytest.approx(IDLE_SHARE * 0.2)


def test_steps_beside_a_loose_class_stay_short_enough_for_calls_without_one() -> None:
    loose = decoding_call(slo_ttft_s=60.0, slo_tpot_s=60.0, due_in_s=55.0)

    limits = limits_beside(loose)

    assert limits.online_s == pytest.approx(55.0 - LEAST_MARGIN_SHARE * 60.0)
    assert limits.offline_s == pytest.approx(PREFILL_SHARE * 1.0)


def test_what_a_completion_bound_leaves_is_spread_over_the_tokens_to_come() -> None:
    request = with_end(1.6, first_at_s=NOW_S)

    pace_s = completion_pace_s(request, NOW_S, 21)

    assert pace_s == pytest.approx(0.6 / 20)
    assert deadline_s(request, pace_s) == pytest.approx(NOW_S + 5 * pace_s)
    request.num_output_tokens = 20
    assert deadline_s(request, pace_s) == pytest.approx(NOW_S + 0.6)


def test_an_answer_is_paced_as_long_as_it_is_likely_to_be() -> None:
    request = with_end(1.6, first_at_s=NOW_S)
    request.max_output_tokens = 10_000

    assert completion_pace_s(request, NOW_S, 121) == pytest.approx(0.6 / 120)
    request.num_output_tokens = 500
    assert completion_pace_s(request, NOW_S, 121) == pytest.approx(0.6 / (499 + GROWTH_TOKENS))


def test_what_the_prefill_saved_is_slack_of_the_tokens_after_it() -> None:
    early, late = with_end(1.6, first_at_s=NOW_S - 0.2), with_end(1.6, first_at_s=NOW_S)

    assert completion_pace_s(early, NOW_S, 21) == pytest.approx(0.8 / 20)
    assert completion_pace_s(late, NOW_S, 21) == pytest.approx(0.6 / 20)


def test_a_completion_bound_tightens_the_step_and_a_loose_one_does_not() -> None:
    tight = with_end(1.6, first_at_s=NOW_S - 0.01)
    loose = with_end(60.0, first_at_s=NOW_S - 0.01)
    unbound = with_end(math.inf, first_at_s=NOW_S - 0.01)

    assert limits_beside(tight).offline_s == pytest.approx(TARGET_SHARE * 0.61 / 20)
    assert limits_beside(loose) == limits_beside(unbound)


def test_a_completion_bound_that_is_broken_presses_nobody() -> None:
    broken = with_end(0.9, first_at_s=NOW_S - 0.01)
    unbound = with_end(math.inf, first_at_s=NOW_S - 0.01)

    assert limits_beside(broken) == limits_beside(unbound)


def test_the_tightest_ttft_bound_of_the_calls_that_wait_shortens_the_step() -> None:
    tight = call(prompt=499, slo_ttft_s=0.5)

    plan = plan_of(view(waiting=[tight, row(prompt=2_000)]))

    assert plan.caps == {"call": 499, "row": 600 - 499}


def test_a_bound_that_was_learnt_anew_does_not_shorten_steps_as_a_tight_class_does() -> None:
    """With `slo: auto` calls keep the bound that they came with, here 0.2 s; by now it is 1 s."""
    decoding = decoding_call()
    rows = [row(prompt=2_000)]
    usual = plan_of(view(running=[decoding], waiting=rows))
    before = replace(decoding, slo_ttft_s=0.2)
    assert plan_of(view(running=[before], waiting=rows)).caps == usual.caps
    tight = replace(before, has_class=True)
    assert plan_of(view(running=[tight], waiting=rows)).caps != usual.caps
