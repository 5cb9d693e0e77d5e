"""A search over one share between 0 and 1, for laws that are linear in everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Model = TypeVar("Model")

_GOLDEN = 0.618034
_GOLDEN_STEPS = 14


def best_of(scored: Iterable[tuple[float, Model]]) -> tuple[float, Model]:
    """The pair with the smallest error; the first of equals."""
    return min(scored, key=lambda each: each[0])


def search_share(
    score_at: Callable[[float], tuple[float, Model]], around: float, reach: float
) -> tuple[float, Model]:
    """The best `(error, model)` that `score_at` gives for a share within `reach` of `around`.

    A golden-section search: right where the error has one minimum there; 16 calls.
    """
    low, high = max(0.0, around - reach), min(1.0, around + reach)
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
