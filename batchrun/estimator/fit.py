"""Fits of all step-time models to one set of observed steps, judged on held-out ones.

Every fit minimises relative errors with non-negative coefficients and bounded outliers
(`least_squares`); the laws with branches alternate between the branches and that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from batchrun.estimator.echo_base_fit import fit_echo_base
from batchrun.estimator.echo_fit import fit_echo
from batchrun.estimator.least_squares import ROUNDS, first_guess, fit_piecewise
from batchrun.estimator.roofline_fit import fit_roofline
from batchrun.estimator.step_table import Observation, StepTable
from batchrun.estimator.step_time import AnyModel, LinearModel

LEAST_OBSERVATIONS = 10

_HELD_OUT_EVERY = 5


@dataclass(frozen=True, slots=True)
class FittedModel:
    """A model, with its errors on steps that the coefficients had not seen.

    An error is |predicted - measured| / measured, a share.
    """

    model: AnyModel
    held_out_mape: float
    held_out_p95_ape: float
    num_held_out: int


def fit_linear(
    table: StepTable, start: LinearModel | None = None, rounds: int = ROUNDS
) -> LinearModel:
    """Least squares in [1, tokens, attention pairs, decode contexts, requests].

    Improves on `start` in at most `rounds` rounds; without one it begins from a plain fit.
    """
    design = np.column_stack((
        np.ones(table.num_steps),
        table.tokens,
        table.pairs,
        table.decode_context,
        table.requests,
    ))
    if start is None:
        begin = first_guess(design, table.seconds, table.weights)
    else:
        begin = np.array(astuple(start))
    found, _ = fit_piecewise(lambda _: design, begin, table.seconds, table.weights, rounds)
    return LinearModel(*found.tolist())


def fit_all(observations: Sequence[Observation]) -> list[FittedModel]:
    """Fit every model to `observations`; the smallest held-out error comes first.

    Each fifth observation is held out of the fit that is judged; the models returned are fitted
    to all of them. Raises ValueError for fewer than LEAST_OBSERVATIONS, or a step of 0 s.
    """
    if len(observations) < LEAST_OBSERVATIONS:
        raise ValueError(
            f"a step-time fit needs {LEAST_OBSERVATIONS} observed steps, got {len(observations)}"
        )
    table = StepTable.of(observations)
    held_out = observations[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    is_training = np.arange(table.num_steps) % _HELD_OUT_EVERY != _HELD_OUT_EVERY - 1
    training = table.where(is_training)
    fits: tuple[Callable[[StepTable], AnyModel], ...] = (
        fit_linear,
        fit_roofline,
        fit_echo,
        fit_echo_base,
    )
    fitted = [_judged(fit(training), fit(table), held_out) for fit in fits]
    return sorted(fitted, key=lambda each: each.held_out_mape)


def _judged(trained: AnyModel, final: AnyModel, held_out: Sequence[Observation]) -> FittedModel:
    errors = [abs(trained.predict_s(load) - took_s) / took_s for load, took_s in held_out]
    return FittedModel(final, float(np.mean(errors)), float(np.quantile(errors, 0.95)), len(errors))
