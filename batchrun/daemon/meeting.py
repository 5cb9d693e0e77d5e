"""Jobs that share prefixes meet: their rows run while a prefix that one of them began is hot."""

from __future__ import annotations

from collections.abc import Iterable

from batchrun.daemon.active_job import ActiveJob
from batchrun.pool import RowQueue, rows_with_prefix

MAX_ROWS = 4_096
"""A prefix that more rows of a job begin with is no reason to change its order."""
MAX_LEVELS = 2
LEAST_CHUNKS = 2
"""Rows that share less than that beyond a prefix that they have anyway gain nothing by meeting."""


def bring_together(job: ActiveJob, row: int, others: Iterable[ActiveJob]) -> None:
    """`row` goes to an engine. Where it begins a prefix group of its job, rows of the other jobs
    with the same prefix are the next of theirs."""
    path = _worthy(job.queue, row)
    if not path or path[-1] == job.current_node:
        return
    job.current_node = path[-1]
    plan = job.plan
    prefixes = [plan.chains.prefix(row, job.queue.depth_of(node)) for node in path[-MAX_LEVELS:]]
    for other in others:
        if other is job or other.plan.salt != plan.salt:
            continue
        for prefix in reversed(prefixes):
            by_chain = other.plan.order.by_chain
            rows = rows_with_prefix(other.plan.chains, by_chain, prefix, most=MAX_ROWS + 1)
            if len(rows):
                if len(rows) <= MAX_ROWS:
                    other.queue.prefer(rows)
                break


def _worthy(queue: RowQueue, row: int) -> list[int]:
    """The row's path as far as the innermost node that adds enough to the one above it."""
    path = queue.path_of(row)
    while path:
        above_chunks = queue.depth_of(path[-2]) if len(path) > 1 else 0
        if queue.depth_of(path[-1]) - above_chunks >= LEAST_CHUNKS:
            return path
        path.pop()
    return path
