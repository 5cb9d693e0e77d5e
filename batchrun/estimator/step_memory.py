"""A bounded memory of observed steps that does not forget rare kinds of step.

Steps are filed by kind (prefill, decode, mixed), by size and by context; each cell keeps its
latest. So an hour of decodes cannot push out what prefills cost, and what the prior says about a
kind of step is overwritten by the first steps of that kind, not averaged with them.
"""

from __future__ import annotations

import numpy as np

from batchrun.estimator.step_load import NUM_KINDS, StepLoad
from batchrun.estimator.step_table import NUM_COLUMNS, StepTable, load_row

STEPS_PER_CELL = 16
LEAST_WEIGHT = 0.1
"""What an old step still weighs beside a new one: it may be the only one of its kind."""

_SIZES = 16
_CONTEXTS = 12
_NUM_CELLS = NUM_KINDS * _SIZES * _CONTEXTS


class StepMemory:
    """At most STEPS_PER_CELL steps in each of 576 cells: 1 MB."""

    def __init__(self, half_life_steps: float) -> None:
        """A step's weight halves with every `half_life_steps` observed after it."""
        num_rows = _NUM_CELLS * STEPS_PER_CELL
        self._half_life_steps = half_life_steps
        self._rows = np.zeros((num_rows, NUM_COLUMNS))
        self._seconds = np.zeros(num_rows)
        self._seen_at_step = np.zeros(num_rows)
        self._prior_weight = np.zeros(num_rows)
        self._next_slot = [0] * _NUM_CELLS
        self._num_seen = 0

    @property
    def num_seen(self) -> int:
        """How many steps were observed in all."""
        return self._num_seen

    def add(self, load: StepLoad, step_s: float) -> None:
        """Keep an observed step in place of the oldest of its cell. 3 us."""
        cell = _cell_of(load)
        slot = self._next_slot[cell]
        self._next_slot[cell] = (slot + 1) % STEPS_PER_CELL
        self._num_seen += 1
        row = cell * STEPS_PER_CELL + slot
        self._rows[row] = load_row(load)
        self._seconds[row] = step_s
        self._seen_at_step[row] = self._num_seen
        self._prior_weight[row] = 0.0

    def add_prior(self, load: StepLoad, step_s: float, weight: float) -> None:
        """Keep what is believed of such a step until it is observed. Only before any `add`."""
        cell = _cell_of(load)
        rows = slice(cell * STEPS_PER_CELL, (cell + 1) * STEPS_PER_CELL)
        free = np.flatnonzero(self._seconds[rows] == 0.0)
        if free.size:
            row = cell * STEPS_PER_CELL + int(free[0])
            self._rows[row] = load_row(load)
            self._seconds[row] = step_s
            self._prior_weight[row] = weight

    def table(self) -> StepTable:
        """All steps kept, weighed by age (observed) or as given (believed)."""
        kept = np.flatnonzero(self._seconds)
        age_steps = self._num_seen - self._seen_at_step[kept]
        by_age = np.maximum(0.5 ** (age_steps / self._half_life_steps), LEAST_WEIGHT)
        prior_weight = self._prior_weight[kept]
        weights = np.where(prior_weight > 0.0, prior_weight, by_age)
        return StepTable(self._rows[kept].T.copy(), self._seconds[kept], weights)


def _cell_of(load: StepLoad) -> int:
    """Kind, then powers of two of the tokens, then powers of four of the contexts."""
    size = min(load.num_tokens.bit_length(), _SIZES - 1)
    context = min(load.context_tokens.bit_length() // 2, _CONTEXTS - 1)
    return (load.kind * _SIZES + size) * _CONTEXTS + context
