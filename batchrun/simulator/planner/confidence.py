"""What misses on some draws of a traffic say of the next draw.

Misses are few and come by chance: of a peak in which six calls may miss, another draw has more than
six every second time where six are expected. So a plan leaves room for what chance adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

CONFIDENCE = 0.95
MOST_EXACT = 500.0
"""Where more are expected, a normal distribution is as good."""


def chance_of_at_most(num: int, expected: float) -> float:
    """That no more than so many calls miss, where so many are expected (Poisson)."""
    if expected > MOST_EXACT:
        return (1 + math.erf((num + 0.5 - expected) / math.sqrt(2 * expected))) / 2
    term = total = math.exp(-expected)
    for k in range(1, num + 1):
        term *= expected / k
        total += term
    return min(total, 1.0)


def most_expected(may_miss: int) -> float:
    """The most misses that may be expected, for no more than `may_miss` with `CONFIDENCE`."""
    low, high = 0.0, may_miss + 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if chance_of_at_most(may_miss, middle) >= CONFIDENCE:
            low = middle
        else:
            high = middle
    return low


def is_clear(missed: int, may_miss: int) -> bool:
    """Whether so many misses are more than chance makes of as many as are allowed."""
    return missed > may_miss and chance_of_at_most(missed - 1, may_miss) > CONFIDENCE


Missed = Sequence[tuple[int, int]]
"""For each draw: how many calls missed a bound, and how many may."""


def is_kept(draws: Missed) -> bool:
    """Whether all draws together keep the target and none of them clearly does not."""
    missed, allowed = map(sum, zip(*draws, strict=True))
    return missed <= allowed and not any(is_clear(*each) for each in draws)


def has_room(draws: Missed) -> bool:
    """Whether another draw like these keeps the target with `CONFIDENCE`."""
    return sum(missed for missed, _ in draws) <= sum(most_expected(may) for _, may in draws)
