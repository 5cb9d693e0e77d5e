"""The time between two steps in which an engine without steps in flight computes nothing.

Where vLLM has one step in flight, as on a CPU, it takes a step's tokens in, lets new requests in
and schedules the next step while the device waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchrun.estimator.least_squares import first_guess

LEAST_GAPS = 50
"""Fewer gaps say nothing."""
LEAST_OF_SIZE = 5

ObservedGap = tuple[int, float]
"""Requests in the step before, and the seconds until the next one began."""


@dataclass(frozen=True, slots=True)
class StepGap:
    """`base_s`, and `request_s` for each request in the step before."""

    base_s: float
    request_s: float

    def predict_s(self, num_requests: int) -> float:
        """The gap after a step with so many requests."""
        return self.base_s + self.request_s * num_requests


def fit_gap(gaps: Sequence[ObservedGap]) -> StepGap | None:
    """The least-squares line through the medians of the gaps after steps of equal size.

    Medians, since the calls of a calibration come in crowds, and taking a crowd in is no matter of
    the step before. Each size counts once if it has LEAST_OF_SIZE gaps. None for fewer than
    LEAST_GAPS in all: an engine that schedules a step ahead has none.
    """
    if len(gaps) < LEAST_GAPS:
        return None
    sizes, seconds = np.asarray(gaps, np.float64).T
    known, counts = np.unique(sizes, return_counts=True)
    known = known[counts >= LEAST_OF_SIZE]
    if not known.size:
        return None
    medians = np.array([max(1e-9, float(np.median(seconds[sizes == size]))) for size in known])
    design = np.column_stack([np.ones(len(known)), known])
    base_s, request_s = first_guess(design, medians, np.ones(len(known)))
    return StepGap(float(base_s), float(request_s))
