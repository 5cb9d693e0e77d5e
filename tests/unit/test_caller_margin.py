"""What steps leave of the bounds follows what callers feel, and stays within its limits."""

from __future__ import annotations

import pytest
from echo_views import decoding_call, view

from batchrun.estimator.caller_margin import (
    CAUTION,
    HEARD_S,
    MOST_FIRST_SHARE,
    MOST_LATER_TPOTS,
    NOTHING,
    RISE,
    WANTED_LATE,
    CallerMargin,
    KeptBack,
)
from batchrun.scheduling.slack import IDLE_SHARE, LATE_SHARE, LEAST_MARGIN_SHARE, step_limits
from batchrun.wire import FeltCalls

NONE_YET = FeltCalls()


def told(*counts: FeltCalls, beside_rows: bool = True) -> CallerMargin:
    """A margin that heard these, two seconds apart."""
    margin = CallerMargin()
    for at_s, felt in enumerate(counts):
        margin.hear(felt, 2.0 * at_s, beside_rows=beside_rows)
    return margin


def answers(num: int, num_late: int) -> FeltCalls:
    return FeltCalls(num_answers=num, num_late_answers=num_late)


def test_nothing_is_kept_back_where_nobody_is_late() -> None:
    margin = CallerMargin()
    for _ in range(9):
        margin.saw_first(1.0, is_late=False)
        margin.saw_last(1.0, is_late=False)

    assert margin.now == NOTHING


def test_a_gateway_that_has_seen_nothing_yet_makes_careful() -> None:
    assert told(NONE_YET).now == KeptBack(0.0, CAUTION * MOST_LATER_TPOTS)


def test_late_answers_raise_what_is_kept_back_and_others_lower_it() -> None:
    margin = told(NONE_YET, answers(10, 1))

    share = CAUTION + RISE * (1 - 10 * WANTED_LATE)
    assert margin.now.later_tpots == pytest.approx(share * MOST_LATER_TPOTS)


def test_late_first_tokens_take_a_part_of_the_bound_off() -> None:
    margin = told(NONE_YET, FeltCalls(num_first=1, num_late_first=1))

    assert margin.now.first_share == pytest.approx(RISE * (1 - WANTED_LATE) * MOST_FIRST_SHARE)


def test_calls_that_are_all_late_take_the_most_and_no_more() -> None:
    margin = told(NONE_YET, FeltCalls(900, 900, 900, 900))

    assert margin.now == KeptBack(MOST_FIRST_SHARE, MOST_LATER_TPOTS)


def test_in_the_long_run_as_many_are_late_as_are_wanted() -> None:
    """A call is late where less is kept back than it needs, which is never the most."""
    margin, num_late, num = told(NONE_YET), 0, 5_000
    for number in range(1, num + 1):
        needed = 0.7 * (number * 0.618_034 % 1.0)
        num_late += margin.now.later_tpots < needed * MOST_LATER_TPOTS
        margin.hear(answers(number, num_late), 0.1 * number, beside_rows=True)

    assert num_late / num == pytest.approx(WANTED_LATE, abs=0.003)


def test_calls_without_rows_beside_them_change_nothing() -> None:
    before = told(NONE_YET).now

    assert told(NONE_YET, answers(50, 50), beside_rows=False).now == before


def test_counts_of_another_gateway_begin_anew() -> None:
    margin = told(answers(50, 2), answers(3, 3))

    assert margin.now.later_tpots == CAUTION * MOST_LATER_TPOTS
    margin.hear(answers(4, 4), 9.0, beside_rows=True)
    assert margin.now.later_tpots > CAUTION * MOST_LATER_TPOTS


def test_the_engines_own_clock_counts_only_while_no_gateway_tells() -> None:
    margin = told(NONE_YET, answers(50, 0), answers(50, 0))
    careful = margin.now.later_tpots
    margin.saw_last(3.0, is_late=True)
    assert margin.now.later_tpots == careful < CAUTION * MOST_LATER_TPOTS

    margin.saw_last(HEARD_S + 3.0, is_late=True)

    assert margin.now.later_tpots > careful


def test_a_gateway_that_knows_no_bounds_leaves_it_to_the_engines_clock() -> None:
    margin = told(NONE_YET, NONE_YET)
    margin.saw_last(3.0, is_late=False)

    assert 0.0 < margin.now.later_tpots < CAUTION * MOST_LATER_TPOTS


def test_steps_beside_rows_end_earlier_by_what_is_kept_back() -> None:
    kept = KeptBack(later_tpots=0.3)
    near = step_limits(
        view(running=[decoding_call(due_in_s=0.05)], kept_back=kept), was_online_lately=True
    )

    assert near.offline_s == pytest.approx((1 - 0.3 - LEAST_MARGIN_SHARE) * 0.05)
    assert near.online_s == pytest.approx((1 - LEAST_MARGIN_SHARE) * 0.05)


def test_rows_keep_their_short_steps_whatever_is_kept_back() -> None:
    most = KeptBack(MOST_FIRST_SHARE, MOST_LATER_TPOTS)
    beside = view(running=[decoding_call(due_in_s=0.05)], kept_back=most)

    assert step_limits(beside, was_online_lately=True).offline_s == LATE_SHARE * 0.05
    idle = step_limits(view(kept_back=most), was_online_lately=True)
    assert idle.offline_s == pytest.approx(IDLE_SHARE * (1 - MOST_FIRST_SHARE))


def test_a_call_of_a_tighter_class_gives_no_more_than_its_own_bound() -> None:
    tight = decoding_call(due_in_s=0.02, slo_tpot_s=0.01)
    limits = step_limits(
        view(running=[tight], kept_back=KeptBack(later_tpots=1.0)), was_online_lately=True
    )

    # Twice its bound is left of its slack, less what is kept back and the margin for errors.
    assert limits.offline_s == pytest.approx((2 - 1 - LEAST_MARGIN_SHARE) * 0.01)
