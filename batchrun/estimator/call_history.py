"""How many online calls come, and how long their answers become: from those seen so far.

Calls never tell. One in flight says as much as one that ended: its answer is longer than what it
has generated. A life table (Kaplan and Meier, J. Am. Stat. Assoc. 53, 1958) counts both, so answers
are known to be long before the first of them has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from batchrun.estimator.least_squares import FloatArray

RATE_MEMORY_S = 60.0
"""So far back the rate of arrivals looks."""
FIRST_RATE_S = 2.0
"""The first call says that one comes in so many seconds."""
STEPS_PER_DOUBLING = 4
FIRST_EDGE_TOKENS = 16
NUM_DOUBLINGS = 12
EDGES_TOKENS: FloatArray = np.concatenate([
    [0.0],
    FIRST_EDGE_TOKENS
    * 2 ** (np.arange(NUM_DOUBLINGS * STEPS_PER_DOUBLING + 1) / STEPS_PER_DOUBLING),
])
"""The ages at which the life table has an entry; no answer is taken to outgrow the last, 65,536."""
PRIOR_CALLS = 0.5
"""What is expected before any answer has ended counts as so many."""
PRIOR_SHAPE = (1.4, 4.0)
PRIOR_SHAPE_GROWTH = 1 / 16
"""It is then that 2^-k of the calls of an age go on for as long again: k is the first
of these, which is cautious, and more with each answer that has ended, up to the second."""
REMEMBERED_CALLS = 1_000
"""Counts halve when there are twice as many."""
LIKELY_LEVEL = 0.9
FIRST_LIKELY_TOKENS = 512
"""Nine of ten answers are taken to stay within so many while few of them have ended."""
LEAST_ENDED = 32
"""Of fewer answers nothing is concluded."""
MAX_PROMISES = 64
NUM_AGES = NUM_DOUBLINGS * STEPS_PER_DOUBLING + 1
Promise = tuple[float, float, float]
"""The bounds of a class: TTFT, TPOT and completion."""
_Count = Annotated[int, Meta(ge=0)]
_Weights = Annotated[
    list[Annotated[float, Meta(ge=0, le=4 * REMEMBERED_CALLS)]],
    Meta(min_length=NUM_AGES, max_length=NUM_AGES),
]


class _Kept(Struct, array_like=True):
    """What outlives an engine of what its calls' answers have taught."""

    served_by: str
    ended: _Weights
    num_ended: _Count
    lengths: list[tuple[Promise | None, _Weights]]


class _Lengths:
    """How long the last answers of one kind were."""

    def __init__(self, weights: Sequence[float] = (0.0,) * NUM_AGES) -> None:
        self.weights = np.array(weights)
        self.likely_tokens = float(FIRST_LIKELY_TOKENS)
        """What nine of ten stayed within, as of the last `LEAST_ENDED`."""
        self.num_ended = int(self.weights.sum())
        if self.num_ended >= LEAST_ENDED:
            self._look()

    def ended(self, place: int) -> None:
        """One more, between the edges at this place."""
        self.weights[place] += 1
        self.num_ended += 1
        if self.weights.sum() >= 2 * REMEMBERED_CALLS:
            self.weights /= 2
        if self.num_ended % LEAST_ENDED == 0:
            self._look()

    def _look(self) -> None:
        within = np.concatenate([[0.0], np.cumsum(self.weights)]) / self.weights.sum()
        self.likely_tokens = float(np.interp(LIKELY_LEVEL, within, EDGES_TOKENS))


class CallHistory:
    """Arrivals and answers of the calls of one engine. A call costs a few microseconds.

    `num_judged` answers have ended since it was first asked what nine of ten of their class stay
    within; `num_longer` of them did not.
    """

    def __init__(self) -> None:
        self._rate_calls = self._rate_s = 0.0
        self._seen_at_s: float | None = None
        self._reached, self._ended = np.zeros(NUM_AGES), np.zeros(NUM_AGES)
        self._num_ended = 0
        self._lengths: dict[Promise | None, _Lengths] = {None: _Lengths()}
        self._told: dict[Promise | None, float] = {}
        self.num_judged = self.num_longer = 0

    def begun(self, at_s: float) -> None:
        """A call has come in."""
        self._forget_until(at_s)
        self._rate_calls += 1

    def ended(self, num_tokens: int, promise: Promise | None = None) -> None:
        """An answer to a call with this promise is complete; None where that bounds no end. One
        that its client gave up tells nothing: leave it out."""
        place = int(np.searchsorted(EDGES_TOKENS[:-1], num_tokens)) - 1
        if place < 0:
            return
        if promise in self._told:
            self.num_judged += 1
            self.num_longer += num_tokens > self._told[promise]
        for kind in {None, promise}:
            if kind in self._lengths or len(self._lengths) < MAX_PROMISES:
                self._lengths.setdefault(kind, _Lengths()).ended(place)
        self._reached[: place + 1] += 1
        self._ended[place] += 1
        self._num_ended += 1
        if self._reached[0] >= 2 * REMEMBERED_CALLS:
            self._reached /= 2
            self._ended /= 2

    def likely_tokens(self, most_tokens: int, promise: Promise | None = None) -> int:
        """What 9 of 10 answers to calls with this promise stay within, at most so many. While few
        of them have ended those of all calls count."""
        lengths = self._lengths.get(promise)
        if lengths is None or lengths.num_ended < LEAST_ENDED:
            lengths = self._lengths[None]
        self._told[promise] = lengths.likely_tokens
        return min(most_tokens, math.ceil(lengths.likely_tokens))

    def keep(self, served_by: str) -> bytes:
        """What the answers have taught, for an engine that serves the same. 0.1 ms."""
        lengths = [(kind, each.weights.tolist()) for kind, each in self._lengths.items()]
        kept = _Kept(served_by, self._ended.tolist(), self._num_ended, lengths)
        return msgspec.msgpack.encode(kept)

    def recall(self, kept: bytes, served_by: str) -> None:
        """Begin with what was kept. Raises ValueError where that is none of ours, or of an engine
        that serves something else."""
        try:
            found = msgspec.msgpack.decode(kept, type=_Kept)
        except msgspec.DecodeError as error:
            raise ValueError(f"no history of answers: {error}") from error
        if found.served_by != served_by:
            raise ValueError(f"a history of answers of {found.served_by}, not of {served_by}")
        self._ended = np.array(found.ended)
        # None was cut short: as many had reached an age as ended at it or later.
        self._reached = np.cumsum(self._ended[::-1])[::-1]
        self._num_ended = found.num_ended
        for kind, weights in islice(found.lengths, MAX_PROMISES):
            self._lengths[kind] = _Lengths(weights)

    def rate_per_s(self, now_s: float) -> float:
        """Calls per second of late."""
        self._forget_until(now_s)
        return self._rate_calls / (self._rate_s + FIRST_RATE_S)

    def rate_error(self) -> float:
        """The standard error of that rate as a share of it: calls come by chance (Poisson)."""
        return 1 / math.sqrt(max(self._rate_calls, 1.0))

    def longer_shares(self, generated_tokens: Sequence[int]) -> FloatArray:
        """The share of answers that are longer than each of `EDGES_TOKENS`, where calls in flight
        have generated so many tokens. About 50 us with 50 calls."""
        ages = np.asarray(generated_tokens, np.float64)[:, None]
        passed = np.clip((ages - EDGES_TOKENS[:-1]) / np.diff(EDGES_TOKENS), 0.0, 1.0).sum(axis=0)
        shape = min(PRIOR_SHAPE[0] + PRIOR_SHAPE_GROWTH * self._num_ended, PRIOR_SHAPE[1])
        ended = self._ended + PRIOR_CALLS * (1 - 2 ** (-shape / STEPS_PER_DOUBLING))
        goes_on = 1.0 - ended / (self._reached + passed + PRIOR_CALLS)
        return np.concatenate([[1.0], np.cumprod(goes_on)])

    def _forget_until(self, now_s: float) -> None:
        """A clock that steps back counts as standing still."""
        if self._seen_at_s is None:
            self._seen_at_s = now_s
        passed_s = max(0.0, now_s - self._seen_at_s)
        self._seen_at_s += passed_s
        kept = math.exp(-passed_s / RATE_MEMORY_S)
        self._rate_calls *= kept
        self._rate_s = kept * self._rate_s + (1 - kept) * RATE_MEMORY_S
