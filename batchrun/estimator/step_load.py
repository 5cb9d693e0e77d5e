"""What one engine step has to compute, added up by request, and observed steps as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from batchrun.estimator.least_squares import FloatArray, first_guess

NUM_KINDS = 3
"""Prefills alone, decodes alone, both: see `StepLoad.kind`."""


@dataclass(slots=True)
class StepLoad:
    """Running totals over the requests of one step: all that the step-time models read.

    Mutable, for the hot path. Totals are exact: every float is a multiple of one half and stays
    exact up to 2**52. Equality compares totals, not the order of adding.

    Measured at 256 decodes on one core: `add` 0.26 us, `copy` 1 us, `remove` of a prefill
    0.24 us, of a decode 1.4 us (3.7 us when it was the longest).
    """

    num_requests: int = 0
    num_tokens: int = 0
    context_tokens: int = 0
    """Sum of the contexts that attention reads, prefills and decodes alike."""
    attention_pairs: float = 0.0
    """Sum of new * (context - new / 2): (query, key) pairs. One prompt's chunks add up to the
    pairs of the whole prompt, l**2 / 2, however it was cut."""
    num_decodes: int = 0
    decode_context_tokens: int = 0
    max_decode_context_tokens: int = 0
    _decode_contexts: list[int] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int, bool]]) -> StepLoad:
        """The load of `(new_tokens, context_tokens, is_decode)` for each request of a step."""
        load = cls()
        for new_tokens, context_tokens, is_decode in requests:
            load.add(new_tokens, context_tokens, is_decode=is_decode)
        return load

    @property
    def kind(self) -> int:
        """0 without decodes, 1 without prefills, 2 with both."""
        if not self.num_decodes:
            return 0
        return 1 if self.num_decodes == self.num_requests else 2

    def add(self, new_tokens: int, context_tokens: int, *, is_decode: bool = False) -> None:
        """Add a request that computes `new_tokens` and then holds `context_tokens` in all.

        `context_tokens` counts computed and new tokens. A decode is a request with one new token
        and `is_decode`; anything else is a prefill, the last token of a prompt included.
        """
        self.num_requests += 1
        self.num_tokens += new_tokens
        self.context_tokens += context_tokens
        self.attention_pairs += new_tokens * (context_tokens - 0.5 * new_tokens)
        if is_decode and new_tokens == 1:
            self.num_decodes += 1
            self.decode_context_tokens += context_tokens
            self._decode_contexts.append(context_tokens)
            if context_tokens > self.max_decode_context_tokens:
                self.max_decode_context_tokens = context_tokens

    def add_decodes(self, contexts: Sequence[int]) -> None:
        """`add` of a decode for each of these contexts, of which there is at least one."""
        num, total = len(contexts), sum(contexts)
        self.num_requests += num
        self.num_tokens += num
        self.context_tokens += total
        self.attention_pairs += total - 0.5 * num
        self.num_decodes += num
        self.decode_context_tokens += total
        self._decode_contexts += contexts
        self.max_decode_context_tokens = max(self.max_decode_context_tokens, *contexts)

    def remove(self, new_tokens: int, context_tokens: int, *, is_decode: bool = False) -> None:
        """Undo one `add` with the same arguments. ValueError when there is no such decode."""
        if is_decode and new_tokens == 1:
            contexts = self._decode_contexts
            contexts.remove(context_tokens)
            self.num_decodes -= 1
            self.decode_context_tokens -= context_tokens
            if context_tokens == self.max_decode_context_tokens:
                self.max_decode_context_tokens = max(contexts, default=0)
        self.num_requests -= 1
        self.num_tokens -= new_tokens
        self.context_tokens -= context_tokens
        self.attention_pairs -= new_tokens * (context_tokens - 0.5 * new_tokens)

    def totals(self) -> StepLoad:
        """An independent load with the same totals, for models only: it forgets the single decodes,
        and so cannot `remove` one."""
        return StepLoad(
            self.num_requests,
            self.num_tokens,
            self.context_tokens,
            self.attention_pairs,
            self.num_decodes,
            self.decode_context_tokens,
            self.max_decode_context_tokens,
        )

    def copy(self) -> StepLoad:
        """An independent load with the same totals."""
        return StepLoad(
            self.num_requests,
            self.num_tokens,
            self.context_tokens,
            self.attention_pairs,
            self.num_decodes,
            self.decode_context_tokens,
            self.max_decode_context_tokens,
            self._decode_contexts.copy(),
        )


LEAST_OF_SIZE = 5
"""Gaps that give a steady median; a slow engine has so many after its first calls of one size."""
LEAST_GAP_SHARE = 0.1
"""Of the steps that have a gap before them. Probes leave one before nine in ten steps where none is
scheduled ahead (three in four on a slow engine, which gets to the short ones), else hardly any."""

ObservedGap = tuple[int, float]
"""Requests in the step before, and the seconds until the next one began."""


class StepGap(Struct, frozen=True, forbid_unknown_fields=True):
    """Where vLLM has one step in flight, as on a CPU, the device waits while vLLM takes a step's
    tokens in and schedules the next: `base_s`, and `request_s` for each request in the step before.
    """

    base_s: Annotated[float, Meta(ge=0)]
    request_s: Annotated[float, Meta(ge=0)]

    def predict_s(self, num_requests: int) -> float:
        """The gap after a step with so many requests."""
        return self.base_s + self.request_s * num_requests


def fit_gap(gaps: Sequence[ObservedGap], num_steps: int) -> StepGap | None:
    """The least-squares line through the medians of the gaps after steps of equal size.

    Medians, since the calls of a calibration come in crowds, and taking a crowd in is no matter of
    the step before. Each size counts once if it has LEAST_OF_SIZE gaps; with fewer than two such
    sizes the median of all gaps holds for every size. None where few of `num_steps` steps have a
    gap: an engine that schedules ahead.
    """
    if len(gaps) < max(LEAST_OF_SIZE, LEAST_GAP_SHARE * num_steps):
        return None
    sizes, seconds = np.asarray(gaps, np.float64).T
    known, counts = np.unique(sizes, return_counts=True)
    known = known[counts >= LEAST_OF_SIZE]
    if known.size < 2:
        return StepGap(max(0.0, float(np.median(seconds))), 0.0)
    medians = np.array([max(1e-9, float(np.median(seconds[sizes == size]))) for size in known])
    design = np.column_stack([np.ones(len(known)), known])
    base_s, request_s = first_guess(design, medians, np.ones(len(known)))
    return StepGap(float(base_s), float(request_s))


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


STEPS_PER_CELL = 16
LEAST_WEIGHT = 0.1
"""What an old step still weighs beside a new one: it may be the only one of its kind."""

_SIZES = 16
_CONTEXTS = 12
_NUM_CELLS = NUM_KINDS * _SIZES * _CONTEXTS


class StepMemory:
    """The latest STEPS_PER_CELL steps in each of 576 cells, by kind, size and context: 1 MB.

    An hour of decodes cannot push out what prefills cost, and the first steps of a kind overwrite
    what was believed of it.
    """

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
