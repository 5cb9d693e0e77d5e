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
from typing import NamedTuple

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


class _Histogram:
    """Answers by length."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0.0] * NUM_BUCKETS

    def add(self, num_tokens: int, weight: float) -> None:
        bucket = _bucket_of(num_tokens)
        self.counts[bucket] = max(0.0, self.counts[bucket] + weight)

    def halve(self) -> None:
        self.counts = [count / 2 for count in self.counts]

    def quantile_tokens(self, level: float) -> int:
        """The upper bound of the bucket that holds this quantile; 0 where nothing is known."""
        sums = list(accumulate(self.counts))
        if not sums[-1]:
            return 0
        # Counts that were taken out again leave rounding errors in the sums.
        bucket = min(bisect_left(sums, level * sums[-1]), NUM_BUCKETS - 1)
        return math.floor(2 ** (bucket / BUCKETS_PER_DOUBLING) + 1e-9) if bucket else 1


class _Answer(NamedTuple):
    """Tokens of a row's answer, and of each of its choices on average."""

    num_tokens: int
    choice_tokens: int


class AnswerLengths:
    """Histograms of answers and of their choices by length, in tokens. Bounded by the rows in
    flight; an answer costs a few microseconds. Keys tell rows in flight from one another.
    `planned_tokens` is the mean as it was first: with that the work of rows is planned."""

    __slots__ = (
        "_begins_with_guess",
        "_choices",
        "_halvings",
        "_in_order",
        "_longest",
        "_num_behind",
        "_num_choices",
        "_room_tokens",
        "_rows",
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
        num_choices: int | None = 1,
    ) -> None:
        """Expect what `prior` says, some answers of other rows or one guess, or with
        `is_guess` several; `ended` are answers of the same rows from before, the oldest first.
        Each has so many choices; None: nobody knows, so they are soon forgotten as choices."""
        self._begins_with_guess = is_guess or len(prior) == 1
        self._rows, self._choices = _Histogram(), _Histogram()
        self._total = self._sum_tokens = 0.0
        self._halvings = 0
        self._in_order: dict[Hashable, _Answer | None] = {}
        self._longest: dict[Hashable, tuple[_Answer, int]] = {}
        self._num_behind = 0
        self._num_choices = num_choices or 1
        self._room_tokens: int | None = None
        self.num_ended = len(ended)
        for num_tokens in prior:
            weight = PRIOR_ANSWERS / len(prior)
            self._count_row(num_tokens, weight)
            self._choices.add(self._of_choice(num_tokens), weight)
        choice_weight = 1.0 if num_choices else min(1.0, PRIOR_ANSWERS / max(1, len(ended)))
        for num_tokens in ended:
            self._choices.add(self._of_choice(num_tokens), choice_weight)
            self._count_row(num_tokens)
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
        """What to set aside for each choice of it: `ROOM_LEVEL` of all stay within that."""
        if self._room_tokens is None:
            self._room_tokens = self._choices.quantile_tokens(ROOM_LEVEL)
        return self._room_tokens

    def quantile_tokens(self, level: float) -> int:
        """The upper bound of the bucket that holds this quantile; 0 where nothing is known."""
        return self._rows.quantile_tokens(level)

    def sent(self, row: Hashable) -> None:
        """A row is on its way, behind those that were sent before."""
        self._in_order[row] = None

    def ended(self, row: Hashable, num_tokens: int, num_choices: int = 0) -> None:
        """Its answer is there, in so many choices, 0 where that is not told; one of no tokens tells
        nothing, nor does one of a row that was not on its way."""
        answer = _Answer(num_tokens, self._of_choice(num_tokens, num_choices))
        if num_tokens <= 0:
            self.lost(row)
        elif row in self._longest:
            self._take_back(row)
            self._count(answer)
            self.num_ended += 1
        elif self._in_order.get(row, answer) is None:
            self._in_order[row] = answer
            self._num_behind += 1
            self.num_ended += 1
            self._advance()

    def lost(self, row: Hashable) -> None:
        """It is not on its way any more and has no answer."""
        if row in self._longest:
            self._take_back(row)
        elif row in self._in_order:
            if self._in_order.pop(row) is not None:
                self._num_behind -= 1
            self._advance()

    def _of_choice(self, num_tokens: int, num_choices: int = 0) -> int:
        return -(-num_tokens // (num_choices if num_choices > 0 else self._num_choices))

    def _advance(self) -> None:
        """Count the answers before which all have ended, and pass over rows that are long."""
        while self._in_order:
            row = next(iter(self._in_order))
            answer = self._in_order[row]
            if answer is not None:
                self._num_behind -= 1
                self._count(answer)
            elif self._num_behind >= OVERTAKEN_BY_ANSWERS:
                longest = self._one_of_the_long()
                self._longest[row] = longest, self._halvings
                self._count(longest)
            else:
                return
            del self._in_order[row]

    def _one_of_the_long(self) -> _Answer:
        """At least, of a row that those behind it have overtaken."""
        seen = [answer for answer in self._in_order.values() if answer is not None]
        return _Answer(
            max(self._rows.quantile_tokens(LONG_LEVEL), *(each.num_tokens for each in seen)),
            max(self._choices.quantile_tokens(LONG_LEVEL), *(each.choice_tokens for each in seen)),
        )

    def _take_back(self, row: Hashable) -> None:
        """A row that was passed over no longer counts as long."""
        answer, halvings = self._longest.pop(row)
        self._count(answer, -(0.5 ** (self._halvings - halvings)))

    def _count(self, answer: _Answer, weight: float = 1.0) -> None:
        self._choices.add(answer.choice_tokens, weight)
        self._count_row(answer.num_tokens, weight)

    def _count_row(self, num_tokens: int, weight: float = 1.0) -> None:
        self._rows.add(num_tokens, weight)
        self._total += weight
        self._sum_tokens += weight * num_tokens
        self._room_tokens = None
        if self._total >= 2 * REMEMBERED_ANSWERS:
            self._halvings += 1
            self._rows.halve()
            self._choices.halve()
            self._total /= 2
            self._sum_tokens /= 2


def _bucket_of(num_tokens: int) -> int:
    """The bucket whose upper bound is the first not below so many tokens."""
    if num_tokens <= 1:
        return 0
    place = math.ceil(BUCKETS_PER_DOUBLING * math.log2(num_tokens) - 1e-9)
    return min(place, NUM_BUCKETS - 1)
