"""When work will be done, and at what rate it must be: the arithmetic of deadlines between jobs.

Work is in computed tokens, rates are computed tokens per second of all engines together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

MOST_SHARE = 0.95
"""Deadlines never take more than this of the capacity: every job goes on."""
LEAST_LEFT_S = 1.0
"""Times to a deadline are no shorter than this, so that rates stay finite."""


class JobWork(NamedTuple):
    """What a job has left; `doubt` is how far `tokens` may be off, as a share."""

    weight: float
    tokens: float
    doubt: float


class Kept(NamedTuple):
    """A deadline to keep: seconds until it passes, the job, and what the job has left."""

    left_s: float
    job_id: str
    tokens: float


def tokens_before(kept: Sequence[Kept], tokens: float, left_s: float, rate: float) -> float:
    """How much of the kept work goes before a job with `tokens`, due in `left_s`.

    That with an earlier deadline, and what would be late if the job went first.
    """
    total = before = 0.0
    for other in kept:
        total += other.tokens
        if other.left_s <= left_s or total + tokens > rate * other.left_s:
            before = total
    return before


def fair_finishes_s(works: Mapping[str, JobWork], capacity: float) -> dict[str, float]:
    """When each job would be done if all got their fair share, and what is over where one ends.

    Takes the work at its most, estimates in doubt included.
    """
    most = {
        job_id: (work.tokens * (1 + work.doubt) / work.weight, work.weight)
        for job_id, work in works.items()
    }
    finishes_s: dict[str, float] = {}
    weight_left = sum(work.weight for work in works.values())
    level = elapsed_s = 0.0
    for job_id in sorted(most, key=lambda job_id: most[job_id]):
        end_level, weight = most[job_id]
        elapsed_s += (end_level - level) * weight_left / capacity
        finishes_s[job_id] = elapsed_s
        level = end_level
        weight_left -= weight
    return finishes_s


def tokens_ahead(works: Mapping[str, JobWork], claims: Mapping[str, float]) -> dict[str, float]:
    """How many tokens all jobs together compute until each of them is done.

    `claims` are shares of the capacity that some have on top; the rest is shared by weight.
    """
    ahead = dict.fromkeys(works, 0.0)
    left = {job_id: max(work.tokens, 0.0) for job_id, work in works.items()}
    total = 0.0
    while any(job_id in claims for job_id in left):
        weights = sum(works[job_id].weight for job_id in left)
        free = 1 - sum(claims.get(job_id, 0.0) for job_id in left)
        shares = {
            job_id: claims.get(job_id, 0.0) + free * works[job_id].weight / weights
            for job_id in left
        }
        first = min(left, key=lambda job_id: left[job_id] / shares[job_id])
        passed = left[first] / shares[first]
        total += passed
        ahead[first] = total
        left = {i: tokens - shares[i] * passed for i, tokens in left.items() if i != first}
    unclaimed = {
        job_id: JobWork(works[job_id].weight, max(tokens, 0.0), 0.0)
        for job_id, tokens in left.items()
    }
    finishes = fair_finishes_s(unclaimed, capacity=1.0)
    return ahead | {job_id: total + finishes[job_id] for job_id in unclaimed}


def needed_shares(
    kept: Sequence[Kept], times_s: Sequence[float], capacity: float
) -> dict[str, float]:
    """The least shares of the capacity that do the kept work in these times, the earliest first.

    The densities of Yao, Demers and Shenker (FOCS 1995, section 2): the work up to a deadline over
    the time for it. The greatest so far is the rate that the jobs up to there need together, and
    each job claims what it adds to that of those before it.
    """
    shares: dict[str, float] = {}
    share = 0.0
    totals = accumulate(k.tokens for k in kept)
    for entry, time_s, total in zip(kept, times_s, totals, strict=True):
        up_to_here = min(total / max(time_s, LEAST_LEFT_S) / capacity, MOST_SHARE)
        if up_to_here > share:
            shares[entry.job_id] = up_to_here - share
            share = up_to_here
    return shares
