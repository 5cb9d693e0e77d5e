"""The threshold on offline KV."""

from __future__ import annotations

import pytest

from batchrun.cache.reserve import FORECAST_RESERVE, ONLINE_RESERVES, KvUse


def kv_use(
    *, online: int = 100, running: int = 300, wanted: int = 200, subtree: int = 100
) -> KvUse:
    return KvUse(1_000, online, running, wanted, subtree)


@pytest.mark.parametrize(
    ("name", "forecast_blocks", "expected"),
    [
        ("forecast", 250.4, 250),
        ("forecast", 40.0, 100),
        ("forecast", None, 150),
        ("forecast", 5_000.0, 1_000),
        ("0%", 250.0, 100),
        ("30%", 250.0, 300),
    ],
)
def test_the_reserve_is_the_forecast_or_what_online_holds_now(
    name: str, forecast_blocks: float | None, expected: int
) -> None:
    assert ONLINE_RESERVES[name].blocks(1_000, 100, forecast_blocks) == expected


def test_a_candidate_fits_up_to_the_threshold_and_no_further() -> None:
    assert FORECAST_RESERVE.fits(kv_use(subtree=100), 400.0)
    assert not FORECAST_RESERVE.fits(kv_use(subtree=101), 400.0)


def test_blocks_that_planned_rows_will_hit_count_against_a_new_subtree() -> None:
    assert FORECAST_RESERVE.fits(kv_use(wanted=0, subtree=300), 400.0)
    assert not FORECAST_RESERVE.fits(kv_use(wanted=1, subtree=300), 400.0)


def test_an_idle_engine_admits_a_candidate_that_never_fits_beside_the_reserve() -> None:
    use = kv_use(running=0, wanted=200, subtree=900)
    assert not FORECAST_RESERVE.fits(use, 400.0)
    assert FORECAST_RESERVE.fits(use, 400.0, is_engine_idle=True)
    assert not FORECAST_RESERVE.fits(kv_use(subtree=1_001), 0.0, is_engine_idle=True)
