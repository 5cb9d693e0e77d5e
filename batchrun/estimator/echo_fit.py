"""Fit of Echo's model in three stages, as the paper's micro-benchmarks separate them.

Eq. 7 on the steps without prefills; Eq. 6 on those without decodes, alternating between steps at
the floor and above it; then the lambda of Eq. 8 on the mixed steps with both parts fixed.
"""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import numpy.typing as npt

from batchrun.estimator.least_squares import ROUNDS, FloatArray, first_guess, fit_piecewise
from batchrun.estimator.step_table import StepTable
from batchrun.estimator.step_time import EchoModel

_FLOOR_QUANTILES = (0.0, 0.2, 0.4, 0.6, 0.8)
_NOTHING_KNOWN = EchoModel(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def fit_echo(table: StepTable, start: EchoModel | None = None, rounds: int = ROUNDS) -> EchoModel:
    """Improve on `start` in at most `rounds` rounds a stage, or fit from scratch without one.

    A stage without steps of its kind keeps the coefficients of `start` (0, and a lambda of 1).
    """
    begin = start or _NOTHING_KNOWN
    alpha, beta, floor_s, gamma, delta, mix = astuple(begin)
    prefills = table.where(table.decodes == 0)
    if prefills.num_steps:
        known = np.array([alpha, beta, floor_s]) if start else None
        alpha, beta, floor_s = _fit_prefill(prefills, known, rounds).tolist()
    decodes = table.where(table.decodes == table.requests)
    if decodes.num_steps:
        known = np.array([gamma, delta]) if start else None
        gamma, delta = _fit_decode(decodes, known, rounds).tolist()
    parts = EchoModel(alpha, beta, floor_s, gamma, delta, mix)
    mixed = table.where((table.decodes > 0) & (table.decodes < table.requests))
    return replace(parts, mix=fit_mix(parts, mixed)) if mixed.num_steps else parts


def _fit_prefill(table: StepTable, known: FloatArray | None, rounds: int) -> FloatArray:
    """alpha, beta and c of Eq. 6, from what is known or from several guesses at the floor."""
    work = work_columns(table)

    def design_at(found: FloatArray) -> FloatArray:
        return _prefill_design(work, work @ found[:2] < found[2])

    starts = [known] if known is not None else _prefill_guesses(table, work)
    scored = [
        fit_piecewise(design_at, each, table.seconds, table.weights, rounds) for each in starts
    ]
    return min(scored, key=lambda each: each[1])[0]


def _prefill_guesses(table: StepTable, work: FloatArray) -> list[FloatArray]:
    """Fits that take the steps below several sizes to be at the floor."""
    cuts = np.quantile(table.tokens, _FLOOR_QUANTILES)
    designs = [_prefill_design(work, table.tokens < cut) for cut in cuts]
    return [first_guess(design, table.seconds, table.weights) for design in designs]


def work_columns(table: StepTable) -> FloatArray:
    """Per step what alpha and beta multiply: see `EchoModel` on the squares of chunks."""
    pairs = table.pairs - table.decode_context + 0.5 * table.decodes
    return np.column_stack((2.0 * pairs, table.tokens - table.decodes))


def _prefill_design(work: FloatArray, is_floor: npt.NDArray[np.bool_]) -> FloatArray:
    return np.column_stack((work * ~is_floor[:, None], is_floor.astype(np.float64)))


def _fit_decode(table: StepTable, known: FloatArray | None, rounds: int) -> FloatArray:
    """gamma and delta of Eq. 7."""
    design = _decode_columns(table)
    begin = first_guess(design, table.seconds, table.weights) if known is None else known
    return fit_piecewise(lambda _: design, begin, table.seconds, table.weights, rounds)[0]


def _decode_columns(table: StepTable) -> FloatArray:
    return np.column_stack((table.max_decode_context, table.decode_context / table.decodes))


def fit_mix(parts: EchoModel, mixed: StepTable) -> float:
    """lambda: the weighted median of the values that the mixed steps ask for, within [0, 1].

    Weighing each by how far lambda moves its prediction makes it the least mean relative error.
    """
    work_s = work_columns(mixed) @ (parts.prefill_square_s, parts.prefill_token_s)
    prefill_s = np.maximum(work_s, parts.prefill_floor_s)
    decode_s = _decode_columns(mixed) @ (parts.decode_max_s, parts.decode_mean_s)
    smaller_s = np.minimum(prefill_s, decode_s)
    gap_s = np.abs(prefill_s - decode_s)
    moves = gap_s > 0.0
    if not moves.any():
        return parts.mix
    asked = (mixed.seconds - smaller_s)[moves] / gap_s[moves]
    order = np.argsort(asked)
    reach = np.cumsum((mixed.weights * gap_s / mixed.seconds)[moves][order])
    middle = float(asked[order][np.searchsorted(reach, 0.5 * reach[-1])])
    return min(1.0, max(0.0, middle))
