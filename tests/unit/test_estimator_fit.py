"""Fits recover laws whose coefficients are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
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
from msgspec.structs import astuple, replace

from batchrun.estimator.fits import fit_all, fit_echo, fit_echo_base, fit_linear, fit_roofline
from batchrun.estimator.least_squares import nonnegative_least_squares
from batchrun.estimator.step_load import StepLoad, StepTable
from batchrun.estimator.step_time import AnyModel

LAWS = (A100_LAW, ECHO_LAW, ECHO_BASE_LAW, LINEAR_LAW)
FITS: dict[str, Callable[[StepTable], AnyModel]] = {
    "linear": fit_linear,
    "roofline": fit_roofline,
    "echo": fit_echo,
    "echo-base": fit_echo_base,
}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_each_fit_recovers_the_coefficients_of_its_own_law(law: AnyModel) -> None:
    table = StepTable.of(observed(law, random_loads(seed=1, num_loads=400)))

    found = FITS[law.name](table)

    assert astuple(found) == pytest.approx(astuple(law), rel=0.01)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_the_best_model_stays_within_3_percent_of_a_noisy_law(law: AnyModel, seed: int) -> None:
    observations = observed_with_noise(law, random_loads(seed, 600), seed)

    best = fit_all(observations)[0]

    assert mape(best.model, law, random_loads(seed + 100, 400)) <= 0.03


def test_every_model_is_judged_and_the_best_comes_first() -> None:
    fitted = fit_all(observed_with_noise(A100_LAW, random_loads(5, 300), seed=5))

    assert {each.model.name for each in fitted} == {"linear", "roofline", "echo", "echo-base"}
    errors = [each.held_out_mape for each in fitted]
    assert errors == sorted(errors)
    assert fitted[0].model.name == "roofline"
    assert all(each.num_held_out == 60 for each in fitted)
    assert all(each.held_out_p95_ape >= each.held_out_mape for each in fitted[:1])


def test_the_held_out_error_is_that_of_a_fit_without_the_held_out_steps() -> None:
    observations = observed_with_noise(LINEAR_LAW, random_loads(6, 50), seed=6)
    kept = [each for i, each in enumerate(observations) if i % 5 != 4]
    trained = fit_linear(StepTable.of(kept))
    errors = [abs(trained.predict_s(load) - s) / s for load, s in observations[4::5]]

    judged = next(each for each in fit_all(observations) if each.model.name == "linear")

    assert judged.held_out_mape == pytest.approx(sum(errors) / 10)
    assert judged.model == fit_linear(StepTable.of(observations))


def test_one_wild_step_moves_the_fit_by_little() -> None:
    loads = random_loads(seed=7, num_loads=200)
    observations = observed_with_noise(LINEAR_LAW, loads, seed=7)
    observations[17] = (loads[17], 1000.0)

    assert mape(fit_linear(StepTable.of(observations)), LINEAR_LAW, loads) <= 0.03


def test_echo_keeps_what_it_knew_of_a_kind_of_step_it_did_not_see() -> None:
    law = replace(ECHO_LAW, decode_mean_s=5e-6)
    decodes = [load for load in random_loads(2, 200) if load.kind == 1]

    found = fit_echo(StepTable.of(observed(law, decodes)), start=ECHO_LAW)

    assert astuple(found) == pytest.approx(astuple(law), rel=0.01)


def test_too_few_steps_or_a_step_without_time_are_refused() -> None:
    observations = observed(A100_LAW, random_loads(0, 12))

    with pytest.raises(ValueError, match="needs 10 observed steps, got 9"):
        fit_all(observations[:9])
    with pytest.raises(ValueError, match="more than 0 s"):
        fit_all([*observations, (StepLoad.of([(5, 5, False)]), 0.0)])


def test_least_squares_without_negative_coefficients_is_at_least_as_good_as_any_subset() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        design, target = rng.normal(size=(12, 4)), rng.normal(size=12)

        found = nonnegative_least_squares(design, target)

        best = min(_residual(design, target, subset) for subset in range(16))
        assert found.min() >= 0.0
        assert np.linalg.norm(design @ found - target) == pytest.approx(best, rel=1e-6)


def _residual(design: np.ndarray, target: np.ndarray, subset: int) -> float:
    """The least residual with the columns of `subset` only, if none is negative there."""
    columns = [i for i in range(design.shape[1]) if subset >> i & 1]
    if not columns:
        return float(np.linalg.norm(target))
    found, *_ = np.linalg.lstsq(design[:, columns], target, rcond=None)
    if found.min() < 0.0:
        return float("inf")
    return float(np.linalg.norm(design[:, columns] @ found - target))
