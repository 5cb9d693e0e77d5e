"""The bound on prefix hits, against every order and every eviction of small jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from searched_hits import searched_hit_blocks

from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import JobShape
from batchrun.simulator.online import Calls
from batchrun.simulator.simulation import Simulation, SimulationPlan
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.hit_orders import RowBlocks, most_hit_blocks, pool_job
from benchmarks.row_feeds import daemon_of
from benchmarks.scenarios import Order, draw_job

BLOCK_TOKENS = 2
ONE_TOKEN_OUT = 1

prompts = st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=5)
outputs = st.integers(1, 3)


def blocks_of(texts: Sequence[str], output_tokens: int = ONE_TOKEN_OUT) -> RowBlocks:
    """Rows with a token for each letter, in blocks of two."""
    token_ids = [np.array([ord(letter) for letter in text], dtype=np.uint32) for text in texts]
    return RowBlocks.of(token_ids, [output_tokens] * len(texts), BLOCK_TOKENS)


def held_together(rows: RowBlocks, numbers: Sequence[int]) -> int:
    """Blocks of rows that run at once, shared ones counted once."""
    chains = np.split(rows.chains.keys, rows.chains.starts[1:-1])
    shared = {int(key) for number in numbers for key in chains[number]}
    return len(shared) + sum(int(rows.held[n]) - len(chains[n]) for n in numbers)


@given(prompts, outputs, st.integers(1, 12), st.integers(1, 3))
def test_no_order_and_no_eviction_exceeds_the_bound(
    texts: list[str], output_tokens: int, cache_blocks: int, num_running: int
) -> None:
    rows = blocks_of(texts, output_tokens)
    found = searched_hit_blocks(rows, cache_blocks, num_running)

    assert found is None or found <= most_hit_blocks(rows, cache_blocks)


@given(prompts, outputs, st.integers(1, 12))
def test_one_row_at_a_time_some_order_reaches_the_bound(
    texts: list[str], output_tokens: int, cache_blocks: int
) -> None:
    rows = blocks_of(texts, output_tokens)

    assert searched_hit_blocks(rows, cache_blocks) == most_hit_blocks(rows, cache_blocks)


@given(prompts, st.integers(1, 12), st.integers(1, 3))
def test_a_depth_first_walk_reaches_the_bound_where_it_fits(
    texts: list[str], cache_blocks: int, num_running: int
) -> None:
    texts = sorted(texts)
    rows = blocks_of(texts)
    walk = range(len(texts))
    running = [walk[max(0, i + 1 - num_running) : i + 1] for i in walk]
    assume(all(held_together(rows, numbers) <= cache_blocks for numbers in running))

    found = searched_hit_blocks(rows, cache_blocks, num_running, walk)
    assert found == most_hit_blocks(rows, cache_blocks)


def test_every_distinct_block_is_computed_once() -> None:
    # Blocks aa-bb are read by three rows and aa alone by a fourth; cc-dd by one row.
    rows = blocks_of(["aabbx", "aabby", "aabbz", "aaxyz", "ccddx"])

    assert most_hit_blocks(rows, 100) == 2 * 2 + 1
    assert searched_hit_blocks(rows, 100) == 5


def test_the_block_of_the_last_token_is_always_computed() -> None:
    assert most_hit_blocks(blocks_of(["aabb", "aabb"]), 100) == 1
    assert most_hit_blocks(blocks_of(["aabb", "aabbc"]), 100) == 2


def test_a_row_larger_than_the_cache_neither_hits_nor_computes() -> None:
    rows = blocks_of(["aabbccdd", "aab", "aac"])

    assert most_hit_blocks(rows, 3) == 1
    assert most_hit_blocks(rows, 4) == 2


def test_an_order_that_alternates_between_documents_falls_short_in_a_small_cache() -> None:
    rows = blocks_of(["aabbx", "ccddx", "aabby", "ccddy"])

    assert searched_hit_blocks(rows, 3, order=[0, 1, 2, 3]) == 0
    assert searched_hit_blocks(rows, 3, order=[0, 2, 1, 3]) == most_hit_blocks(rows, 3) == 4


def test_rows_that_must_overlap_need_room_for_both() -> None:
    rows = blocks_of(["aabbx", "ccddx"])

    assert searched_hit_blocks(rows, 5, num_running=2) is None
    assert searched_hit_blocks(rows, 6, num_running=2) == 0


@pytest.mark.parametrize("num_blocks", [60, 400])
def test_the_virtual_engine_reaches_the_bound_and_never_exceeds_it(num_blocks: int) -> None:
    job = draw_job(JobShape(8, (200, 400), (2, 5)), 3, Order.SHUFFLED)
    rows = RowBlocks.of_job(job)
    shape = EngineShape(num_blocks=num_blocks)
    plan = SimulationPlan(math.inf, Calls.of([]), engine=EnginePlan(shape))
    simulation = Simulation(plan, feed=daemon_of([pool_job(job)]))
    simulation.engines.run_until(math.inf)
    offline = simulation.watch.offline

    bound = most_hit_blocks(rows, num_blocks)
    assert sum(job.num_done for job in simulation.feed.jobs) == rows.chains.num_rows
    assert 0.95 * bound <= offline.hit_tokens / shape.block_tokens <= bound
