"""Observed steps as columns, for the fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from batchrun.estimator.least_squares import FloatArray
from batchrun.estimator.step_load import StepLoad

Observation = tuple[StepLoad, float]
"""A step's load and how many seconds it took."""

NUM_COLUMNS = 7


def load_row(load: StepLoad) -> tuple[float, ...]:
    """The load as one row of a `StepTable`; keeps no reference to it."""
    return (
        load.num_tokens,
        load.attention_pairs,
        load.context_tokens,
        load.decode_context_tokens,
        load.num_requests,
        load.num_decodes,
        load.max_decode_context_tokens,
    )


class StepTable:
    """Loads as columns, with the seconds and the weight of each step. Never changes.

    One array per total of `StepLoad`: `tokens`, `pairs`, `context` (tokens), `decode_context`
    (tokens), `requests`, `decodes`, `max_decode_context` (tokens).
    """

    def __init__(self, columns: FloatArray, seconds: FloatArray, weights: FloatArray) -> None:
        """`columns` has NUM_COLUMNS rows, in the order of `load_row`."""
        self._columns = columns
        self.seconds = seconds
        self.weights = weights
        self.tokens: FloatArray = columns[0]
        self.pairs: FloatArray = columns[1]
        self.context: FloatArray = columns[2]
        self.decode_context: FloatArray = columns[3]
        self.requests: FloatArray = columns[4]
        self.decodes: FloatArray = columns[5]
        self.max_decode_context: FloatArray = columns[6]

    @classmethod
    def of(cls, observations: Sequence[Observation]) -> StepTable:
        """All steps weigh the same. Raises ValueError when a step took no time."""
        rows = np.array([load_row(load) for load, _ in observations], dtype=np.float64)
        seconds = np.array([took_s for _, took_s in observations], dtype=np.float64)
        if not np.all(seconds > 0.0):
            raise ValueError("every observed step must have taken more than 0 s")
        return cls(rows.reshape(-1, NUM_COLUMNS).T.copy(), seconds, np.ones(len(seconds)))

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return len(self.seconds)

    def where(self, keep: npt.NDArray[np.bool_]) -> StepTable:
        """The steps for which `keep` is true."""
        return StepTable(self._columns[:, keep], self.seconds[keep], self.weights[keep])

    def with_seconds(self, seconds: FloatArray) -> StepTable:
        """The same loads and weights with other durations."""
        return StepTable(self._columns, seconds, self.weights)
