"""What the demo says of its windows: bounds, the calls that were kept, rows, the picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchrun.config import SloConfig
from batchrun.errors import EngineError
from batchrun.simulator.replay import OnlineResult
from benchmarks.demo import (
    ALONE,
    BATCHRUN,
    FEWEST_ROWS,
    MOST_ROWS,
    PATIENCE,
    TRACE,
    VLLM,
    Side,
    Window,
    bounds_of,
    lateness,
    others_cores,
    record_of,
    rows_for,
    save_picture,
    sentence,
)

SLO = SloConfig(ttft_s=0.5, tpot_s=0.05)


def call(
    at_s: float, ttft_s: float | None = 0.1, gap_s: float = 0.01, error: str | None = None
) -> OnlineResult:
    """A call with five tokens."""
    first_s = ttft_s or 0.0
    return OnlineResult(at_s, ttft_s, first_s + 4 * gap_s, (gap_s,) * 4, 5, error)


def sides() -> list[Side]:
    """Four calls: alone the last is late; on vLLM only the first is in time, on batchrun three.
    Ten rows and twelve were done in twenty seconds."""
    alone = Window([call(0.0), call(1.0), call(2.0), call(3.0, ttft_s=0.6)])
    vllm = [call(0.0), call(1.0, ttft_s=2.0), call(2.0, gap_s=0.2), call(3.0)]
    batchrun = [call(0.0), call(1.0), call(2.0), call(3.0, error="gone")]
    return [
        Side(VLLM, alone, Window(vllm, [(0.0, 0), (20.0, 10)])),
        Side(BATCHRUN, alone, Window(batchrun, [(0.0, 1), (20.0, 13)], others_cores=0.7)),
    ]


def test_bounds_are_so_many_medians_of_the_calls_alone() -> None:
    alone = [call(0.0, ttft_s=0.02), call(1.0, ttft_s=0.04), call(2.0, ttft_s=9.0, gap_s=0.02)]

    bounds = bounds_of(alone)

    assert bounds.ttft_s == pytest.approx(PATIENCE * 0.04)
    assert bounds.tpot_s == pytest.approx(PATIENCE * 0.01)


@pytest.mark.parametrize(
    ("gap_s", "rows"), [(0.005, 104), (0.008, 64), (1.0, FEWEST_ROWS), (1e-4, MOST_ROWS)]
)
def test_a_slower_machine_gets_fewer_rows_of_whole_documents(gap_s: float, rows: int) -> None:
    assert rows_for([call(0.0, gap_s=gap_s)] * 3) == rows


def test_without_an_answer_there_are_no_bounds() -> None:
    with pytest.raises(EngineError, match="no call was answered alone"):
        bounds_of([call(0.0, ttft_s=None, error="refused")])


@pytest.mark.parametrize(
    ("seen", "late"),
    [
        (call(0.0, ttft_s=0.25), 0.5),
        (call(0.0, ttft_s=0.1, gap_s=0.1), 2.0),
        (call(0.0, ttft_s=None), float("inf")),
        (call(0.0, error="gone"), float("inf")),
    ],
)
def test_a_call_is_as_late_as_by_the_bound_that_it_took_most_of(
    seen: OnlineResult, late: float
) -> None:
    assert lateness(seen, SLO) == pytest.approx(late)


def test_only_calls_that_are_in_time_alone_count_and_those_beside_rows() -> None:
    vllm, batchrun = sides()

    assert vllm.kept_share(SLO) == pytest.approx(1 / 3)
    assert batchrun.kept_share(SLO) == 1.0
    soon_over = Window(vllm.beside.calls, [(0.2, 0), (0.9, 10)])
    assert Side(VLLM, vllm.alone, soon_over).kept_share(SLO) == 1.0


def test_the_sentence_compares_calls_and_rows() -> None:
    assert sentence(sides(), SLO) == (
        "of the calls that this machine keeps in time alone, vLLM's priorities kept 33% beside "
        "0.5 rows/s and batchrun kept 100% beside 0.6 rows/s"
    )
    record = record_of(sides(), SLO)
    assert record["vllm_kept_share"] == pytest.approx(1 / 3)
    assert record["batchrun_beside_rows_per_s"] == 0.6
    assert record["alone_slo_attainment"] == 0.75
    assert others_cores(sides()) == 0.7


def test_the_picture_has_every_call_and_the_sentence(tmp_path: Path) -> None:
    path = tmp_path / "demo.svg"

    save_picture(sides(), SLO, path)

    drawn = path.read_text()
    assert "vLLM's priorities kept 33% beside 0.5 rows/s" in drawn
    for name in (ALONE, VLLM, BATCHRUN):
        assert f">{name}</text>" in drawn
    ticks = [float(text) for text in re.findall(r">(\d+)</text>", drawn)]
    assert max(ticks) >= TRACE.duration_s
