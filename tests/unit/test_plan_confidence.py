"""What misses on some draws say of the next: chance, room for it, and what is no chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.simulator.planner.confidence import (
    CONFIDENCE,
    chance_of_at_most,
    has_room,
    is_clear,
    is_kept,
    most_expected,
)


@pytest.mark.parametrize("expected", [0.0, 0.3, 6.0, 400.0, 2_000.0])
def test_chances_are_those_of_draws(expected: float) -> None:
    drawn = np.random.default_rng(0).poisson(expected, 20_000)
    for num in (0, math.floor(expected), math.floor(expected + 2 * math.sqrt(expected))):
        assert chance_of_at_most(num, expected) == pytest.approx((drawn <= num).mean(), abs=0.02)


@given(st.integers(0, 2_000))
def test_so_many_may_be_expected_that_more_than_are_allowed_are_rare(may_miss: int) -> None:
    expected = most_expected(may_miss)

    assert 0 < expected < max(may_miss, 1)
    assert chance_of_at_most(may_miss, expected) == pytest.approx(CONFIDENCE, abs=1e-6)
    assert most_expected(may_miss + 1) > expected


def test_one_call_more_than_allowed_is_no_clear_miss_but_twice_as_many_is() -> None:
    assert not is_clear(6, 6) and not is_clear(8, 6) and is_clear(12, 6)
    assert is_clear(1, 0)


def test_draws_are_kept_together_unless_one_clearly_is_not() -> None:
    assert is_kept([(7, 6), (2, 6), (1, 6)])
    assert not is_kept([(7, 6), (7, 6), (5, 6)])
    assert not is_kept([(14, 6), (0, 6), (0, 6)])


def test_there_is_room_when_another_draw_is_likely_to_hold() -> None:
    assert has_room([(3, 6), (3, 6), (3, 6)])
    assert not has_room([(6, 6), (4, 6), (0, 6)])
    assert has_room([(0, 0)]) and not has_room([(1, 1)])
