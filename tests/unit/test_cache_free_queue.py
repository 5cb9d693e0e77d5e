"""The tiered free queue: order, counts, and re-filing."""

from __future__ import annotations

import pytest
from cache_builders import Block

from batchrun.cache.free_queue import TieredFreeQueue


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def queue_of(tiers: dict[int, int], num_blocks: int = 6) -> tuple[TieredFreeQueue, list[Block]]:
    """Blocks 0..n-1, filed by `tiers` (default 0), which the test may change."""
    blocks = [Block(i) for i in range(num_blocks)]
    return TieredFreeQueue(blocks, 4, lambda block: tiers.get(block.block_id, 0)), blocks


def test_lower_tiers_are_handed_out_first_and_equals_in_order() -> None:
    queue, _ = queue_of({0: 2, 3: 1})
    assert ids(queue.get_all_free_blocks()) == [1, 2, 4, 5, 3, 0]
    assert ids(queue.popleft_n(5)) == [1, 2, 4, 5, 3]
    assert queue.popleft().block_id == 0


def test_blocks_without_a_hash_come_back_to_the_very_front() -> None:
    queue, blocks = queue_of({})
    queue.popleft_n(6)
    queue.append_n([blocks[0], blocks[1]])
    queue.prepend_n([blocks[4], blocks[5]])
    assert ids(queue.get_all_free_blocks()) == [4, 5, 0, 1]


def test_a_block_that_rose_while_it_was_free_is_not_handed_out_before_its_turn() -> None:
    tiers: dict[int, int] = {}
    queue, _ = queue_of(tiers)
    tiers[0] = 3
    assert ids(queue.popleft_n(2)) == [1, 2]
    assert queue.free_by_tier() == [3, 0, 0, 1]
    assert ids(queue.popleft_n(4)) == [3, 4, 5, 0]


def test_a_child_that_rises_goes_before_a_parent_that_was_freed_into_its_tier() -> None:
    child, parent = 0, 1
    tiers: dict[int, int] = {}
    queue, blocks = queue_of(tiers, 3)
    queue.remove(blocks[parent])
    tiers |= {child: 2, parent: 2}
    queue.append(blocks[parent])
    assert ids(queue.popleft_n(2)) == [2, child]


def test_a_block_that_fell_is_filed_again_when_told() -> None:
    tiers = {0: 3, 1: 3}
    queue, _ = queue_of(tiers, 3)
    tiers.clear()
    assert queue.retier([1, 0]) == 2
    assert ids(queue.get_all_free_blocks()) == [2, 1, 0]


def test_blocks_in_use_are_not_filed_again() -> None:
    queue, blocks = queue_of({})
    queue.remove(blocks[2])
    assert queue.retier([2]) == 0
    assert queue.num_free_blocks == 5


def test_free_blocks_are_counted_by_tier() -> None:
    queue, blocks = queue_of({0: 2, 3: 1, 4: 3})
    assert queue.free_by_tier() == [3, 1, 1, 1]
    queue.remove(blocks[3])
    assert queue.free_by_tier() == [3, 0, 1, 1]


def test_iterating_goes_on_into_the_next_tier() -> None:
    queue, blocks = queue_of({0: 2, 3: 1})
    assert ids(list(queue.iter_blocks_after(blocks[4]))) == [5, 3, 0]
    queue.remove(blocks[4])
    assert list(queue.iter_blocks_after(blocks[4])) == []


def test_an_empty_queue_has_nothing_to_hand_out() -> None:
    queue, blocks = queue_of({})
    assert queue.popleft_n(0) == []
    queue.popleft_n(6)
    with pytest.raises(ValueError, match="no free blocks"):
        queue.popleft()
    with pytest.raises(AssertionError):
        queue.popleft_n(1)
    with pytest.raises(RuntimeError, match="block 3 is not in the free queue"):
        queue.remove(blocks[3])


def test_check_sees_a_block_that_was_put_back_twice() -> None:
    queue, blocks = queue_of({})
    queue.append(blocks[0])
    with pytest.raises(AssertionError):
        queue.check()
