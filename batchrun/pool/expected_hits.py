"""What a prefix cache of a given size serves of rows that run in a given order.

The cache holds whole prefix nodes, or the front of one. Rows enter in order and use the nodes above
them, and tokens of their own: the rest of the prompt and the output. What was used longest ago goes
first. The window of rows that run at once needs no account of its own: it is what was used last,
and a row that finds no room waits until the oldest of them has ended, so the nodes there are when a
row begins are those of the same cache with rows one at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

import numpy as np

from batchrun.pool.prefix_keys import IntArray
from batchrun.pool.prompt_study import FloatArray, path_sums
from batchrun.pool.radix_tree import path_up


@dataclass(frozen=True, slots=True, eq=False)
class RowWalk:
    """Rows in the order in which they run.

    `innermost[i]` is the deepest prefix node of the i-th row, or NO_NODE; `own_tokens[i]` is what
    it has below that, output included. `parents` and `node_tokens` are of the nodes.
    """

    innermost: IntArray
    own_tokens: FloatArray
    parents: IntArray
    node_tokens: FloatArray


def expected_hits(walk: RowWalk, kv_tokens: float, *, drops_used: bool) -> FloatArray:
    """Tokens that each row finds; NaN for a row that needs more than `kv_tokens` and never runs.

    `drops_used`: what no row will use again goes first (batchrun's eviction), else plain LRU, as
    in stock vLLM. O(runs of rows with one innermost node x nodes above them).
    """
    depths = np.append(path_sums(walk.parents, walk.node_tokens), 0.0)
    fits = np.flatnonzero(depths[walk.innermost] + walk.own_tokens <= kv_tokens)
    found = np.full(len(walk.innermost), np.nan)
    if not fits.size:
        return found
    innermost = walk.innermost[fits]
    hits = depths[innermost]
    starts = np.flatnonzero(np.diff(innermost, prepend=-2))
    gather = np.maximum if drops_used else np.add
    own = gather.reduceat(walk.own_tokens[fits], starts)
    cache = _NodeCache(walk, kv_tokens)
    nodes = innermost[starts].tolist()
    left = _runs_below(nodes, cache) if drops_used else None
    firsts = [
        cache.use(node, tokens, left) for node, tokens in zip(nodes, own.tolist(), strict=True)
    ]
    hits[starts] = firsts
    found[fits] = hits
    return found


class _NodeCache:
    """The nodes used last, with tokens that no other row can use among them."""

    def __init__(self, walk: RowWalk, kv_tokens: float) -> None:
        self.parents: list[int] = walk.parents.tolist()
        self._tokens: list[float] = walk.node_tokens.tolist()
        self._room = kv_tokens
        self._cached: OrderedDict[int, float] = OrderedDict()
        self._total = 0.0
        self._private = count(-2, -1)

    def use(self, node: int, own_tokens: float, left: list[int] | None) -> float:
        """Rows below `node` run, one after the other; what the first of them finds, in tokens.

        `left`, where given, counts the runs to come of each node: a node goes with its last, and
        the rows' own tokens, here of the largest row, with the run.
        """
        path = path_up(self.parents, node)
        found = self._leading(path)
        private = next(self._private)
        self._put(private, min(own_tokens, self._room))
        for each in path:
            self._put(each, self._tokens[each])
        self._evict()
        if left is not None:
            self._drop(private)
            for each in path:
                left[each] -= 1
                if not left[each]:
                    self._drop(each)
        return found

    def _leading(self, path: list[int]) -> float:
        found = 0.0
        for node in reversed(path):
            cached = self._cached.get(node, 0.0)
            found += cached
            if cached < self._tokens[node]:
                break
        return found

    def _put(self, key: int, tokens: float) -> None:
        self._total += tokens - self._cached.pop(key, 0.0)
        self._cached[key] = tokens

    def _drop(self, key: int) -> None:
        self._total -= self._cached.pop(key, 0.0)

    def _evict(self) -> None:
        """The oldest goes; of the last that has to, only as much as is needed."""
        while self._total > self._room:
            key, tokens = self._cached.popitem(last=False)
            excess = self._total - self._room
            self._total -= tokens
            if tokens > excess:
                self._cached[key] = tokens - excess
                self._cached.move_to_end(key, last=False)
                self._total += tokens - excess


def _runs_below(nodes: list[int], cache: _NodeCache) -> list[int]:
    """How many of the runs lie below each node."""
    left = [0] * len(cache.parents)
    for node in nodes:
        for each in path_up(cache.parents, node):
            left[each] += 1
    return left
