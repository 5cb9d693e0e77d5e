"""The reserve for online bursts."""

from __future__ import annotations

import pytest

from batchrun.cache.eviction import reserve_blocks


@pytest.mark.parametrize(
    ("share", "forecast_blocks", "expected"),
    [
        (None, 250.4, 150),
        (None, 40.0, 0),
        (None, None, 50),
        (None, 5_000.0, 900),
        (0.0, 250.0, 0),
        (0.3, 250.0, 200),
    ],
)
def test_the_reserve_is_what_the_forecast_has_beyond_what_online_holds_now(
    share: float | None, forecast_blocks: float | None, expected: int
) -> None:
    assert reserve_blocks(share, 1_000, 100, forecast_blocks) == expected
