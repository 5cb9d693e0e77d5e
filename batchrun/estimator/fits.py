"""Fits of all step-time models to one set of observed steps, judged on held-out ones.

Every fit minimises relative errors with non-negative coefficients and bounded outliers
(`least_squares`). A law with branches is linear, but for one share, once each step's branch is
known: its fit alternates between branches and coefficients, and searches the share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from msgspec.structs import astuple, replace

from batchrun.estimator.least_squares import ROUNDS, FloatArray, first_guess, fit_piecewise
from batchrun.estimator.step_load import Observation, StepTable
from batchrun.estimator.step_time import (
    AnyModel,
    EchoBaseModel,
    EchoModel,
    LinearModel,
    RooflineModel,
)

_FLOOR_QUANTILES = (0.0, 0.2, 0.4, 0.6, 0.8)
LEAST_MIX = 0.5
"""The least lambda that is fitted."""
_NOTHING_KNOWN = EchoModel(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def fit_echo(table: StepTable, start: EchoModel | None = None, rounds: int = ROUNDS) -> EchoModel:
    """Improve on `start` in at most `rounds` rounds a stage, or fit from scratch without one.

    In three stages, as the paper's micro-benchmarks separate them: Eq. 6 on the steps without
    decodes, Eq. 7 on those without prefills, then the lambda of Eq. 8 on the mixed steps.

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
    """lambda: the weighted median of the values that the mixed steps ask for, within [0.5, 1].

    Below a half the smaller part would count for more than the larger, and a long prefill beside a
    decode for hardly more than the decode.
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
    return min(1.0, max(LEAST_MIX, middle))


Model = TypeVar("Model")

_GOLDEN = 0.618034
_GOLDEN_STEPS = 14


def best_of(scored: Iterable[tuple[float, Model]]) -> tuple[float, Model]:
    """The pair with the smallest error; the first of equals."""
    return min(scored, key=lambda each: each[0])


def search_share(
    score_at: Callable[[float], tuple[float, Model]],
    around: float,
    reach: float,
    least: float = 0.0,
) -> tuple[float, Model]:
    """The best `(error, model)` that `score_at` gives for a share within `reach` of `around`.

    A golden-section search: right where the error has one minimum there; 16 calls.
    """
    low, high = max(least, around - reach), min(1.0, around + reach)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = score_at(left), score_at(right)
    for _ in range(_GOLDEN_STEPS):
        if at_left[0] < at_right[0]:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = score_at(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = score_at(right)
    return best_of([at_left, at_right])


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

    return best_of([best, search_share(near, best[1].mix, _MIX_REACH, LEAST_MIX)])[1]


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


LEAST_OBSERVATIONS = 10

_HELD_OUT_EVERY = 5


class FittedModel(Struct, frozen=True, forbid_unknown_fields=True):
    """A model, with its errors on steps that the coefficients had not seen.

    An error is |predicted - measured| / measured, a share.
    """

    model: AnyModel
    held_out_mape: Annotated[float, Meta(ge=0)]
    held_out_p95_ape: Annotated[float, Meta(ge=0)]
    num_held_out: Annotated[int, Meta(ge=1)]


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
