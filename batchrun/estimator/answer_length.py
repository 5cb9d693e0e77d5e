"""How long the answers of a job will be, from those that have ended.

The rows that end first are the short ones, so an answer counts when all rows sent before it have
ended too. A row that many later ones have overtaken must be one of the long ones and counts as
such until its own length is known (a censored sample, as in Kaplan and Meier's estimator, J. Am.
Stat. Assoc. 53, 1958). What was expected before the first answer fades as answers come, and old
answers fade too, so that later rows may be of another length.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import accumulate

ROOM_LEVEL = 0.5
"""The share of answers that stay within the room that is set aside for them. Where KV is scarce,
0.7 to 0.9 serve 2 to 4 % less: short answers make room for what the long ones take beyond it."""
LONG_LEVEL = 0.8
"""A row that is one of the long ones has at least this quantile."""
PRIOR_ANSWERS = 32
"""What was expected before counts as so many answers."""
REMEMBERED_ANSWERS = 1_000
"""Counts halve when there are twice as many."""
OVERTAKEN_BY_ANSWERS = 64
"""A row that so many later ones have overtaken is one of the long ones."""
BUCKETS_PER_DOUBLING = 8
NUM_BUCKETS = 24 * BUCKETS_PER_DOUBLING
"""Each is 9 % wider than the one before it; the last one ends at 15 million tokens."""


MOST_CHOICES = 128
"""Rows with more of them count as if they had so many."""


class AnswerLengths:
    """A histogram of answers by length, in tokens. Bounded by the rows in flight; an answer costs
    a few microseconds. Keys tell rows in flight from one another. `planned_tokens` is the mean as
    it was first: with that the work of rows is planned."""

    __slots__ = (
        "_begins_with_guess",
        "_counts",
        "_halvings",
        "_in_order",
        "_longest",
        "_num_behind",
        "_num_choices",
        "_room_tokens",
        "_sum_tokens",
        "_total",
        "num_ended",
        "planned_tokens",
    )

    def __init__(
        self,
        prior: Sequence[int],
        ended: Sequence[int] = (),
        *,
        is_guess: bool = False,
        num_choices: int = 1,
    ) -> None:
        """Expect what `prior` says, some answers of other rows or one guess, or with
        `is_guess` several; `ended` are answers of the same rows from before, the oldest first. All
        are those of a row, of `num_choices` choices as far as is known."""
        self._begins_with_guess = is_guess or len(prior) == 1
        self._counts = [0.0] * NUM_BUCKETS
        self._total = self._sum_tokens = 0.0
        self._halvings = 0
        self._in_order: dict[Hashable, int | None] = {}
        self._longest: dict[Hashable, tuple[int, int]] = {}
        self._num_behind = 0
        self._num_choices = [0.0] * (MOST_CHOICES + 1)
        self._num_choices[min(num_choices, MOST_CHOICES)] = PRIOR_ANSWERS
        self._room_tokens: int | None = None
        self.num_ended = 0
        for num_tokens in prior:
            self._count(num_tokens, PRIOR_ANSWERS / len(prior))
        for num_tokens in ended:
            self._count(num_tokens)
            self.num_ended += 1
        self.planned_tokens = round(self.mean_tokens)

    @property
    def mean_tokens(self) -> float:
        """What one more answer is expected to have."""
        return self._sum_tokens / self._total if self._total else 0.0

    @property
    def is_guess(self) -> bool:
        """Whether the mean is not known much better than guessed."""
        return self._begins_with_guess and self.num_ended < OVERTAKEN_BY_ANSWERS

    @property
    def room_tokens(self) -> int:
        """What to set aside for it: `ROOM_LEVEL` of all answers stay within that."""
        if self._room_tokens is None:
            self._room_tokens = self.quantile_tokens(ROOM_LEVEL)
        return self._room_tokens

    @property
    def choice_room_tokens(self) -> int:
        """The same for each choice of a row: how long they are is known of all together, and half
        of the rows have no more of them than the others."""
        return math.ceil(self.room_tokens / max(1, _quantile(self._num_choices, 0.5)))

    def quantile_tokens(self, level: float) -> int:
        """The upper bound of the bucket that holds this quantile; 0 where nothing is known."""
        if not self._total:
            return 0
        bucket = _quantile(self._counts, level)
        return math.floor(2 ** (bucket / BUCKETS_PER_DOUBLING) + 1e-9) if bucket else 1

    def sent(self, row: Hashable) -> None:
        """A row is on its way, behind those that were sent before."""
        self._in_order[row] = None

    def ended(self, row: Hashable, num_tokens: int, num_choices: int = 1) -> None:
        """Its answer is there, in so many choices; one of no tokens tells nothing, nor does one of
        a row that was not on its way."""
        if num_tokens <= 0:
            self.lost(row)
        elif row in self._longest:
            self._take_back(row)
            self._count(num_tokens)
            self._count_choices(num_choices)
        elif self._in_order.get(row, num_tokens) is None:
            self._in_order[row] = num_tokens
            self._num_behind += 1
            self._count_choices(num_choices)
            self._advance()

    def lost(self, row: Hashable) -> None:
        """It is not on its way any more and has no answer."""
        if row in self._longest:
            self._take_back(row)
        elif row in self._in_order:
            if self._in_order.pop(row) is not None:
                self._num_behind -= 1
            self._advance()

    def _advance(self) -> None:
        """Count the answers before which all have ended, and pass over rows that are long."""
        while self._in_order:
            row = next(iter(self._in_order))
            num_tokens = self._in_order[row]
            if num_tokens is not None:
                self._num_behind -= 1
                self._count(num_tokens)
            elif self._num_behind >= OVERTAKEN_BY_ANSWERS:
                seen = max(tokens or 0 for tokens in self._in_order.values())
                longest = max(seen, self.quantile_tokens(LONG_LEVEL))
                self._longest[row] = longest, self._halvings
                self._count(longest)
            else:
                return
            del self._in_order[row]

    def _take_back(self, row: Hashable) -> None:
        """A row that was passed over no longer counts as long."""
        num_tokens, halvings = self._longest.pop(row)
        self._count(num_tokens, -(0.5 ** (self._halvings - halvings)))

    def _count_choices(self, num_choices: int) -> None:
        self.num_ended += 1
        self._num_choices[min(num_choices, MOST_CHOICES)] += 1
        if self.num_ended % REMEMBERED_ANSWERS == 0:
            self._num_choices = [number / 2 for number in self._num_choices]

    def _count(self, num_tokens: int, weight: float = 1.0) -> None:
        bucket = _bucket_of(num_tokens)
        self._counts[bucket] = max(0.0, self._counts[bucket] + weight)
        self._total += weight
        self._sum_tokens += weight * num_tokens
        self._room_tokens = None
        if self._total >= 2 * REMEMBERED_ANSWERS:
            self._halvings += 1
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2
            self._sum_tokens /= 2


def _quantile(counts: Sequence[float], level: float) -> int:
    """The bucket that holds it."""
    sums = list(accumulate(counts))
    # Counts that were taken out again leave rounding errors in the sums.
    return min(bisect_left(sums, level * sums[-1]), len(counts) - 1)


def _bucket_of(num_tokens: int) -> int:
    """The bucket whose upper bound is the first not below so many tokens."""
    if num_tokens <= 1:
        return 0
    place = math.ceil(BUCKETS_PER_DOUBLING * math.log2(num_tokens) - 1e-9)
    return min(place, NUM_BUCKETS - 1)
