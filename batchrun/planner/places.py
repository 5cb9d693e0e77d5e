"""Where in their order jobs begin in the windows that stand for all of their time.

The order begins with what serves most for its work, so its beginning is not like the rest.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from batchrun.pool import PrefixOrder
from batchrun.simulator import OfflineJob

GOLDEN = (math.sqrt(5) - 1) / 2


def place_of(number: int, num: int) -> float:
    """A share of the order for each of `num` windows: evenly spread, and no neighbours for
    neighbours, since hours and places must not be confounded."""
    step = max(1, round(GOLDEN * num))
    while math.gcd(step, num) != 1:
        step += 1
    return number * step % num / num


def begun_at(job: OfflineJob, place: float, reach: float) -> OfflineJob:
    """The job as if it began at the share `place` of its order, and what was before came last.

    It begins with the row within `reach` of the order that shares least with the one before it.
    Nothing presses it, and it is there from the start.
    """
    shared, num = job.order.shared_chunks, job.num_rows
    start = int(place * num)
    end = min(num, max(start + 1, int((place + reach) * num)))
    first = start + int(np.argmin(shared[start:end])) if num else 0
    now_shared = np.roll(shared, -first)
    now_shared[:1] = 0
    order = PrefixOrder(np.roll(job.order.rows, -first), now_shared, job.order.by_chain)
    return replace(job, order=order, submit_s=0.0, deadline_s=math.inf)
