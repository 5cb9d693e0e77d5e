"""The parts of `benchmarks.trace_beside_jobs` that decide what its figures mean."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import EngineError
from batchrun.simulator.replay import OnlineResult
from benchmarks.trace_beside_jobs import TIMES_ALONE, bars, bounds_of
from benchmarks.trace_beside_jobs_rows import JOBS, Round


def ended(folder: Path, ids: list[str], errors: list[str | None]) -> Round:
    """A round of four rows with this output."""
    made = Round(folder, "short", 0, 4)
    pq.write_table(pa.table({"id": ["a", "b", "c", "d"]}), made.input_path)
    pq.write_table(pa.table({"id": ids, "error": pa.array(errors, pa.string())}), made.output_path)
    return made


def test_every_row_once_is_no_loss(tmp_path: Path) -> None:
    found = ended(tmp_path, ["d", "a", "b", "c"], [None] * 4).account()

    assert set(found.values()) == {0}


def test_rows_that_are_missing_repeated_unknown_or_failed_are_counted(tmp_path: Path) -> None:
    found = ended(tmp_path, ["a", "a", "b", "x"], [None, None, "timeout", None]).account()

    assert found == {"rows_missing": 2, "rows_repeated": 1, "rows_unknown": 1, "rows_failed": 1}


def test_files_of_a_round_go(tmp_path: Path) -> None:
    ended(tmp_path, ["a"], [None]).remove()

    assert list(tmp_path.iterdir()) == []


def call(ttft_s: float, tpot_s: float) -> OnlineResult:
    return OnlineResult(0.0, ttft_s, ttft_s + 10 * tpot_s, (tpot_s,) * 10, 11)


def test_bounds_are_multiples_of_the_medians_alone() -> None:
    found = bounds_of([call(0.01, 0.002), call(0.02, 0.003), call(0.5, 0.1)])

    assert found == pytest.approx({
        "slo_ttft_s": TIMES_ALONE * 0.02,
        "slo_tpot_s": TIMES_ALONE * 0.003,
    })
    with pytest.raises(EngineError, match="no call was answered alone"):
        bounds_of([])


def test_each_promise_has_a_bar() -> None:
    counts = dict.fromkeys(("rows_missing", "rows_repeated", "rows_unknown", "rows_failed"), 0)
    rates = {f"{kind}_{name}": 0.5 for kind in JOBS for name in ("hit_rate", "expected_hit_rate")}
    whole = {"slo_attainment": 0.98, **counts, **rates}

    assert all(bar.is_met for bar in bars(whole))
    for worse in ({"slo_attainment": 0.9}, {"rows_missing": 1}, {"short_hit_rate": 0.4}):
        assert not all(bar.is_met for bar in bars({**whole, **worse}))
