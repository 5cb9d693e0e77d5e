"""Traces are the same every time, bursty as asked, or as recorded."""

from __future__ import annotations

import pytest

from batchrun.simulator.replay import TokenRange
from batchrun.simulator.traces.trace import Trace
from benchmarks.replay import TraceShape, arrivals_of, generate_trace

SHAPE = TraceShape(duration_s=900, rate_per_s=2, burst_period_s=90, burst_length_s=9)


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    assert generate_trace(SHAPE, seed=1) == generate_trace(SHAPE, seed=1)
    assert generate_trace(SHAPE, seed=1) != generate_trace(SHAPE, seed=2)


def test_arrivals_are_in_order_and_within_the_duration() -> None:
    times_s = [arrival.at_s for arrival in generate_trace(SHAPE, seed=1)]
    assert times_s == sorted(times_s)
    assert 0 <= times_s[0] < times_s[-1] < SHAPE.duration_s


def test_bursts_have_their_multiple_of_the_quiet_rate() -> None:
    times_s = [arrival.at_s for arrival in generate_trace(SHAPE, seed=1)]
    num_in_burst = sum(at_s % 90 < 9 for at_s in times_s)
    assert num_in_burst / 90 == pytest.approx(8, rel=0.15)
    assert (len(times_s) - num_in_burst) / 810 == pytest.approx(2, rel=0.15)


def test_lengths_stay_within_their_bounds() -> None:
    lengths = TokenRange(mu=3, sigma=2, min_tokens=5, max_tokens=50)
    shape = TraceShape(duration_s=200, rate_per_s=2, prompt=lengths, output=lengths)
    arrivals = generate_trace(shape, seed=1)
    words = {len(arrival.prompt.split()) for arrival in arrivals}
    assert (min(words), max(words)) == (5, 50)
    assert {min(a.max_tokens for a in arrivals), max(a.max_tokens for a in arrivals)} == {5, 50}


@pytest.mark.parametrize("rate_per_s", [0, -1])
def test_no_rate_is_an_empty_trace(rate_per_s: float) -> None:
    assert generate_trace(TraceShape(duration_s=10, rate_per_s=rate_per_s), seed=1) == []


def test_a_recorded_trace_keeps_times_and_lengths() -> None:
    trace = Trace.of([5.0, 7.5], [3, 40], [44, 1], source="t")

    first, second = arrivals_of(trace, seed=1)

    assert (first.at_s, first.max_tokens, len(first.prompt.split())) == (0, 44, 3)
    assert (second.at_s, second.max_tokens, len(second.prompt.split())) == (2.5, 1, 40)
    assert arrivals_of(trace, seed=1) == [first, second] != arrivals_of(trace, seed=2)
