"""Orders of a job's rows that others use, by name.

Each takes a job, its rows as they arrived, and returns it with its rows in another order. Our own
is in `benchmarks.hit_plans`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from benchmarks.hit_lru import LruBlocks
from benchmarks.job_shapes import picked, prompts_of
from benchmarks.optimal_hits import RowBlocks
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
