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

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from batchrun.pool.prefix_keys import ChainTable, IntArray, KeyArray
from benchmarks.scenarios import TokenIds


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
