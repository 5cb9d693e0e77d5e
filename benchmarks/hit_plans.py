"""batchrun's own order of several jobs' rows, and who sends them as the daemon does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchrun.hints import RowHint, nodes_to_tell, read_hint, write_hint
from batchrun.pool.fair_share import JobTurns
from batchrun.pool.prefix_keys import ChainBuilder, IntArray
from batchrun.pool.radix_tree import PrefixOrder, find_prefix_nodes, order_by_prefix
from batchrun.pool.row_queue import RowQueue
from batchrun.simulator.virtual.engine import Arrival
from batchrun.simulator.virtual.feeder import DAEMON_WINDOW, JobFeeder
from batchrun.simulator.virtual.scenarios import TOKENS_PER_CHUNK, Job
from batchrun.simulator.virtual.setup import NONCE
from benchmarks.job_shapes import joined, picked, prompts_of


@dataclass(frozen=True, slots=True, eq=False)
class PlannedJobs:
    """Rows of several jobs in the order in which the daemon sends them.

    `owners[rank]` is the number of the row's job, `orders` are those of the jobs' pools.
    """

    job: Job
    owners: Sequence[int]
    orders: Sequence[PrefixOrder]


def planned(jobs: Sequence[Job], num_buckets: int = 1) -> PlannedJobs:
    """batchrun's order: each job's pool walks its prefix tree, and the jobs, of equal weight, take
    turns as in the daemon.

    With several buckets, which the product does not have, groups of like lengths run together.
    Rows are charged what they compute where the walk wastes nothing, so that no later settlement
    changes a turn.
    """
    orders = [_prefix_order(job, num_buckets) for job in jobs]
    merged = joined([picked(job, order.rows) for job, order in zip(jobs, orders, strict=True)])
    charges = [_charges(job, order) for job, order in zip(jobs, orders, strict=True)]
    owners = _turns(charges, [np.append(np.diff(order.groups) != 0, True) for order in orders])
    return PlannedJobs(picked(merged, _interleaved(owners, jobs)), owners, orders)


def _turns(charges: Sequence[IntArray], ends_group: Sequence[NDArray[np.bool_]]) -> list[int]:
    """The job whose row is next, until no job has any; both arguments are by job and place."""
    turns = JobTurns()
    for job, charge in enumerate(charges):
        turns.join(str(job), 1.0, int(charge.sum()))
    places = [0] * len(charges)
    owners: list[int] = []
    while ready := {str(job) for job, place in enumerate(places) if place < len(charges[job])}:
        turn = turns.choose(ready, 0.0)
        assert turn is not None
        job = int(turn.job_id)
        place, tokens = places[job], int(charges[job][places[job]])
        turns.charge(turn, place, tokens, ends_subtree=bool(ends_group[job][place]))
        turns.settle(turn.job_id, place, tokens)
        owners.append(job)
        places[job] += 1
    return owners


def _interleaved(owners: Sequence[int], jobs: Sequence[Job]) -> list[int]:
    """Where each row stands among the rows of all jobs, one job after the other."""
    places = [0, *accumulate(len(job.rows) for job in jobs)]
    order: list[int] = []
    for owner in owners:
        order.append(places[owner])
        places[owner] += 1
    return order


class PoolFeeder(JobFeeder):
    """A feeder whose hints say what the daemon's say: all prefix nodes above a row, from the pool
    of its own job, and the next rank as the next use of whatever has rows to come."""

    def __init__(self, planned_jobs: PlannedJobs) -> None:
        super().__init__(planned_jobs.job, window=DAEMON_WINDOW)
        self._owners = planned_jobs.owners
        self._queues = [
            RowQueue(np.arange(len(order.rows)), find_prefix_nodes(order.shared_chunks))
            for order in planned_jobs.orders
        ]

    def take_due(self, now_s: float) -> list[Arrival]:
        """The rows sent by now."""
        return [self._with_nodes(arrival) for arrival in super().take_due(now_s)]

    def _with_nodes(self, arrival: Arrival) -> Arrival:
        hint = read_hint(arrival.hint, NONCE)
        assert isinstance(hint, RowHint)
        owner = self._owners[hint.rank]
        queue = self._queues[owner]
        row = queue.peek(0.0)
        assert row is not None
        queue.take(row)
        nodes = nodes_to_tell(queue.path_of(row), queue.num_to_come, hint.rank)
        told = msgspec.structs.replace(hint, job=f"job-{owner}", nodes=nodes)
        return replace(arrival, hint=write_hint(told, NONCE))


def row_bucketed(job: Job, num_buckets: int) -> Job:
    """Every row in the bucket of its own length, so that bounds split prefix groups.

    In a bucket the rows keep the order of the pool.
    """
    order = _prefix_order(job).rows
    buckets = row_buckets(job, num_buckets)
    return picked(job, order[np.argsort(buckets[order], kind="stable")])


def num_split_groups(job: Job, num_buckets: int) -> int:
    """Prefix groups whose rows lie in more than one bucket by their own lengths."""
    order = _prefix_order(job)
    pairs = np.stack((order.groups, row_buckets(job, num_buckets)[order.rows]))
    return len(np.unique(pairs, axis=1).T) - len(np.unique(order.groups))


def row_buckets(job: Job, num_buckets: int) -> IntArray:
    """The bucket of each row, were every row a prefix group of its own."""
    lengths = np.array([job.num_prompt_tokens(row) for row in job.rows], dtype=np.int64)
    return _bucket_of_groups(np.arange(len(lengths)), lengths, num_buckets)


def _charges(job: Job, order: PrefixOrder) -> IntArray:
    """The tokens that each row computes, in the order of the walk."""
    outputs = np.array([row.num_output_tokens for row in job.rows], dtype=np.int64)
    charges: IntArray = (_uncached_tokens(job, order) + outputs)[order.rows]
    return charges


def _prefix_order(job: Job, num_buckets: int = 1) -> PrefixOrder:
    """What the pool makes of the job: a token id of four bytes stands for a token's text."""
    chains = ChainBuilder(0)
    chains.add(prompt.astype("<u4").tobytes() for prompt in prompts_of(job))
    table = chains.build()
    order = order_by_prefix(table)
    buckets = _bucket_of_groups(order.groups, table.lengths[order.rows], num_buckets)
    places = np.argsort(buckets[order.groups], kind="stable")
    return PrefixOrder(order.rows[places], order.shared_chunks[places], order.by_chain)


def _bucket_of_groups(groups: IntArray, lengths: IntArray, num_buckets: int) -> IntArray:
    """For each group, numbered from 0 without gaps, its bucket by the median of its rows' lengths:
    geometric between the smallest and the largest median."""
    sizes = np.bincount(groups)
    ordered = lengths[np.lexsort((lengths, groups))]
    medians = ordered[np.cumsum(sizes) - sizes + sizes // 2] + 1.0
    span = np.log(medians.max() / medians.min())
    if span == 0:
        return np.zeros(len(sizes), dtype=np.int64)
    place = np.log(medians / medians.min()) / span
    buckets: IntArray = np.minimum((place * num_buckets).astype(np.int64), num_buckets - 1)
    return buckets


def _uncached_tokens(job: Job, order: PrefixOrder) -> IntArray:
    """For each row, the prompt tokens that it does not share with the row before it in the walk."""
    prompts = np.array([job.num_prompt_tokens(row) for row in job.rows], dtype=np.int64)
    prompts[order.rows] -= order.shared_chunks * TOKENS_PER_CHUNK
    return prompts
