"""The figures of `benchmarks.gpu`, and how its phases share one limit."""

from __future__ import annotations

import pytest

from batchrun.config import SloConfig
from batchrun.simulator.virtual.engine import RequestRecord
from benchmarks.gpu.engine import Step
from benchmarks.gpu.phases import PHASE_OVERHEAD_S, figures, phase_s, process_age_s

MEASURED = (10.0, 20.0, SloConfig(ttft_s=1.0, tpot_s=0.1))


def test_only_rows_that_ended_in_the_span_are_served() -> None:
    records = [offline(ended_at_s=9.0), offline(ended_at_s=15.0), offline(ended_at_s=None)]

    found = figures(records, [], *MEASURED)

    assert found["offline_rows"] == 1
    assert found["offline_tokens_per_s"] == pytest.approx(102 / 10)


def test_the_hit_rate_is_that_of_rows_admitted_in_the_span() -> None:
    record = RequestRecord("row", False, 11.0, 100, 0, None)
    record.admitted_at_s, record.num_hit_tokens = 12.0, 20

    assert figures([record], [], *MEASURED)["prefix_hit_rate"] == pytest.approx(0.2)


def test_a_call_without_a_token_when_its_bound_passes_is_a_miss() -> None:
    answered = online(12.0, [12.5, 12.6])
    silent = online(15.0, [])
    too_new_to_judge = online(19.5, [])
    before_the_span = online(5.0, [])

    found = figures([answered, silent, too_new_to_judge, before_the_span], [], *MEASURED)

    assert (found["arrived"], found["slo_ttft"], found["slo_attainment"]) == (2, 0.5, 0.5)
    assert found["online_longest_wait_s"] == pytest.approx(5.0)


def test_computed_tokens_are_those_of_steps_in_the_span() -> None:
    steps = [
        Step(5.0, 1000, 1000, 0.001),
        Step(12.0, 300, 200, 0.002),
        Step(13.0, 100, 0, 0.004),
    ]

    found = figures([], steps, *MEASURED)

    assert found["computed_tokens_per_s"] == pytest.approx(40.0)
    assert found["offline_computed_tokens_per_s"] == pytest.approx(20.0)
    assert found["plan_ms"] == pytest.approx(3.0)


def test_phases_share_the_time_and_the_last_ones_lack() -> None:
    time_for_three_s = 3 * (10.0 + PHASE_OVERHEAD_S)

    assert phase_s(1_000.0, 2, 10.0, 60.0) == 60.0
    assert phase_s(100.0, 4, 10.0, 60.0) == pytest.approx(25.0 - PHASE_OVERHEAD_S)
    assert phase_s(time_for_three_s, 9, 10.0, 60.0) == pytest.approx(10.0)
    assert phase_s(10.0, 9, 10.0, 60.0) is None


def test_time_before_the_first_line_of_ours_counts() -> None:
    assert process_age_s() > 0.1


def offline(*, ended_at_s: float | None) -> RequestRecord:
    reason = None if ended_at_s is None else "length"
    record = RequestRecord("row", False, 1.0, 100, 0, None, None, 1.0, ended_at_s, reason)
    record.token_times_s = [8.0, 8.5]
    return record


def online(arrival_at_s: float, token_times_s: list[float]) -> RequestRecord:
    record = RequestRecord("call", True, arrival_at_s, 10, 0, None)
    record.token_times_s = token_times_s
    return record
