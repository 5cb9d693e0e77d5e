"""How much steps differ that computed the very same: what no model of the load can predict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchrun.estimator.step_table import Observation, load_row

LEAST_IDENTICAL = 5
"""Fewer equal steps say too little of their median: it follows them, and the spread looks smaller
than it is (by a sixth at 5 steps, by a tenth at 10)."""


@dataclass(frozen=True, slots=True)
class IdenticalSpread:
    """Steps with equal loads, against the median of their group.

    `mean_ape` is the mean of |median - measured| / measured, a share: the error of a model that
    knew each group's median, and so an error that no model of the load gets under for long.
    0 without such steps.
    """

    mean_ape: float
    num_steps: int
    num_groups: int


def identical_spread(observations: Sequence[Observation]) -> IdenticalSpread:
    """The spread within groups of at least LEAST_IDENTICAL steps whose totals are all equal."""
    groups: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for load, step_s in observations:
        groups[load_row(load)].append(step_s)
    alike = [np.array(group) for group in groups.values() if len(group) >= LEAST_IDENTICAL]
    errors = [abs(np.median(group) - group) / group for group in alike]
    if not errors:
        return IdenticalSpread(0.0, 0, 0)
    joined = np.concatenate(errors)
    return IdenticalSpread(float(joined.mean()), len(joined), len(alike))
