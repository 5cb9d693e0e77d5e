"""Figures of a replay: over all arrived calls, misses included."""

from __future__ import annotations

import pytest

from batchrun.simulator.replay import OnlineResult, percentile
from benchmarks.replay import summarize, table


def result(
    *, ttft_s: float | None = 0.1, e2e_s: float = 1.0, tokens: int = 10, error: str | None = None
) -> OnlineResult:
    return OnlineResult(
        arrived_at_s=0, ttft_s=ttft_s, e2e_s=e2e_s, itl_s=(), num_output_tokens=tokens, error=error
    )


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 0.51, 3.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([1.0, float("inf")], 0.99, None),
    ],
)
def test_percentiles_are_by_nearest_rank(
    values: list[float], share: float, expected: float | None
) -> None:
    assert percentile(values, share) == expected


def test_tpot_is_the_mean_gap_after_the_first_token() -> None:
    assert result(ttft_s=0.1, e2e_s=1.0, tokens=10).tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    "without", [result(tokens=1), result(ttft_s=None, error="x"), result(error="lost")]
)
def test_tpot_is_none_where_there_is_no_whole_answer_of_two_tokens(without: OnlineResult) -> None:
    assert without.tpot_s is None


def test_calls_without_a_first_token_are_misses() -> None:
    results = [result(), result(), result(ttft_s=None, error="503"), result(ttft_s=9.0, e2e_s=9.5)]
    summary = summarize(results, slo_ttft_s=1.0, slo_tpot_s=0.2)
    assert summary["slo_ttft"] == 0.5
    assert summary["slo_tpot"] == 0.75
    assert summary["slo_attainment"] == 0.5
    assert (summary["arrived"], summary["answered"], summary["failed"]) == (4, 3, 1)
    assert summary["ttft_p50_s"] == 0.1
    assert summary["ttft_p99_s"] is None


def test_a_stream_that_breaks_off_met_its_ttft_only() -> None:
    summary = summarize([result(error="lost")], slo_ttft_s=1.0, slo_tpot_s=1.0)
    assert (summary["slo_ttft"], summary["slo_tpot"], summary["slo_attainment"]) == (1, 0, 0)


def test_an_empty_trace_has_no_shares() -> None:
    summary = summarize([], slo_ttft_s=1.0, slo_tpot_s=1.0)
    assert (summary["arrived"], summary["slo_attainment"], summary["ttft_p50_s"]) == (0, None, None)


def test_the_table_has_a_line_for_each_figure() -> None:
    summary = summarize([result()], slo_ttft_s=1.0, slo_tpot_s=1.0)
    lines = dict(line.split() for line in table(summary).splitlines())
    assert lines["ttft_p50_s"] == "0.1"
    assert set(lines) == set(summary)
