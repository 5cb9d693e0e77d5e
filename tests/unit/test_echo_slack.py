"""Step limits: what the tightest online promise leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from batchrun.estimator import LinearModel
from batchrun.scheduling import EngineView, PrefixHit, RequestView
from batchrun.scheduling.slack import (
    IDLE_SHARE,
    LATE_SHARE,
    PREFILL_SHARE,
    TARGET_SHARE,
    UNUSED_SHARE,
    completion_pace_s,
    deadline_s,
    step_limits,
)
from batchrun.types import RequestClass

NOW_S = 100.0


def decode(*, first_token_at_s: float | None, num_output_tokens: int) -> RequestView:
    """An online request that arrived at second 99, TTFT 1 s, TPOT 50 ms."""
    return RequestView(
        request_id="r",
        request_class=RequestClass.ONLINE,
        arrival_at_s=99.0,
        num_prompt_tokens=10,
        slo_ttft_s=1.0,
        slo_tpot_s=0.05,
        work_left_tokens=1,
        num_output_tokens=num_output_tokens,
        first_token_at_s=first_token_at_s,
    )


def engine(
    running: Sequence[RequestView] = (), waiting: Sequence[RequestView] = (), rest_s: float = 0.0
) -> EngineView:
    return EngineView(
        now_s=NOW_S,
        rest_s=rest_s,
        model=LinearModel(0.0, 0.0, 0.0, 0.0, 0.0),
        online_running=running,
        online_waiting=waiting,
        offline_running=(),
        offline_waiting=(),
        free_blocks=10,
        total_blocks=10,
        wanted_blocks=0,
        reserve_blocks=0,
        block_tokens=16,
        token_budget=100,
        max_running=10,
        max_loras=0,
        online_blocks=0,
        look_up=lambda _: PrefixHit(),
        private_blocks=lambda _: 0,
        is_ready=lambda _: True,
    )


def test_credit_of_an_early_first_token_is_not_spent_on_slow_ones() -> None:
    early = decode(first_token_at_s=99.1, num_output_tokens=10)

    assert deadline_s(early) == pytest.approx(99.1 + 10 * 0.05)


def with_end(jct_s: float, first_token_at_s: float | None, num_output_tokens: int) -> RequestView:
    """The same request, of 21 tokens, with a bound for its completion."""
    request = decode(first_token_at_s=first_token_at_s, num_output_tokens=num_output_tokens)
    request.slo_jct_s, request.max_output_tokens = jct_s, 21
    return request


def test_what_a_completion_bound_leaves_is_spread_over_the_tokens_to_come() -> None:
    request = with_end(1.6, first_token_at_s=100.0, num_output_tokens=5)

    pace_s = completion_pace_s(request, NOW_S)

    assert pace_s == pytest.approx((99.0 + 1.6 - 100.0) / 20)
    assert deadline_s(request, pace_s) == pytest.approx(100.0 + 5 * pace_s)
    request.num_output_tokens = 20
    assert deadline_s(request, pace_s) == pytest.approx(99.0 + 1.6)


def test_what_the_prefill_saved_is_slack_of_the_tokens_after_it() -> None:
    early = with_end(1.6, first_token_at_s=99.8, num_output_tokens=5)
    late = with_end(1.6, first_token_at_s=100.0, num_output_tokens=5)

    assert completion_pace_s(early, NOW_S) > completion_pace_s(late, NOW_S)


def test_a_completion_bound_tightens_the_step_and_a_loose_one_does_not() -> None:
    tight = with_end(1.6, first_token_at_s=99.99, num_output_tokens=5)
    loose = with_end(60.0, first_token_at_s=99.99, num_output_tokens=1)

    limits = step_limits(engine([tight]), was_online_lately=True)

    assert limits.offline_s == pytest.approx(TARGET_SHARE * 0.61 / 20)
    assert step_limits(engine([loose]), was_online_lately=True) == step_limits(
        engine([decode(first_token_at_s=99.99, num_output_tokens=1)]), was_online_lately=True
    )


def test_a_completion_bound_that_is_broken_presses_nobody() -> None:
    broken = with_end(0.9, first_token_at_s=99.99, num_output_tokens=1)
    plain = decode(first_token_at_s=99.99, num_output_tokens=1)

    limits = step_limits(engine([broken]), was_online_lately=True)

    assert limits == step_limits(engine([plain]), was_online_lately=True)


def test_steps_beside_a_loose_class_stay_short_enough_for_calls_without_one() -> None:
    loose = decode(first_token_at_s=99.99, num_output_tokens=1)
    loose.slo_ttft_s = loose.slo_tpot_s = 60.0

    limits = step_limits(engine([loose]), was_online_lately=True)

    assert limits.online_s > 50
    assert limits.offline_s == pytest.approx(PREFILL_SHARE)


def test_a_tight_class_of_late_shortens_steps() -> None:
    rich = decode(first_token_at_s=99.9, num_output_tokens=20)

    beside = step_limits(engine([rich]), was_online_lately=True, least_ttft_s=0.2)
    quiet = step_limits(engine(), was_online_lately=True, least_ttft_s=0.2)

    assert beside.offline_s == pytest.approx(PREFILL_SHARE * 0.2)
    assert quiet.offline_s == pytest.approx(IDLE_SHARE * 0.2)


def test_before_the_first_token_is_out_only_the_arrival_counts() -> None:
    request = decode(first_token_at_s=None, num_output_tokens=1)

    assert deadline_s(request) == pytest.approx(99.0 + 1.0 + 0.05)


def test_the_smallest_slack_after_the_steps_in_flight_is_the_limit() -> None:
    tight = decode(first_token_at_s=99.99, num_output_tokens=1)
    loose = decode(first_token_at_s=99.99, num_output_tokens=4)

    limits = step_limits(engine([loose, tight], rest_s=0.005), was_online_lately=True)

    assert limits.online_s == pytest.approx(99.99 + 0.05 - 100.005)
    assert limits.offline_s == pytest.approx(limits.online_s)


def test_offline_work_aims_below_tpot_whatever_the_credit() -> None:
    rich = decode(first_token_at_s=99.9, num_output_tokens=20)

    limits = step_limits(engine([rich]), was_online_lately=True)

    assert limits.online_s > 0.05
    assert limits.offline_s == pytest.approx(TARGET_SHARE * 0.05)


def test_a_late_request_gets_short_steps_not_none() -> None:
    late = decode(first_token_at_s=99.0, num_output_tokens=2)

    limits = step_limits(engine([late]), was_online_lately=True)

    assert limits.online_s == pytest.approx(LATE_SHARE * 0.05)


def test_without_online_decodes_ttft_bounds_offline_work() -> None:
    waiting = decode(first_token_at_s=None, num_output_tokens=0)

    busy = step_limits(engine(waiting=[waiting]), was_online_lately=True)
    quiet = step_limits(engine(), was_online_lately=True)
    unused = step_limits(engine(), was_online_lately=False)

    assert busy.online_s == math.inf
    assert busy.offline_s == pytest.approx(PREFILL_SHARE)
    assert quiet.offline_s == pytest.approx(IDLE_SHARE)
    assert unused.offline_s == pytest.approx(UNUSED_SHARE)
