"""Steps in flight: when each began, how long it took, how long the rest will take."""

from __future__ import annotations

import pytest

from batchrun.estimator.step_load import StepLoad
from batchrun.vllm_plugin.estimates import StepClock


def load(num_tokens: int = 100) -> StepLoad:
    made = StepLoad()
    made.add(num_tokens, num_tokens)
    return made


def test_a_step_on_an_idle_engine_begins_when_it_is_scheduled() -> None:
    clock = StepClock()
    clock.scheduled(load(), predicted_s=0.2, now_s=10.0)

    assert clock.rest_s(10.05) == pytest.approx(0.15)
    ended = clock.ended(10.25)
    assert ended is not None
    assert ended[1] == pytest.approx(0.25)
    assert ended[2] == 0.2


def test_a_step_behind_another_begins_when_that_one_ends() -> None:
    clock = StepClock()
    clock.scheduled(load(), predicted_s=0.2, now_s=10.0)
    clock.scheduled(load(), predicted_s=0.1, now_s=10.01)

    assert clock.rest_s(10.05) == pytest.approx(0.25)
    clock.ended(10.3)
    assert clock.rest_s(10.3) == pytest.approx(0.1)
    ended = clock.ended(10.35)
    assert ended is not None
    assert ended[1] == pytest.approx(0.05)


def test_a_step_that_takes_longer_than_predicted_has_no_negative_rest() -> None:
    clock = StepClock()
    clock.scheduled(load(), predicted_s=0.1, now_s=10.0)
    clock.scheduled(load(), predicted_s=0.1, now_s=10.0)

    assert clock.rest_s(11.0) == pytest.approx(0.1)


def test_an_empty_step_teaches_nothing() -> None:
    clock = StepClock()
    clock.scheduled(None, predicted_s=0.0, now_s=10.0)

    assert clock.rest_s(10.0) == 0.0
    assert clock.ended(10.01) is None
    assert clock.ended(10.02) is None


def test_the_gap_runs_from_a_steps_end_to_the_next_steps_beginning() -> None:
    clock = StepClock()
    clock.scheduled(load(), predicted_s=0.2, now_s=10.0)
    clock.ended(10.2)
    assert clock.gap is None
    clock.scheduled(load(), predicted_s=0.2, now_s=10.203)
    clock.ended(10.4)

    assert clock.gap == (1, pytest.approx(0.003))


def test_a_step_scheduled_ahead_leaves_no_gap() -> None:
    clock = StepClock()
    clock.scheduled(load(), predicted_s=0.2, now_s=10.0)
    clock.scheduled(load(), predicted_s=0.2, now_s=10.1)
    clock.ended(10.2)
    clock.ended(10.4)

    assert clock.gap is None


def test_time_without_requests_is_no_gap() -> None:
    clock = StepClock()
    clock.scheduled(load(), predicted_s=0.2, now_s=10.0)
    clock.ended(10.2)
    clock.fell_idle()
    clock.scheduled(load(), predicted_s=0.2, now_s=15.0)
    clock.ended(15.2)

    assert clock.gap is None


def test_the_wait_after_an_empty_step_is_no_gap() -> None:
    clock = StepClock()
    clock.scheduled(load(), predicted_s=0.2, now_s=10.0)
    clock.ended(10.2)
    clock.scheduled(None, predicted_s=0.0, now_s=10.3)
    clock.ended(10.3)
    clock.scheduled(load(), predicted_s=0.2, now_s=10.4)
    clock.ended(10.6)

    assert clock.gap is None
