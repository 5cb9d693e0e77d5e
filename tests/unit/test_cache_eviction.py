"""Eviction orders: what goes first, and that tiers are few and monotone."""

from __future__ import annotations

import pytest

from batchrun.cache.eviction import (
    ECHO_RC,
    EVICTIONS,
    FINISHED_CALL_TIER,
    LRU,
    NEXT_USE,
    UNNEEDED_TIER,
    EvictionOrder,
)

ORDERS = list(EVICTIONS.values())


def test_every_order_stands_under_its_own_name() -> None:
    assert all(EVICTIONS[order.name] is order for order in (LRU, ECHO_RC, NEXT_USE))


def test_lru_has_one_tier_for_everything() -> None:
    assert LRU.num_tiers == 1
    assert LRU.eviction_key(9, 3, 0) == LRU.finished_call_tier == LRU.online_floor_tier == 0


@pytest.mark.parametrize("order", [ECHO_RC, NEXT_USE], ids=lambda order: order.name)
def test_wanted_blocks_stand_above_finished_online_ones_and_below_the_floor(
    order: EvictionOrder,
) -> None:
    tiers = {
        order.eviction_key(count, rank, 7)
        for count in (1, 2, 15, 16, 17, 100, 10**9)
        for rank in (0, 7, 8, 11, 12, 1_000, 10**7, 10**12)
    }
    assert UNNEEDED_TIER < FINISHED_CALL_TIER == order.finished_call_tier < min(tiers)
    assert max(tiers) < order.online_floor_tier == order.num_tiers - 1
    assert order.num_tiers <= 36


def test_echo_rc_keeps_what_more_rows_will_read() -> None:
    tiers = [ECHO_RC.eviction_key(count, 5, 0) for count in range(1, 2_000)]
    assert tiers == sorted(tiers)
    assert len(set(tiers[:16])) == 16
    assert all(one != other for one, other in zip(tiers[15:120:16], tiers[31:120:16], strict=False))


@pytest.mark.parametrize("front", [0, 1, 63, 64, 100, 4**10 - 1, 12_345_678])
def test_next_use_evicts_the_latest_use_first(front: int) -> None:
    ranks = [front + distance for distance in (0, 1, 2, 5, 20, 90, 400, 5_000, 10**6, 10**8)]
    tiers = [NEXT_USE.eviction_key(1, rank, front) for rank in ranks]
    assert tiers == sorted(tiers, reverse=True)
    assert tiers[0] == NEXT_USE.eviction_key(1, max(0, front - 9), front) > tiers[-1]


def test_next_use_tells_near_uses_apart_while_far_ones_share_a_bucket() -> None:
    near = {NEXT_USE.eviction_key(1, rank, 4096) for rank in range(4097, 4101)}
    far = {NEXT_USE.eviction_key(1, rank, 4096) for rank in range(8192, 8292)}
    assert len(near) == 4
    assert len(far) == 1


def test_a_tier_only_rises_while_the_front_advances() -> None:
    for rank in (1, 17, 64, 255, 1_000):
        tiers = [NEXT_USE.eviction_key(1, rank, front) for front in range(1_100)]
        assert tiers == sorted(tiers)


def test_blocks_filed_at_an_earlier_front_stay_in_the_right_order() -> None:
    for old_front in range(0, 70, 3):
        for front in range(old_front, 70):
            filed = [NEXT_USE.eviction_key(1, rank, old_front) for rank in range(front + 1, 90)]
            fresh = [NEXT_USE.eviction_key(1, rank, front) for rank in range(front + 1, 90)]
            for i in range(len(filed)):
                assert all(fresh[j] >= filed[i] for j in range(i + 1))
