"""What calls would have had alone: a clock that runs with their share of each step."""

from __future__ import annotations

import pytest

from batchrun.errors import ConfigError
from batchrun.estimator.step_load import StepLoad
from batchrun.estimator.step_time import LinearModel
from batchrun.hints import AUTO_ONLINE_COST, HINT_KEY, MAX_BOUND_S
from batchrun.scheduling.online_cost import AloneStep
from batchrun.vllm_plugin.alone import (
    LEAST_CALLS,
    AloneClock,
    CallCosts,
    Latency,
    learnt_slo,
)
from batchrun.vllm_plugin.estimates import (
    ALONE_MEMORY_S,
    COMPARE_EVERY_STEPS,
    LEAST_ALONE_SHARE,
    LEAST_ALONE_STEPS,
    Estimates,
)
from batchrun.vllm_plugin.settings import OnlineSlo, PluginSettings, read_settings


def test_a_step_without_rows_counts_whole_and_one_with_rows_in_part() -> None:
    clock = AloneClock()
    clock.scheduled(10.0, 0.02, None)
    clock.scheduled(10.0, 0.03, AloneStep(0.01, 0.02))

    clock.ended(10.03)
    assert clock.now == pytest.approx((0.03, 0.03))
    clock.ended(10.09)
    assert clock.now.first_s == pytest.approx(0.03 + 0.06 * 2 / 3)


def test_the_time_between_steps_counts() -> None:
    clock = AloneClock()
    for at_s in (10.0, 10.05):
        clock.scheduled(at_s, 0.02, AloneStep())
        clock.ended(at_s + 0.02)

    assert clock.now == pytest.approx((0.03, 0.03))


def test_a_call_that_came_during_a_step_waits_for_its_share_of_the_rest() -> None:
    clock = AloneClock()
    for begin_s in (10.0, 10.1):
        clock.scheduled(begin_s, 0.1, AloneStep(0.05, 0.05))
        clock.ended(begin_s + 0.1)
    clock.scheduled(10.2, 0.1, AloneStep(0.02, 0.02))

    assert clock.first_at_s(10.1) == pytest.approx(0.05)
    assert clock.first_at_s(10.15) == pytest.approx(0.075)
    assert clock.first_at_s(10.25) == pytest.approx(0.1 + 0.05 * 0.2)


def test_while_rows_alone_are_computed_the_clock_stands() -> None:
    clock = AloneClock()
    clock.scheduled(10.0, 0.1, AloneStep())
    clock.ended(10.1)

    assert clock.now == (0.0, 0.0)


def test_between_two_tokens_fewer_prompts_would_have_come_alone() -> None:
    clock = AloneClock()
    for number in range(20):
        clock.scheduled(10.0 + number, 1.0, AloneStep(0.5, 0.5))
        clock.ended(11.0 + number)
    before = clock.now
    clock.scheduled(30.0, 1.0, AloneStep(0.2, 0.8))
    clock.ended(31.0)

    assert clock.stretch == pytest.approx(2.0, rel=0.05)
    assert clock.now.first_s - before.first_s == pytest.approx(0.8)
    assert clock.now.later_s - before.later_s == pytest.approx(0.2 + 0.6 / 2)


def test_bounds_are_learnt_from_what_calls_would_have_had_alone() -> None:
    first, later = [Latency(0.0, 0.4, 0.2)] * LEAST_CALLS, [Latency(0.0, 0.04, 0.02)] * LEAST_CALLS

    learnt = learnt_slo(1.5, first, later)

    assert (learnt.ttft_s, learnt.tpot_s) == pytest.approx((0.3, 0.03))
    assert learnt_slo(1.5, first[1:], later) == OnlineSlo(tpot_s=learnt.tpot_s)
    assert learnt_slo(None, first, later) == learnt_slo(1.5, [], []) == OnlineSlo()


@pytest.mark.parametrize("num_longer", [0, 1, LEAST_CALLS - 1])
def test_answers_of_one_token_teach_the_ttft_alone(num_longer: int) -> None:
    costs = CallCosts()
    costs.ttft.extend([Latency(0.0, 0.4, 0.2)] * LEAST_CALLS)
    costs.tpot.extend([Latency(0.0, 0.04, 0.02)] * num_longer)

    costs.telemetry(1.0, 1.5)

    assert costs.learnt.ttft_s == pytest.approx(0.3)
    assert costs.learnt.tpot_s == OnlineSlo().tpot_s


def test_what_was_learnt_holds_in_a_lull_and_on_an_engine_with_few_calls() -> None:
    costs = CallCosts()
    for number in range(LEAST_CALLS):
        costs.ttft.append(Latency(60.0 * number, 0.4, 0.2))
        costs.tpot.append(Latency(60.0 * number, 0.04, 0.02))

    told = costs.telemetry(60.0 * LEAST_CALLS, 1.5)

    assert (costs.learnt.ttft_s, costs.learnt.tpot_s) == pytest.approx((0.3, 0.03))
    assert (told.num_calls, told.ttft_p50_s) == (5, 0.4)
    assert costs.telemetry(1e6, 1.5).num_calls == 0
    assert costs.learnt.ttft_s == pytest.approx(0.3)


@pytest.mark.parametrize("ttft_s", [-5.0, 1e-300 * 1e-300, float("nan"), float("inf"), 1e12])
def test_whatever_was_measured_some_bounds_are_learnt(ttft_s: float) -> None:
    assert 0 < learnt_slo(1.5, [Latency(0.0, 0.4, ttft_s)] * LEAST_CALLS, []).ttft_s <= MAX_BOUND_S


def settings(**given: object) -> PluginSettings:
    return read_settings({HINT_KEY: given})


def test_auto_bounds_have_a_cost_where_nobody_says_one() -> None:
    assert settings().cost_in_force is None
    assert settings(online_cost=1.3).cost_in_force == 1.3
    assert settings(slo="auto").cost_in_force == AUTO_ONLINE_COST
    assert settings(slo="auto", online_cost=1.3).cost_in_force == 1.3


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"online_cost": 1.0}, "batchrun.online_cost: Input should be greater than 1"),
        ({"online_cost": "inf"}, "batchrun.online_cost: "),
        ({"slo": "fast"}, "batchrun.slo.auto: Input should be 'auto'"),
    ],
)
def test_a_wrong_setting_is_one_line(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**given)

    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


DECODES = StepLoad.of([(1, 100, True)] * 4)
PROMPT = StepLoad.of([(100, 100, False)])


def told(num_alone: int, took_s: float) -> Estimates:
    """Estimates of steps of 10 ms, after decodes that took so long while no row was in the engine
    and one round of steps since."""
    estimates = Estimates(PluginSettings(), 1000, [LinearModel(0.01, 0.0, 0.0, 0.0, 0.0)])
    for _ in range(num_alone):
        estimates.observe_alone(DECODES, took_s, 0.0)
    step_by_step(estimates, 1.0)
    return estimates


def step_by_step(estimates: Estimates, now_s: float) -> None:
    for _ in range(COMPARE_EVERY_STEPS):
        estimates.sample(now_s, 0)


def test_an_engine_that_held_no_row_tells_what_its_steps_take_alone() -> None:
    model = told(LEAST_ALONE_STEPS, 0.008).alone_model

    assert model.predict_s(DECODES) == pytest.approx(0.008)
    assert model.predict_s(PROMPT) == pytest.approx(0.01), "of which nothing is known"


def test_few_steps_tell_nothing_of_an_engine_without_rows_and_slow_or_odd_ones_no_more() -> None:
    few, slow = told(LEAST_ALONE_STEPS - 1, 0.008), told(64, 0.02)

    assert few.alone_model is few.model
    assert slow.alone_model is slow.model
    least_s = told(64, 1e-6).alone_model.predict_s(DECODES)
    assert least_s == pytest.approx(LEAST_ALONE_SHARE * 0.01)


def test_what_an_engine_without_rows_took_long_ago_is_forgotten() -> None:
    estimates = told(64, 0.008)
    step_by_step(estimates, ALONE_MEMORY_S + 1)

    assert estimates.alone_model is estimates.model
