"""Orders of a job's rows that others use, by name.

Each takes a job, its rows as they arrived, and returns it with its rows in another order. Our own
is in `benchmarks.hit_orders`.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray

from batchrun.pool.fair_share import JobTurns
from batchrun.pool.prefix_keys import ChainBuilder, IntArray
from batchrun.pool.radix_tree import PrefixOrder
from benchmarks.job_shapes import joined, picked, prompts_of
from benchmarks.optimal_hits import RowBlocks
from benchmarks.row_feeds import TOKENS_PER_CHUNK, DrawnJob, drawn_job
from benchmarks.scenarios import Job

BLOCK_TOKENS = 16
LPM_WINDOW = 128
"""SGLang matches prefixes in a queue of at most so many; a longer one is first come, first
served there, which the window spares it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What an order may depend on: the seed of the run, and the KV blocks of the engine."""

    seed: int
    cache_blocks: int


def submission(job: Job, setting: Setting) -> Job:
    """As the rows stand in the data set."""
    return picked(job, np.argsort([row.number for row in job.rows]))


def shuffled(job: Job, setting: Setting) -> Job:
    """In an order of the seed."""
    rows = list(range(len(job.rows)))
    random.Random(setting.seed).shuffle(rows)
    return picked(job, rows)


def lexicographic(job: Job, setting: Setting) -> Job:
    """By the token ids of the prompts."""
    keys = [prompt.astype(">u4").tobytes() for prompt in prompts_of(job)]
    return picked(job, sorted(range(len(keys)), key=keys.__getitem__))


def longest_prefix_match(job: Job, setting: Setting) -> Job:
    """SGLang's `lpm` (arXiv 2312.07104, section 3): of the first `LPM_WINDOW` rows that wait, the
    one with the longest prefix in the cache goes next, the first of equals.

    Rows run one at a time in an LRU cache. O(rows x window x log blocks).
    """
    rows = row_blocks(job)
    cached = LruBlocks(rows, setting.cache_blocks)
    waiting = deque(range(rows.num_rows))
    order: list[int] = []
    while waiting:
        row = max(islice(waiting, LPM_WINDOW), key=cached.num_leading)
        waiting.remove(row)
        order.append(row)
        cached.run(row)
    return picked(job, order)


def blend(job: Job, setting: Setting) -> Job:
    """Mixing as BlendServe's (arXiv 2411.16102): documents by their compute density, taken from
    both ends, so that the work so far has the density of the whole job.

    The rows of a document stay together. Compute is the prompt tokens that no other row has,
    memory the KV read while tokens are generated.
    """
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(job.rows):
        groups.setdefault(row.document, []).append(place)
    loads = {document: _load(job, document, rows) for document, rows in groups.items()}
    by_density = deque(sorted(groups, key=lambda document: loads[document][0] / loads[document][1]))
    compute, memory = (sum(load[i] for load in loads.values()) for i in (0, 1))
    balance = 0.0
    order: list[int] = []
    while by_density:
        document = by_density.pop() if balance <= 0 else by_density.popleft()
        balance += loads[document][0] / compute - loads[document][1] / memory
        order += groups[document]
    return picked(job, order)


def _load(job: Job, document: int, rows: Sequence[int]) -> tuple[int, int]:
    """(prompt tokens to compute, KV tokens to read) of all rows about a document."""
    found = [job.rows[i] for i in rows]
    compute = len(job.documents[document]) + sum(len(row.question) for row in found)
    return compute, sum(row.num_output_tokens * job.num_prompt_tokens(row) for row in found)


def row_blocks(job: Job) -> RowBlocks:
    """What the rows read and hold, in their order."""
    outputs = [row.num_output_tokens for row in job.rows]
    return RowBlocks.of(prompts_of(job), outputs, BLOCK_TOKENS)


OURS = "ours"
BASELINES: dict[str, Callable[[Job, Setting], Job]] = {
    "submission": submission,
    "shuffled": shuffled,
    "lexicographic": lexicographic,
    "lpm": longest_prefix_match,
    "blend": blend,
}
"""By name."""


class LruBlocks:
    """The blocks used last. A parent is used no earlier than its child, so that what is there of a
    chain is its front."""

    def __init__(self, rows: RowBlocks, capacity: int) -> None:
        self._rows = rows
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def num_leading(self, row: int) -> int:
        """Blocks of the row's chain that are there, from its front on."""
        chains, known = self._rows.chains, self._keys
        start = int(chains.starts[row])
        low, high = 0, int(chains.starts[row + 1]) - start
        while low < high:
            middle = (low + high + 1) // 2
            if int(chains.keys[start + middle - 1]) in known:
                low = middle
            else:
                high = middle - 1
        return low

    def run(self, row: int) -> None:
        """The row runs to its end: its chain is there now, beside its other blocks."""
        chains = self._rows.chains
        chain = chains.keys[chains.starts[row] : chains.starts[row + 1]]
        for key in chain[::-1].tolist():
            self._keys[key] = None
            self._keys.move_to_end(key)
        room = self._capacity - (int(self._rows.held[row]) - len(chain))
        while len(self._keys) > room:
            self._keys.popitem(last=False)


def hit_blocks_in_turn(rows: RowBlocks, cache_blocks: int) -> int:
    """The hits of rows that run one at a time, in their order."""
    cached = LruBlocks(rows, cache_blocks)
    num_blocks = 0
    for row in range(rows.num_rows):
        num_blocks += min(cached.num_leading(row), int(rows.most_hits[row]))
        cached.run(row)
    return num_blocks


@dataclass(frozen=True, slots=True, eq=False)
class PlannedJobs:
    """Rows of several jobs in the order in which the daemon sends them.

    `owners[rank]` is the number of the row's job.
    """

    job: Job
    owners: Sequence[int]


def planned(jobs: Sequence[Job]) -> PlannedJobs:
    """batchrun's order: each job's pool walks its prefix tree, and the jobs, of equal weight, take
    turns as in the daemon.

    Rows are charged what they compute where the walk wastes nothing, so that no later settlement
    changes a turn.
    """
    orders = [pool_job(job).order for job in jobs]
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


def pool_job(job: Job) -> DrawnJob:
    """What the pool makes of the job: a token id of four bytes stands for a token's text."""
    chains = ChainBuilder(0)
    chains.add(prompt.astype("<u4").tobytes() for prompt in prompts_of(job))
    return drawn_job(job, chains.build())


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
