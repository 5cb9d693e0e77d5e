"""The most prompt tokens that any order and any eviction can serve from a prefix cache.

The model. A cache holds `cache_blocks` blocks. A row reads the chain of the full blocks of its
prompt; what it finds of it from the front on is hit, but never the block of its last token, which
is always computed (vLLM does the same). It holds the chain and the blocks of the rest of its prompt
and of its output, whose last token is never computed, until it ends. Anything that no running row
holds may be evicted at any time.

The bound. A block can be hit only after a row has computed it, so of the R rows that read it at
most R - 1 hit it, and at most the H rows for which it is not the block of the last token: the sum
of min(H, R - 1) over all distinct blocks bounds every order and eviction, with any number of rows
at once, and beside online calls. A row that needs more than the whole cache never runs; it neither
hits nor computes.

It is reached. Walk the prefix tree depth first, a row that ends in a node before those that go on,
one row at a time. Each row then finds all that it shares with any row before it in the row just
before it, whose blocks have just been let go while nothing else was needed. So where rows may run
one at a time the bound is the optimum itself, whatever the size of the cache (SGLang's theorem 3.1,
arXiv 2312.07104, here with the last token). Rows that run at once reach it too while each fits
beside those still running; where they do not, it may be more than any schedule as fast can have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import xxhash

from batchrun.pool.prefix_keys import ChainTable, IntArray, KeyArray
from benchmarks.scenarios import TokenIds

Blocks = frozenset[int]
Numbers = tuple[int, ...]


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
        cls, prompts: Iterable[TokenIds], output_tokens: Iterable[int], block_tokens: int = 16
    ) -> RowBlocks:
        """The rows with these prompts and numbers of tokens to generate."""
        chains: list[KeyArray] = []
        prompt_tokens: list[int] = []
        for prompt in prompts:
            chains.append(block_chain(prompt, block_tokens))
            prompt_tokens.append(len(prompt))
        lengths = np.array(prompt_tokens, dtype=np.int64)
        ends = lengths - 1 + np.fromiter(output_tokens, dtype=np.int64, count=len(lengths))
        return cls(ChainTable.of(chains), (lengths - 1) // block_tokens, -(-ends // block_tokens))

    @property
    def num_rows(self) -> int:
        """Rows of the job."""
        return self.chains.num_rows


def block_chain(prompt: TokenIds, block_tokens: int) -> KeyArray:
    """The keys of a prompt's full blocks, each chained to the one before."""
    stride = block_tokens * prompt.itemsize
    content = memoryview(prompt.tobytes())
    keys = np.empty(len(prompt) // block_tokens, dtype=np.uint64)
    key = 0
    for i in range(len(keys)):
        key = xxhash.xxh3_64_intdigest(content[i * stride : (i + 1) * stride], key)
        keys[i] = key
    return keys


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


def searched_hit_blocks(
    rows: RowBlocks,
    cache_blocks: int,
    num_running: int = 1,
    order: Sequence[int] | None = None,
) -> int | None:
    """The exact most hits of a few small rows, by trying every order and every eviction.

    With an `order`, only that one is tried. `num_running` rows run at once: each row starts while
    the `num_running` - 1 before it still hold their blocks. None when no order lets the rows that
    fit the cache do so.
    """
    rank = range(rows.num_rows) if order is None else order
    fitting = tuple(row for row in rank if rows.held[row] <= cache_blocks)
    search = _Search(rows, cache_blocks, num_running, is_ordered=order is not None)
    return search.best(fitting, (), frozenset())


class _Search:
    """Tries everything, each state once. Rows and blocks go by number and key."""

    def __init__(
        self, rows: RowBlocks, cache_blocks: int, num_running: int, *, is_ordered: bool
    ) -> None:
        keys, starts = rows.chains.keys, rows.chains.starts
        self._chains = [tuple(chain.tolist()) for chain in np.split(keys, starts[1:-1])]
        self._most_hits: list[int] = rows.most_hits.tolist()
        self._own: list[int] = (rows.held - rows.chains.lengths).tolist()
        self._cache_blocks = cache_blocks
        self._num_running = num_running
        self._is_ordered = is_ordered
        self._known: dict[tuple[Numbers, Numbers, Blocks], int | None] = {}

    def best(self, left: Numbers, running: Numbers, cached: Blocks) -> int | None:
        """The most hits of the rows `left`, after `running` began, with `cached` in the cache."""
        if not left:
            return 0
        state = left, running, cached
        if state not in self._known:
            tried = left[:1] if self._is_ordered else left
            found = [self._best_with(row, *state) for row in tried]
            self._known[state] = max((hits for hits in found if hits is not None), default=None)
        return self._known[state]

    def _best_with(self, row: int, left: Numbers, running: Numbers, cached: Blocks) -> int | None:
        """The same if this row goes next; None when it finds no room."""
        now = (*running, row)[-self._num_running :]
        held = frozenset(block for other in now for block in self._chains[other])
        room = self._cache_blocks - len(held) - sum(self._own[other] for other in now)
        if room < 0:
            return None
        hits = _leading(self._chains[row][: self._most_hits[row]], cached)
        others = tuple(other for other in left if other != row)
        more = [self.best(others, now, held | kept) for kept in _kept_free(cached - held, room)]
        return max((hits + number for number in more if number is not None), default=None)


def _leading(chain: Numbers, cached: Blocks) -> int:
    """Blocks of the chain that are found from its front on."""
    return next((i for i, block in enumerate(chain) if block not in cached), len(chain))


def _kept_free(free: Blocks, room: int) -> Iterator[Blocks]:
    """What can stay of the blocks that nobody holds: to evict more than needed never helps."""
    return map(frozenset, combinations(sorted(free), min(room, len(free))))
