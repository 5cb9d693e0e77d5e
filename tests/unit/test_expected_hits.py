"""Hit rates expected at a KV size: known cases, and a cache that is simulated token by token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.pool.expected_hits import RowWalk, expected_hits
from batchrun.pool.radix_tree import NO_NODE

PARENTS = (NO_NODE, 0, 0, NO_NODE)
TOKENS = (10, 40, 60, 30)
"""Two documents of 40 and 60 tokens behind a system prompt of 10, and one of 30 without it."""


def walk_of(innermost: Sequence[int], own_tokens: Sequence[int] | int = 5) -> RowWalk:
    own = np.broadcast_to(np.array(own_tokens, dtype=np.float64), (len(innermost),))
    parents, tokens = np.array(PARENTS), np.array(TOKENS, dtype=np.float64)
    return RowWalk(np.array(innermost, dtype=np.int64), own, parents, tokens)


@pytest.mark.parametrize("eviction", ["batchrun", "lru"])
def test_with_room_for_all_a_row_finds_what_any_row_before_it_has(eviction: str) -> None:
    walk = walk_of([1, 2, 3, 1, 1, 2, NO_NODE])
    found = expected_hits(walk, 1_000, drops_used=eviction == "batchrun")
    assert found.tolist() == [0, 10, 0, 50, 50, 70, 0]


def test_documents_in_turn_push_each_other_out_of_a_small_lru_cache() -> None:
    found = expected_hits(walk_of([1, 3, 1, 3, 1, 3]), 60, drops_used=False)
    assert found.tolist() == [0, 0, 25, 5, 25, 5]


def test_rows_that_stand_together_find_their_prefix_in_a_cache_that_holds_one_row() -> None:
    found = expected_hits(walk_of([1, 1, 1, 2, 2, 3, 3]), 75, drops_used=True)
    assert found.tolist() == [0, 50, 50, 10, 70, 0, 30]


def test_what_no_row_needs_goes_before_what_some_row_needs() -> None:
    rows = [3, 1, 1, 1, 3]
    kept = expected_hits(walk_of(rows, 15), 100, drops_used=True)
    lost = expected_hits(walk_of(rows, 15), 100, drops_used=False)
    assert (kept[-1], lost[-1]) == (30, 5)


def test_a_row_that_needs_more_than_the_cache_never_runs() -> None:
    found = expected_hits(walk_of([1, 2, 1]), 60, drops_used=False)
    assert np.isnan(found).tolist() == [False, True, False]
    assert found[2] == 50
    assert np.isnan(expected_hits(walk_of([1, 2]), 20, drops_used=True)).all()


def simulated(rows: Sequence[tuple[int, int]], kv_tokens: int) -> list[float]:
    """The same with LRU, every token by itself and every row alone."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    found = []
    for number, (innermost, own_tokens) in enumerate(rows):
        path, node = [], innermost
        while node != NO_NODE:
            path.append(node)
            node = PARENTS[node]
        prompt = [(node, i) for node in reversed(path) for i in range(TOKENS[node])]
        hits = next((i for i, token in enumerate(prompt) if token not in cache), len(prompt))
        found.append(float(hits))
        for token in [*((-2 - number, i) for i in range(own_tokens)), *reversed(prompt)]:
            cache[token] = None
            cache.move_to_end(token)
        while len(cache) > kv_tokens:
            cache.popitem(last=False)
    return found


@settings(max_examples=200)
@given(
    rows=st.lists(st.tuples(st.sampled_from([NO_NODE, 0, 1, 2, 3]), st.integers(0, 30))),
    kv_tokens=st.integers(101, 300),
)
def test_nodes_fare_as_their_tokens_do_one_by_one(
    rows: list[tuple[int, int]], kv_tokens: int
) -> None:
    walk = walk_of([node for node, _ in rows], [own for _, own in rows])
    assert expected_hits(walk, kv_tokens, drops_used=False).tolist() == simulated(rows, kv_tokens)
