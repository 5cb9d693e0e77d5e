"""An engine that refuses rows gets fewer, and none of them pays for it."""

from __future__ import annotations

import math
import random

from batchrun.daemon.faults import (
    MAX_REFUSALS,
    MAX_REFUSALS_IN_ALL,
    PROBE_S,
    Backpressure,
    Refusals,
)

RNG = random.Random(1)


def test_a_refusal_halves_what_goes_and_lets_the_engine_rest() -> None:
    pressure = Backpressure()
    pressure.refused(40, None, 100.0, RNG)

    assert pressure.limit_rows == 20
    assert not pressure.allows(0, 100.2)
    assert pressure.allows(19, 100.6) and not pressure.allows(20, 100.6)


def test_rows_refused_together_count_as_one() -> None:
    pressure = Backpressure()
    for _ in range(30):
        pressure.refused(40, None, 100.0, RNG)

    assert pressure.limit_rows == 20
    assert pressure.allows(19, 101.0)


def test_the_engine_rests_for_as_long_as_it_asks_and_longer_each_time() -> None:
    pressure = Backpressure()
    pressure.refused(8, 5.0, 0.0, RNG)
    assert pressure.rests_until_s == 5.0
    rests_s = []
    for _ in range(8):
        now_s = pressure.rests_until_s
        pressure.refused(1, None, now_s, RNG)
        rests_s.append(pressure.rests_until_s - now_s)

    assert rests_s[-1] > 30 > rests_s[0]
    assert pressure.limit_rows == 1


def test_rows_that_are_taken_raise_the_limit_until_there_is_none() -> None:
    pressure = Backpressure()
    pressure.refused(8, None, 0.0, RNG)
    limits = []
    while pressure.limit_rows < math.inf:
        limits.append(pressure.limit_rows)
        pressure.taken(max_rows=16)

    assert 4 + 12 * 4 < len(limits) < 16 * 16
    assert limits == sorted(limits)


def test_refusals_weigh_when_other_rows_are_taken() -> None:
    alone, beside = Refusals(), Refusals()

    assert [beside.are_enough(3, taken) for taken in range(MAX_REFUSALS + 1)].index(True) == 20
    assert [alone.are_enough(3, 7) for _ in range(MAX_REFUSALS_IN_ALL + 1)].index(True) == 100


def test_a_row_that_never_ends_does_not_hold_the_engine() -> None:
    pressure = Backpressure()
    pressure.refused(1, None, 0.0, RNG)
    probe_at_s = pressure.rests_until_s + PROBE_S
    assert not pressure.allows(1, probe_at_s - 0.1) and pressure.allows(1, probe_at_s)

    pressure.sent(1, probe_at_s)
    assert not pressure.allows(2, probe_at_s + PROBE_S - 0.1)
    assert pressure.allows(2, probe_at_s + PROBE_S)

    for _ in range(10):
        pressure.taken(max_rows=16)
    assert pressure.allows(3, probe_at_s + 0.1)
