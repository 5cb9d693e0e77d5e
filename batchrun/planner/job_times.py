"""When jobs that share a fleet end: weighted fair shares of a pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchrun.planner.pace import Pace


@dataclass(frozen=True, slots=True)
class JobWork:
    """Tokens that a job has to compute, and its share beside others."""

    computed_tokens: float
    weight: float = 1.0


def ends_s(work: Sequence[JobWork], pace: Pace, submit_s: float = 0.0) -> list[float]:
    """When each job ends, on the pace's clock; all are submitted at `submit_s`.

    Jobs that run get the pace by their weights, as the daemon's turns give it in computed tokens;
    what a deadline presses the daemon takes earlier, which is not counted here. Infinity for a job
    that never ends.
    """
    ends = [submit_s] * len(work)
    left = {i: each.computed_tokens for i, each in enumerate(work)}
    now_s = submit_s
    while left:
        weights = sum(work[i].weight for i in left)
        first = min(left, key=lambda i: left[i] / work[i].weight)
        per_weight = left[first] / work[first].weight
        now_s = max(now_s, pace.reached_at_s(now_s, per_weight * weights))
        left = {i: rest - per_weight * work[i].weight for i, rest in left.items()}
        for i in [i for i, rest in left.items() if i == first or rest <= 0]:
            ends[i] = now_s
            del left[i]
    return ends
