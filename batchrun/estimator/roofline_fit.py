"""Fit of the roofline: alternate between the sides of the roof, search what overlap hides."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import numpy.typing as npt

from batchrun.estimator.least_squares import ROUNDS, FloatArray, first_guess, fit_piecewise
from batchrun.estimator.share_search import best_of, search_share
from batchrun.estimator.step_table import StepTable
from batchrun.estimator.step_time import RooflineModel

_ScoredRoofline = tuple[float, RooflineModel]
"""A model with its mean log error; smaller is better."""

START_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where steps are first told apart by their tokens: the alternation only finds the next minimum."""

_COARSE_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_UNHIDDEN_REACH = 0.2


def fit_roofline(table: StepTable) -> RooflineModel:
    """The best roofline over `unhidden` in [0, 1]; 0.1 s for 500 steps."""
    cuts = [float(cut) for cut in np.quantile(table.tokens, START_QUANTILES)]
    coarse = [
        polish_roofline(table, split_by_size(table, cut, unhidden), ROUNDS)
        for unhidden in _COARSE_SHARES
        for cut in cuts
    ]
    best = best_of(coarse)

    def near(unhidden: float) -> _ScoredRoofline:
        return polish_roofline(table, replace(best[1], unhidden=unhidden), ROUNDS)

    return best_of([best, search_share(near, best[1].unhidden, _UNHIDDEN_REACH)])[1]


def split_by_size(table: StepTable, above_tokens: float, unhidden: float) -> RooflineModel:
    """A first roofline: steps of more than `above_tokens` are taken to be bound by compute."""
    design = _design(table, unhidden, table.tokens > above_tokens)
    found = first_guess(design, table.seconds, table.weights)
    return _model(found, unhidden)


def polish_roofline(table: StepTable, start: RooflineModel, rounds: int) -> _ScoredRoofline:
    """Improve every coefficient but `unhidden`, in at most `rounds` least-squares rounds."""
    unhidden = start.unhidden

    def design_at(found: FloatArray) -> FloatArray:
        compute_s = found[1] * table.tokens + found[2] * table.pairs
        memory_s = found[3] + found[4] * table.context
        return _design(table, unhidden, compute_s > memory_s)

    begin = np.array(astuple(start)[:-1])
    found, error = fit_piecewise(design_at, begin, table.seconds, table.weights, rounds)
    return error, _model(found, unhidden)


def _model(found: FloatArray, unhidden: float) -> RooflineModel:
    base_s, token_s, pair_s, weights_s, context_s = found.tolist()
    return RooflineModel(base_s, token_s, pair_s, weights_s, context_s, unhidden)


def _design(table: StepTable, unhidden: float, is_compute: npt.NDArray[np.bool_]) -> FloatArray:
    """Columns in the order of the model's coefficients; linear once each step's side is chosen."""
    compute = np.where(is_compute, 1.0, unhidden)
    memory = np.where(is_compute, unhidden, 1.0)
    return np.column_stack((
        np.ones(table.num_steps),
        table.tokens * compute,
        table.pairs * compute,
        memory,
        table.context * memory,
    ))
