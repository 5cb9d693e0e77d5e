"""Two API keys of equal weight, one in bad faith: the other keeps its share of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tenants import FAIR_SHARE, LEAST_KEPT, measure

NUM_ROWS = 120


@pytest.mark.nightly
def test_a_flood_of_everything_takes_no_rows_from_another_key(tmp_path: Path) -> None:
    record = measure(tmp_path, NUM_ROWS, is_bad=True)

    assert record["rows"] == NUM_ROWS
    assert record["other_rows"] > 0
    assert record["share"] >= LEAST_KEPT * FAIR_SHARE
    assert record["num_400"] > 0 and record["num_429"] > 0
