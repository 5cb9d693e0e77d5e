"""batchrun's own order of rows: of one job, and of several that run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from batchrun.pool.fair_share import JobTurns
from batchrun.pool.prefix_keys import ChainBuilder, IntArray
from batchrun.pool.radix_tree import (
    PrefixOrder,
    bucket_of_groups,
)
from benchmarks.job_shapes import joined, picked, prompts_of
from benchmarks.row_feeds import TOKENS_PER_CHUNK, DrawnJob, drawn_job
from benchmarks.scenarios import Job


@dataclass(frozen=True, slots=True, eq=False)
class PlannedJobs:
    """Rows of several jobs in the order in which the daemon sends them.

    `owners[rank]` is the number of the row's job.
    """

    job: Job
    owners: Sequence[int]


def planned(jobs: Sequence[Job], num_buckets: int = 1) -> PlannedJobs:
    """batchrun's order: each job's pool walks its prefix tree, and the jobs, of equal weight, take
    turns as in the daemon.

    Rows are charged what they compute where the walk wastes nothing, so that no later settlement
    changes a turn.
    """
    orders = [pool_job(job, num_buckets).order for job in jobs]
    merged = joined([picked(job, order.rows) for job, order in zip(jobs, orders, strict=True)])
    charges = [_charges(job, order) for job, order in zip(jobs, orders, strict=True)]
    owners = _turns(charges, [np.append(np.diff(order.groups) != 0, True) for order in orders])
    return PlannedJobs(picked(merged, _interleaved(owners, jobs)), owners)


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


def pool_job(job: Job, num_buckets: int = 1) -> DrawnJob:
    """What the pool makes of the job: a token id of four bytes stands for a token's text."""
    chains = ChainBuilder(0)
    chains.add(prompt.astype("<u4").tobytes() for prompt in prompts_of(job))
    return drawn_job(job, chains.build(), num_buckets=num_buckets)


def row_bucketed(job: Job, num_buckets: int) -> Job:
    """What the pool's buckets are not: every row in the bucket of its own length, so that bounds
    split prefix groups. In a bucket the rows keep the order of the pool."""
    order = pool_job(job).order.rows
    buckets = row_buckets(job, num_buckets)
    return picked(job, order[np.argsort(buckets[order], kind="stable")])


def num_split_groups(job: Job, num_buckets: int) -> int:
    """Prefix groups whose rows lie in more than one bucket by their own lengths."""
    order = pool_job(job).order
    pairs = np.stack((order.groups, row_buckets(job, num_buckets)[order.rows]))
    return len(np.unique(pairs, axis=1).T) - len(np.unique(order.groups))


def row_buckets(job: Job, num_buckets: int) -> IntArray:
    """The bucket of each row, were every row a prefix group of its own."""
    lengths = np.array([job.num_prompt_tokens(row) for row in job.rows], dtype=np.int64)
    return bucket_of_groups(np.arange(len(lengths)), lengths, num_buckets)


def _charges(job: Job, order: PrefixOrder) -> IntArray:
    """The tokens that each row computes, in the order of the walk."""
    outputs = np.array([row.num_output_tokens for row in job.rows], dtype=np.int64)
    charges: IntArray = (_uncached_tokens(job, order) + outputs)[order.rows]
    return charges


def _uncached_tokens(job: Job, order: PrefixOrder) -> IntArray:
    """For each row, the prompt tokens that it does not share with the row before it in the walk."""
    prompts = np.array([job.num_prompt_tokens(row) for row in job.rows], dtype=np.int64)
    prompts[order.rows] -= order.shared_chunks * TOKENS_PER_CHUNK
    return prompts
