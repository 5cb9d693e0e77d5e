"""The figures of `benchmarks.gpu`, and how its phases share one limit."""

from __future__ import annotations

import pytest

from benchmarks.gpu.phases import PHASE_OVERHEAD_S, Share, process_age_s
from benchmarks.gpu.record import RequestLife, Span, StepTotals, figures
from benchmarks.replay import Promise

PROMISE = Promise(ttft_s=1.0, tpot_s=0.1)
SPAN = Span(10.0, 20.0)


def test_only_rows_that_ended_in_the_span_are_served() -> None:
    lives = [offline(ended_at_s=9.0), offline(ended_at_s=15.0), offline(ended_at_s=None)]

    found = figures(lives, StepTotals(), SPAN, PROMISE)

    assert found["offline_rows"] == 1
    assert found["offline_tokens_per_s"] == pytest.approx(102 / 10)


def test_the_hit_rate_counts_first_admissions_alone() -> None:
    life = RequestLife(is_online=False, arrival_at_s=11.0, num_prompt_tokens=100)
    life.admit(12.0, 20)
    life.admit(14.0, 90)

    assert figures([life], StepTotals(), SPAN, PROMISE)["prefix_hit_rate"] == pytest.approx(0.2)


def test_a_call_without_a_token_when_its_bound_passes_is_a_miss() -> None:
    answered = online(12.0, [12.5, 12.6])
    silent = online(15.0, [])
    too_new_to_judge = online(19.5, [])
    before_the_span = online(5.0, [])

    found = figures(
        [answered, silent, too_new_to_judge, before_the_span], StepTotals(), SPAN, PROMISE
    )

    assert (found["arrived"], found["slo_ttft"], found["slo_attainment"]) == (2, 0.5, 0.5)
    assert found["online_longest_wait_s"] == pytest.approx(5.0)


def test_computed_tokens_are_those_of_steps_in_the_span() -> None:
    totals = StepTotals()
    totals.add(5.0, 1000, 1000, 0.001)
    totals.add(12.0, 300, 200, 0.002)
    totals.add(13.0, 100, 0, 0.004)

    found = figures([], totals, SPAN, PROMISE)

    assert found["computed_tokens_per_s"] == pytest.approx(40.0)
    assert found["offline_computed_tokens_per_s"] == pytest.approx(20.0)
    assert found["plan_ms"] == pytest.approx(3.0)


def test_phases_share_the_time_and_the_last_ones_lack() -> None:
    share = Share(least_s=10.0, most_s=60.0)
    time_for_three_s = 3 * (10.0 + PHASE_OVERHEAD_S)

    assert share.of(1_000.0, 2) == 60.0
    assert share.of(100.0, 4) == pytest.approx(25.0 - PHASE_OVERHEAD_S)
    assert share.of(time_for_three_s, 9) == pytest.approx(10.0)
    assert share.of(10.0, 9) is None


def test_time_before_the_first_line_of_ours_counts() -> None:
    assert process_age_s() > 0.1


def offline(*, ended_at_s: float | None) -> RequestLife:
    life = RequestLife(is_online=False, arrival_at_s=1.0, num_prompt_tokens=100)
    life.token_times_s = [8.0, 8.5]
    life.finished_at_s, life.is_done = ended_at_s, ended_at_s is not None
    return life


def online(arrival_at_s: float, token_times_s: list[float]) -> RequestLife:
    life = RequestLife(is_online=True, arrival_at_s=arrival_at_s, num_prompt_tokens=10)
    life.token_times_s = token_times_s
    return life
