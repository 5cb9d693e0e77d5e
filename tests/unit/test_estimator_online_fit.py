"""The online fit learns a law from steps alone, follows its changes and reports honest errors."""

from __future__ import annotations

import random

import pytest
from estimator_builders import (
    A100_LAW,
    ECHO_BASE_LAW,
    ECHO_LAW,
    LINEAR_LAW,
    mape,
    observed,
    observed_with_noise,
    random_loads,
)

from batchrun.estimator.online_fit import COLD_START, OnlineFit
from batchrun.estimator.step_load import Observation, StepLoad
from batchrun.estimator.step_time import AnyModel, LinearModel

LAWS = (A100_LAW, ECHO_LAW, ECHO_BASE_LAW)


def learned(observations: list[Observation], *calibrated: AnyModel) -> OnlineFit:
    fit = OnlineFit(calibrated)
    for load, took_s in observations:
        fit.observe(load, took_s)
    return fit


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_a_cold_start_ends_within_3_percent_of_a_noisy_law(law: AnyModel, seed: int) -> None:
    fit = learned(observed_with_noise(law, random_loads(seed, 3000), seed))

    # Echo's form with a base of next to nothing is Echo's.
    assert fit.best().name in {law.name, f"{law.name}-base"}
    assert mape(fit.best(), law, random_loads(seed + 100, 400)) <= 0.03


def first_steps(seed: int) -> list[StepLoad]:
    """What a cold engine sees: prompts of rows, then short steps beside few decodes of calls."""
    rng = random.Random(seed)
    loads = [StepLoad.of([(rng.choice((2048, 150, 700)), 9_000, False)]) for _ in range(8)]
    for _ in range(40):
        calls = [(1, rng.randint(100, 900), True)] * rng.randint(1, 3)
        rows = [(1, 12_000, True)] * rng.choice((0, 3, 12))
        loads.append(StepLoad.of([*calls, *rows, (rng.randint(60, 440), 9_000, False)]))
    return loads


@pytest.mark.parametrize("seed", range(8))
def test_a_cold_start_does_not_take_a_full_step_beside_calls_for_a_short_one(seed: int) -> None:
    full = StepLoad.of([(1, 500, True), (1, 500, True), (2046, 8_000, False)])
    fit = OnlineFit()

    for load, took_s in observed_with_noise(A100_LAW, first_steps(seed), seed):
        fit.observe(load, took_s)
        assert fit.best().predict_s(full) >= 0.5 * A100_LAW.predict_s(full)


def test_before_the_first_step_the_best_is_what_is_believed() -> None:
    assert OnlineFit().best() == COLD_START
    assert OnlineFit((A100_LAW, LINEAR_LAW)).best() == A100_LAW
    assert OnlineFit((A100_LAW, LINEAR_LAW)).models["linear"] == LINEAR_LAW


def test_a_calibrated_fit_does_not_forget_prefills_while_only_decodes_run() -> None:
    decodes = [load for load in random_loads(3, 4000) if load.kind == 1]
    prefills = [StepLoad.of([(n, n + c, False)]) for n in (256, 1024) for c in (0, 4000)]

    fit = learned(observed_with_noise(A100_LAW, decodes, seed=3), A100_LAW, LINEAR_LAW)

    assert len(decodes) >= 500
    assert mape(fit.best(), A100_LAW, prefills) <= 0.1


def test_an_engine_that_becomes_half_as_fast_is_followed() -> None:
    slower = LinearModel(8e-3, 1.6e-4, 6e-9, 1.8e-7, 4e-5)
    before = observed(LINEAR_LAW, random_loads(4, 1500))
    after = observed(slower, random_loads(5, 3000))

    fit = learned(before + after)

    assert mape(fit.best(), slower, random_loads(6, 200)) <= 0.05


def test_errors_are_those_of_predictions_made_before_learning() -> None:
    load = StepLoad.of([(100, 100, False)])
    fit = OnlineFit((LINEAR_LAW,))
    took_s = 2 * LINEAR_LAW.predict_s(load)

    fit.observe(load, took_s)

    assert fit.error_share == pytest.approx(0.5)


def test_the_error_window_forgets_the_oldest_steps() -> None:
    load = StepLoad.of([(100, 100, False)])
    fit = OnlineFit((LINEAR_LAW,), error_window_steps=4)
    right_s = LINEAR_LAW.predict_s(load)

    for took_s in (2 * right_s, right_s, right_s, right_s, right_s):
        fit.observe(load, took_s)

    assert fit.error_share == pytest.approx(0.0, abs=1e-9)


def test_steps_without_work_or_without_time_are_ignored() -> None:
    fit = OnlineFit()

    fit.observe(StepLoad(), 0.01)
    fit.observe(StepLoad.of([(5, 5, False)]), 0.0)

    assert fit.models == OnlineFit().models
    assert fit.error_share == 0.0


def test_an_observed_load_may_be_changed_afterwards() -> None:
    one, other = OnlineFit(), OnlineFit()
    for load, took_s in observed_with_noise(A100_LAW, random_loads(8, 200), seed=8):
        one.observe(load.copy(), took_s)
        other.observe(load, took_s)
        load.add(999, 9999)

    assert one.models == other.models


def late_error(fit: OnlineFit, law: AnyModel, loads: list[StepLoad], times: float = 1.0) -> float:
    """How far predictions as of late are off on average, where steps take so many times the law."""
    model = fit.as_of_late()
    errors = [abs(model.predict_s(each) / (times * law.predict_s(each)) - 1) for each in loads]
    return sum(errors) / len(errors)


def test_steps_of_a_machine_that_others_use_now_are_soon_predicted_longer() -> None:
    loads = random_loads(3, 3000)
    fit = learned(observed(A100_LAW, loads))
    assert fit.as_of_late() is fit.best()

    for load in random_loads(4, 96):
        fit.observe(load, 2.0 * A100_LAW.predict_s(load))

    assert late_error(fit, A100_LAW, loads[:200], times=2.0) < 0.2

    for load, took_s in observed(A100_LAW, random_loads(5, 400)):
        fit.observe(load, took_s)
    assert late_error(fit, A100_LAW, loads[:200]) < 0.2


def test_a_kind_of_step_that_comes_late_is_learnt_at_once() -> None:
    """Calls alone for long, then rows beside them, on an engine ten times as slow as believed."""
    law = LinearModel(5e-3, 4e-4, 5e-9, 1e-7, 2e-5)
    rng = random.Random(1)
    decodes = [StepLoad.of([(1, 100, True)] * rng.randint(1, 4)) for _ in range(600)]
    mixed = [
        StepLoad.of([*[(1, 100, True)] * rng.randint(1, 20), (size, 2_000, False)])
        for size in rng.choices(range(60, 500), k=60)
    ]
    fit = learned(observed(law, [*decodes, *mixed[:20]]))

    assert late_error(fit, law, mixed[20:]) < 0.2


def test_slow_first_steps_of_a_kind_are_forgotten_while_only_others_come() -> None:
    fit = OnlineFit([A100_LAW])
    prompts = [StepLoad.of([(size, size, False)]) for size in (40, 80, 160, 320)]
    for load in [StepLoad.of([(512, 512, False)])] * 2:
        fit.observe(load, 5.0 * A100_LAW.predict_s(load))
    assert late_error(fit, A100_LAW, prompts) > 0.8

    rng = random.Random(2)
    for _ in range(1_000):
        contexts = [(1, rng.randint(200, 2_000), True) for _ in range(rng.randint(1, 40))]
        load = StepLoad.of([*contexts, (rng.randint(100, 500), 800, False)])
        fit.observe(load, A100_LAW.predict_s(load))

    assert late_error(fit, A100_LAW, prompts) < 0.3


def test_noise_is_not_taken_for_a_slower_machine() -> None:
    fit = learned(observed_with_noise(A100_LAW, random_loads(6, 2000), 6))

    num_slowed = 0
    for load, took_s in observed_with_noise(A100_LAW, random_loads(7, 500), 7):
        fit.observe(load, took_s)
        num_slowed += fit.as_of_late() is not fit.best()
    assert num_slowed <= 25


def test_a_step_that_stood_still_is_forgotten_and_never_counts_for_all() -> None:
    loads = random_loads(8, 2000)
    fit = learned(observed(A100_LAW, loads))

    fit.observe(loads[0], 1_000.0)

    assert late_error(fit, A100_LAW, loads[:200]) < 0.2


@pytest.mark.parametrize("seed", range(6))
def test_what_a_refit_has_learnt_of_other_kinds_is_not_counted_twice(seed: int) -> None:
    """A refit corrects all kinds of steps at once, whichever kind it comes with."""
    rng = random.Random(seed)
    prompt = [(300, 800, False)]
    fit, longest = OnlineFit(), 0.0
    for number in range(200):
        decodes = [(1, rng.randint(200, 2_000), True) for _ in range(rng.randint(1, 20))]
        kinds = [StepLoad.of(each) for each in (prompt, decodes, decodes + prompt)]
        load = rng.choice(kinds)
        fit.observe(load, 5.0 * A100_LAW.predict_s(load) * rng.uniform(0.95, 1.05))
        if number > 20:
            model = fit.as_of_late()
            ratios = [model.predict_s(each) / (5.0 * A100_LAW.predict_s(each)) for each in kinds]
            longest = max(longest, *ratios)

    assert longest < 2.2


def test_a_refit_on_a_fast_engine_does_not_make_rare_kinds_seem_slow() -> None:
    """The first model is on the slow side, and the first step of each kind takes long."""
    rng = random.Random(0)
    kinds = [
        StepLoad.of([(300, 800, False)]),
        StepLoad.of([(1, 900, True)] * 8),
        StepLoad.of([(1, 900, True)] * 8 + [(300, 800, False)]),
    ]
    fit, num_seen, longest = OnlineFit(), [0, 0, 0], 0.0
    for number in range(600):
        load = rng.choices(kinds, (1, 20, 5))[0]
        times = 0.2 if num_seen[load.kind] else 2.0
        num_seen[load.kind] += 1
        fit.observe(load, times * A100_LAW.predict_s(load) * rng.uniform(0.95, 1.05))
        if number > 60:
            model, best = fit.as_of_late(), fit.best()
            true_s = [0.2 * A100_LAW.predict_s(each) for each in kinds]
            usual_s = [max(best.predict_s(each), s) for each, s in zip(kinds, true_s, strict=True)]
            for each, most_s in zip(kinds, usual_s, strict=True):
                longest = max(longest, model.predict_s(each) / most_s)

    assert longest < 1.6
