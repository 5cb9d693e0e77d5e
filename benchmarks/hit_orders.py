"""Orders of a job's rows that others use, and the most prompt tokens that any order can hit.

A cache holds `cache_blocks` blocks. A row reads the chain of the full blocks of its prompt; what it
finds of it from the front on is hit, but never the block of its last token, which is always
computed (vLLM does the same). Until it ends it holds the chain and the blocks of the rest of its
prompt and of its output, whose last token is never computed. Anything else may be evicted.

The bound. A block can be hit only after a row has computed it, so of the R rows that read it at
most R - 1 hit it, and at most the H rows for which it is not the block of the last token: the sum
of min(H, R - 1) over all distinct blocks. A row that needs more than the whole cache never runs.

It is reached by rows that run one at a time, depth first in the prefix tree, a row that ends in a
node before those that go on: each finds all that it shares with any row before it in the row just
before it (SGLang's theorem 3.1, arXiv 2312.07104, here with the last token). Where rows must run at
once and do not fit beside each other, the bound may be more than any schedule as fast can have.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from batchrun.pool.prefix_keys import ChainBuilder, ChainTable, IntArray
from benchmarks.job_shapes import picked, prompts_of
from benchmarks.row_feeds import BLOCK_TOKENS, DrawnJob, drawn_job
from benchmarks.scenarios import Job, TokenIds

LPM_WINDOW = 128
"""SGLang matches prefixes in a queue of at most so many; a longer one is first come, first
served there, which the window spares it."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBlocks:
    """What each row of a job reads and holds, in blocks.

    `chains` has the keys of the full blocks of each prompt; a hit covers `most_hits[i]` of them at
    most; row i holds `held[i]` blocks at its end, output included.
    """

    chains: ChainTable
    most_hits: IntArray
    held: IntArray

    @classmethod
    def of(
        cls,
        prompts: Iterable[TokenIds],
        output_tokens: Iterable[int],
        block_tokens: int = BLOCK_TOKENS,
    ) -> RowBlocks:
        """The rows with these prompts and numbers of tokens to generate."""
        kept = list(prompts)
        stride = block_tokens * np.dtype(np.uint32).itemsize
        chains = ChainBuilder(0, lambda num_bytes: range(stride, num_bytes + 1, stride))
        chains.add(prompt.tobytes() for prompt in kept)
        lengths = np.array([len(prompt) for prompt in kept])
        ends = lengths - 1 + np.array(list(output_tokens))
        return cls(chains.build(), (lengths - 1) // block_tokens, -(-ends // block_tokens))

    @classmethod
    def of_job(cls, job: Job) -> RowBlocks:
        """Those of a job, in its order."""
        return cls.of(prompts_of(job), [row.num_output_tokens for row in job.rows])


def most_hit_blocks(rows: RowBlocks, cache_blocks: int) -> int:
    """The bound of the module, in blocks. O(blocks x log blocks)."""
    lengths = rows.chains.lengths
    depth = np.arange(len(rows.chains.keys)) - np.repeat(rows.chains.starts[:-1], lengths)
    runs = np.repeat(rows.held <= cache_blocks, lengths)
    may_hit = depth < np.repeat(rows.most_hits, lengths)
    _, block = np.unique(rows.chains.keys, return_inverse=True)
    size = len(rows.chains.keys)
    readers = np.bincount(block[runs], minlength=size)
    hitters = np.bincount(block[runs & may_hit], minlength=size)
    return int(np.minimum(hitters, np.maximum(readers - 1, 0)).sum())


def submission(job: Job, seed: int, cache_blocks: int) -> Job:
    """As the rows stand in the data set."""
    return picked(job, np.argsort([row.number for row in job.rows]))


def shuffled(job: Job, seed: int, cache_blocks: int) -> Job:
    """In an order of the seed."""
    rows = list(range(len(job.rows)))
    random.Random(seed).shuffle(rows)
    return picked(job, rows)


def lexicographic(job: Job, seed: int, cache_blocks: int) -> Job:
    """By the token ids of the prompts."""
    keys = [prompt.astype(">u4").tobytes() for prompt in prompts_of(job)]
    return picked(job, sorted(range(len(keys)), key=keys.__getitem__))


def longest_prefix_match(job: Job, seed: int, cache_blocks: int) -> Job:
    """SGLang's `lpm` (arXiv 2312.07104, section 3): of the first `LPM_WINDOW` rows that wait, the
    one with the longest prefix in the cache goes next, the first of equals.

    Rows run one at a time in an LRU cache. O(rows x window x log blocks).
    """
    cached = LruBlocks(RowBlocks.of_job(job), cache_blocks)
    waiting = deque(range(len(job.rows)))
    order: list[int] = []
    while waiting:
        row = max(islice(waiting, LPM_WINDOW), key=cached.num_leading)
        waiting.remove(row)
        order.append(row)
        cached.run(row)
    return picked(job, order)


def blend(job: Job, seed: int, cache_blocks: int) -> Job:
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


OURS = "ours"
BASELINES: dict[str, Callable[[Job, int, int], Job]] = {
    "submission": submission,
    "shuffled": shuffled,
    "lexicographic": lexicographic,
    "lpm": longest_prefix_match,
    "blend": blend,
}
"""By name; an order may depend on the seed of the run and the KV blocks of the engine."""


class LruBlocks:
    """The blocks used last. A parent is used no earlier than its child, so that what is there of a
    chain is its front."""

    def __init__(self, rows: RowBlocks, capacity: int) -> None:
        chains = rows.chains
        self._chains = [chain.tolist() for chain in np.split(chains.keys, chains.starts[1:-1])]
        self._room = (capacity - rows.held + chains.lengths).tolist()
        self._keys: OrderedDict[int, None] = OrderedDict()

    def num_leading(self, row: int) -> int:
        """Blocks of the row's chain that are there, from its front on."""
        return bisect_left(self._chains[row], True, key=lambda key: key not in self._keys)

    def run(self, row: int) -> None:
        """The row runs to its end: its chain is there now, beside its other blocks."""
        for key in reversed(self._chains[row]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._room[row]:
            self._keys.popitem(last=False)


def pool_job(job: Job) -> DrawnJob:
    """What the pool makes of the job: a token id of four bytes stands for a token's text."""
    chains = ChainBuilder(0)
    chains.add(prompt.tobytes() for prompt in prompts_of(job))
    return drawn_job(job, chains.build())
