"""Fit of Echo's model with a constant: all coefficients at once, and lambda in between.

Once it is known for each step whether its prefill is at the floor, and which of prefill and decode
takes longer, the law is linear in everything but lambda.
"""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np

from batchrun.estimator.echo_fit import fit_echo, fit_mix, work_columns
from batchrun.estimator.least_squares import ROUNDS, FloatArray, fit_piecewise
from batchrun.estimator.share_search import best_of, search_share
from batchrun.estimator.step_table import StepTable
from batchrun.estimator.step_time import EchoBaseModel, EchoModel

_ScoredEcho = tuple[float, EchoBaseModel]
"""A model with its mean log error; smaller is better."""

START_SHARES = (0.0, 0.5, 0.9)
"""First guesses at the base, as shares of what the shortest steps take."""

_SHORTEST = 0.02
_MIX_TURNS = 4
_MIX_REACH = 0.15


def fit_echo_base(table: StepTable) -> EchoBaseModel:
    """Fit from scratch, from several guesses at the base, then search lambda nearby."""
    starts = [_guess(table, share) for share in START_SHARES]
    best = best_of(_in_turns(table, start) for start in starts)

    def near(mix: float) -> _ScoredEcho:
        return polish_echo_base(table, replace(best[1], mix=mix), ROUNDS)

    return best_of([best, search_share(near, best[1].mix, _MIX_REACH)])[1]


def shortest_s(table: StepTable) -> float:
    """What the shortest steps take, outliers aside."""
    return float(np.quantile(table.seconds, _SHORTEST))


def _guess(table: StepTable, share: float) -> EchoBaseModel:
    """Echo's staged fit to what is left of each step when the base is `share` of the shortest."""
    base_s = share * shortest_s(table)
    return with_base(fit_echo(_without(table, base_s)), base_s)


def with_base(echo: EchoModel, base_s: float) -> EchoBaseModel:
    """Echo's coefficients with a base beside them."""
    alpha, beta, floor_s, gamma, delta, mix = astuple(echo)[:6]
    return EchoBaseModel(alpha, beta, floor_s, gamma, delta, mix, base_s)


def _in_turns(table: StepTable, start: EchoBaseModel) -> _ScoredEcho:
    """Improve lambda and the other coefficients in turns for as long as the error falls."""
    best = polish_echo_base(table, start, ROUNDS)
    is_mixed = (table.decodes > 0) & (table.decodes < table.requests)
    if not is_mixed.any():
        return best
    for _ in range(_MIX_TURNS):
        mixed = _without(table.where(is_mixed), best[1].base_s)
        asked = replace(best[1], mix=fit_mix(best[1], mixed))
        turned = polish_echo_base(table, asked, ROUNDS)
        if turned[0] >= best[0]:
            break
        best = turned
    return best


def _without(table: StepTable, base_s: float) -> StepTable:
    """What the steps take beyond the base; at least a hundredth of what they took."""
    return table.with_seconds(np.maximum(table.seconds - base_s, 0.01 * table.seconds))


def polish_echo_base(table: StepTable, start: EchoBaseModel, rounds: int) -> _ScoredEcho:
    """Improve every coefficient but lambda, in at most `rounds` least-squares rounds."""
    work = work_columns(table)
    mean_decode = table.decode_context / np.maximum(table.decodes, 1.0)
    mix = start.mix

    def design_at(found: FloatArray) -> FloatArray:
        is_floor = work @ found[1:3] < found[3]
        prefill_s = np.where(is_floor, found[3], work @ found[1:3])
        decode_s = found[4] * table.max_decode_context + found[5] * mean_decode
        prefill, decode = _weights(table, prefill_s > decode_s, mix)
        return np.column_stack((
            np.ones(table.num_steps),
            work * (prefill * ~is_floor)[:, None],
            prefill * is_floor,
            decode * table.max_decode_context,
            decode * mean_decode,
        ))

    *pooled, _, base_s = astuple(start)
    begin = np.array([base_s, *pooled])
    found, error = fit_piecewise(design_at, begin, table.seconds, table.weights, rounds)
    base_s, alpha, beta, floor_s, gamma, delta = found.tolist()
    return error, EchoBaseModel(alpha, beta, floor_s, gamma, delta, mix, base_s)


def _weights(
    table: StepTable, is_prefill_larger: FloatArray, mix: float
) -> tuple[FloatArray, FloatArray]:
    """What Eq. 8 multiplies prefill and decode time with, in each step."""
    has_prefill, has_decode = table.decodes < table.requests, table.decodes > 0
    larger = np.where(is_prefill_larger, mix, 1.0 - mix)
    prefill = np.where(has_decode, larger, 1.0) * has_prefill
    decode = np.where(has_prefill, 1.0 - larger, 1.0) * has_decode
    return prefill, decode
