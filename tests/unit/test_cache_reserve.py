"""The threshold on offline KV."""

from __future__ import annotations

import pytest

from batchrun.cache.eviction import KvUse, OnlineReserve


def kv_use(
    *, online: int = 100, running: int = 300, wanted: int = 200, subtree: int = 100
) -> KvUse:
    return KvUse(1_000, online, running, wanted, subtree)


@pytest.mark.parametrize(
    ("share", "forecast_blocks", "expected"),
    [
        (None, 250.4, 250),
        (None, 40.0, 100),
        (None, None, 150),
        (None, 5_000.0, 1_000),
        (0.0, 250.0, 100),
        (0.3, 250.0, 300),
    ],
)
def test_the_reserve_is_the_forecast_or_what_online_holds_now(
    share: float | None, forecast_blocks: float | None, expected: int
) -> None:
    assert OnlineReserve(share).blocks(1_000, 100, forecast_blocks) == expected


def test_a_candidate_fits_up_to_the_threshold_and_no_further() -> None:
    assert kv_use(subtree=100).fits_beside(400)
    assert not kv_use(subtree=101).fits_beside(400)


def test_blocks_that_planned_rows_will_hit_count_against_a_new_subtree() -> None:
    assert kv_use(wanted=0, subtree=300).fits_beside(400)
    assert not kv_use(wanted=1, subtree=300).fits_beside(400)
