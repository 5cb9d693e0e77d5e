"""The trace itself: what it promises, its file, its parts, and what is made of it."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError, InputError
from batchrun.simulator.traces.rates import RateSeries, draw_trace
from batchrun.simulator.traces.reading import load_parquet, save_trace
from batchrun.simulator.traces.trace import (
    STRETCH_S,
    PrefixBlocks,
    Trace,
    find_peak,
    prefix_hit_rate,
    redrawn,
    scale_rate,
    stratified_windows,
    summarize_trace,
)


def poisson(num: int = 2_000, *, seed: int = 0, prefix: PrefixBlocks | None = None) -> Trace:
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(0.5, num))
    lengths = rng.integers(1, 1_000, (2, num))
    return Trace.of(times_s, *lengths, prefix=prefix, source="made")


def test_calls_are_sorted_from_0_and_last_a_mean_gap_longer() -> None:
    trace = Trace.of([7, 3, 5], [1, 2, 3], [4, 5, 6], prefix=PrefixBlocks.of([[1], [], [2]], 16))

    assert trace.arrival_s.tolist() == [0, 2, 4]
    assert trace.num_prompt_tokens.tolist() == [2, 3, 1]
    assert trace.duration_s == 6
    assert trace.rate_per_s == 0.5
    assert trace.prefix is not None
    assert [trace.prefix.of_request(i).tolist() for i in range(3)] == [[], [2], [1]]


@pytest.mark.parametrize(
    ("times", "prompts", "outputs", "says"),
    [
        ([0, 2, 1], [1, 1, 1], [1, 1, 1], "request 3 arrives before"),
        ([0, 1], [1, 0], [1, 1], "request 2 has no prompt token"),
        ([0, 1], [1, 1], [0, 1], "request 1 has no output token"),
        ([0, 1], [1], [1, 1], "as many prompt and output lengths"),
        ([0, 9], [1, 1], [1, 1], r"\[0, duration\)"),
        ([-1, 2], [1, 1], [1, 1], r"\[0, duration\)"),
        ([0, float("nan")], [1, 1], [1, 1], r"\[0, duration\)"),
    ],
)
def test_what_is_no_trace_is_refused(
    times: list[float], prompts: list[int], outputs: list[int], says: str
) -> None:
    arrays = np.array(times, float), np.array(prompts), np.array(outputs)
    with pytest.raises(DataError, match=says):
        Trace(*arrays, duration_s=9.0)


@pytest.mark.parametrize(
    ("times_s", "before"), [([0, 1.7e9, 1.7e9 + 5, 1.7e9 + 9], 1), ([1e300, 5, 0], 2)]
)
def test_a_time_far_from_the_others_is_refused(times_s: list[float], before: int) -> None:
    ones = np.ones(len(times_s), np.int64)
    with pytest.raises(DataError, match=f"more than 1,000; .* is after request {before}: correct"):
        Trace.of(times_s, ones, ones)


def test_time_without_calls_takes_no_room_in_a_draw() -> None:
    """A stretch takes some numbers, no object of its own."""
    trace = Trace.of([0, 1e7], [1, 1], [1, 1])
    tracemalloc.start()
    again = redrawn(trace, 1)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert again.duration_s == trace.duration_s
    assert peak_bytes < 100 * trace.duration_s / STRETCH_S


def test_more_prefix_blocks_than_a_prompt_holds_are_refused() -> None:
    with pytest.raises(DataError, match="request 1 has more prefix blocks"):
        Trace.of([0], [16], [1], prefix=PrefixBlocks.of([[1, 2]], 16))


def test_a_trace_cannot_be_changed_by_its_reader() -> None:
    with pytest.raises(ValueError, match="read-only"):
        poisson().arrival_s[0] = 1


def test_a_part_is_timed_from_its_start_and_lasts_what_was_asked() -> None:
    trace = Trace.of([0, 1, 2, 3], [1, 2, 3, 4], [1, 1, 1, 1])
    part = trace.between(1, 2.5)

    assert (part.arrival_s.tolist(), part.num_prompt_tokens.tolist()) == ([0, 1], [2, 3])
    assert part.duration_s == 1.5
    assert len(trace.between(3.5, 9)) == 0
    for start_s, end_s in ((4, 5), (2, 2), (-1, 1)):
        with pytest.raises(DataError, match="it has 0 to 4"):
            trace.between(start_s, end_s)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_bytes(b"PAR1 and no more"), "cannot read the trace"),
        (lambda path: pq.write_table(pa.table({"a": [1]}), path), "no trace of batchrun"),
        (lambda path: write_with(path, version=2), "version 2; this"),
        (lambda path: write_with(path, version=1), "unable to find column.*arrival_s"),
    ],
)
def test_a_file_that_is_none_of_ours_is_one_line(
    tmp_path: Path, make: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / "t.parquet"
    make(path)
    with pytest.raises(DataError, match=says) as caught:
        load_parquet(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def write_with(path: Path, *, version: int) -> None:
    about = json.dumps({"version": version, "duration_s": 1.0, "source": ""})
    table = pa.table({"a": [1]}).replace_schema_metadata({"batchrun.trace": about})
    pq.write_table(table, path)


def test_a_changed_file_of_ours_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    save_trace(poisson(3), path)
    about = pl.read_parquet_metadata(path)
    frame = pl.read_parquet(path).with_columns(num_prompt_tokens=pl.lit(0, pl.Int64))
    frame.write_parquet(path, metadata={"batchrun.trace": about["batchrun.trace"]})
    with pytest.raises(DataError, match="request 1 has no prompt token"):
        load_parquet(path)


def test_the_peak_lies_where_the_tokens_are() -> None:
    times_s = [0, 1, 2, 3, 50, 51, 99]
    trace = Trace.of(times_s, [10, 10, 10, 10, 500, 500, 1], [1] * 7)

    assert find_peak(trace, 10).start_s == 50
    assert len(find_peak(trace, 10).of(trace)) == 2
    with pytest.raises(InputError, match="no peak of 0 s"):
        find_peak(trace, 0)


def test_a_window_does_not_hold_its_own_end() -> None:
    trace = Trace.of([0, 1, 5], [10, 10, 15], [1, 1, 1])
    assert find_peak(trace, 1).start_s == 5
    assert find_peak(trace, 1.5).start_s == 0


def test_stratified_windows_stand_for_the_whole_trace() -> None:
    trace = poisson(20_000)
    windows = stratified_windows(trace, 24, 200.0)
    estimate = sum(len(w.of(trace)) * w.weight_s / 200.0 for w in windows)

    assert [w.end_s - w.start_s for w in windows] == pytest.approx([200.0] * 24)
    assert sum(w.weight_s for w in windows) == pytest.approx(trace.duration_s)
    assert all(b.start_s >= a.end_s for a, b in itertools.pairwise(windows))
    assert estimate == pytest.approx(len(trace), rel=0.05)


def test_windows_longer_than_their_parts_are_the_whole_trace() -> None:
    trace = poisson(100)
    windows = stratified_windows(trace, 4, 1e6)
    assert sum(len(window.of(trace)) for window in windows) == 100


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.0, 3.3])
def test_scaling_the_rate_keeps_how_bursts_stand_over_the_mean(factor: float) -> None:
    calm, burst = np.arange(0, 3_000, 2.0), np.arange(1_000, 1_100, 0.05)
    times_s = np.concatenate([calm, burst])
    trace = Trace.of(times_s, [5] * len(times_s), [5] * len(times_s))

    scaled = scale_rate(trace, factor, seed=1)

    in_burst = scaled.between(1_000, 1_100)
    assert len(scaled) == pytest.approx(factor * len(trace), rel=0.05)
    assert len(in_burst) / len(scaled) == pytest.approx(2_050 / len(trace), rel=0.05)
    assert scaled.duration_s == trace.duration_s
    assert find_peak(scaled, 100).start_s == pytest.approx(1_000, abs=5)


def test_copies_are_other_callers_but_share_the_system_prompt() -> None:
    blocks = [[0, 10 + i // 2] for i in range(100)]
    trace = Trace.of(range(100), [32] * 100, [1] * 100, prefix=PrefixBlocks.of(blocks, 16))
    scaled = scale_rate(trace, 3.0, seed=1)

    assert scaled.prefix is not None
    assert len(np.unique(scaled.prefix.hashes)) == 1 + 3 * 50
    # The first block is new once, each second block three times half as often as it comes.
    assert prefix_hit_rate(scaled) == pytest.approx((299 + 150) / 600)
    assert prefix_hit_rate(trace) == pytest.approx((99 + 50) / 200)


def bursty(*, num_bursts: int = 400) -> Trace:
    """Three calls at once every ten seconds, in the second half of the time every five."""
    at_s = np.arange(num_bursts) * 10.0
    at_s = np.sort(np.concatenate([at_s, at_s[num_bursts // 2 :] + 5.0]))
    number = np.arange(3 * len(at_s))
    return Trace.of(np.repeat(at_s, 3), 1 + number, 2 + number, source="bursty")


def test_another_draw_keeps_the_tide_the_bursts_and_pairs_of_lengths() -> None:
    trace = bursty()
    drawn = redrawn(trace, 3)
    half_s = trace.duration_s / 2

    assert drawn.duration_s == trace.duration_s
    assert (drawn.num_output_tokens - drawn.num_prompt_tokens).tolist() == [1] * len(drawn)
    for start_s in (0.0, half_s):
        had, has = (len(each.between(start_s, start_s + half_s)) for each in (trace, drawn))
        assert has == pytest.approx(had, rel=0.1)
    # Nearly all calls come three at a time, though stretches may cut a burst from its rest.
    is_with_others = np.diff(drawn.arrival_s) < 1e-6
    assert is_with_others.mean() == pytest.approx(2 / 3, abs=0.02)


def test_draws_differ_by_their_seed_and_nothing_else() -> None:
    first, again, other = (redrawn(poisson(), seed) for seed in (1, 1, 2))

    assert first.arrival_s.tolist() == again.arrival_s.tolist()
    assert first.num_prompt_tokens.tolist() == again.num_prompt_tokens.tolist()
    assert first.arrival_s.tolist() != other.arrival_s.tolist()


@pytest.mark.parametrize("num", [1, 2, 5])
def test_a_trace_shorter_than_a_stretch_keeps_its_calls(num: int) -> None:
    trace = Trace.of(np.arange(num) * 0.5, np.arange(1, num + 1), np.ones(num))

    assert sorted(redrawn(trace, 0).num_prompt_tokens) == trace.num_prompt_tokens.tolist()


def test_a_call_that_is_drawn_twice_is_another_caller_with_the_same_system_prompt() -> None:
    num = 600
    blocks = PrefixBlocks.of([[7, 1_000 + i] for i in range(num)], 16)
    drawn = redrawn(Trace.of(np.arange(num), np.full(num, 40), np.ones(num), prefix=blocks), 0)

    assert drawn.prefix is not None
    pairs = [tuple(drawn.prefix.of_request(i).tolist()) for i in range(len(drawn))]
    assert len({second for _, second in pairs}) == len(drawn) == len(drawn.prefix)
    assert {first for first, _ in pairs} == {7}


def test_a_day_is_drawn_from_rates_and_the_calls_of_a_trace() -> None:
    trace = Trace.of([0, 1, 2], [10, 20, 30], [1, 2, 3], source="t")
    tide = 2 + np.sin(np.arange(1_440) / 1_440 * 2 * np.pi)

    rates = RateSeries.steady(np.arange(1_440) * 60, 86_400, tide)
    day = draw_trace([rates], seed=3, like=trace)

    assert day.duration_s == 86_400
    counts = np.histogram(day.arrival_s, 24, (0, 86_400))[0]
    expected = tide.reshape(24, 60).mean(axis=1) * 3_600
    assert counts == pytest.approx(expected, rel=0.06)
    assert set(zip(day.num_prompt_tokens, day.num_output_tokens, strict=True)) == {
        (10, 1), (20, 2), (30, 3)
    }  # fmt: skip
    assert draw_trace([rates], seed=3, like=trace).arrival_s.tolist() == day.arrival_s.tolist()


def test_what_is_left_of_a_gap_is_waited_for_in_the_next_window() -> None:
    series = RateSeries.steady(np.arange(4_000), 4_000, np.full(4_000, 0.1))
    assert len(draw_trace([series], seed=1)) == pytest.approx(400, rel=0.15)


def test_the_summary_tells_poisson_arrivals_from_bursts() -> None:
    summary = summarize_trace(poisson(20_000), peak_s=60)
    assert summary.rate_per_s == pytest.approx(2.0, rel=0.03)
    assert summary.gap_cv == pytest.approx(1.0, rel=0.03)
    assert 1 < summary.peak.rate_over_mean < 2
    assert summary.prompt_tokens.p50 == pytest.approx(500, rel=0.05)
    assert summary.prefix_hit_rate is None


def test_a_single_call_has_a_summary() -> None:
    summary = summarize_trace(Trace.of([5], [10], [20]))
    assert (summary.num_requests, summary.gap_s, summary.gap_cv) == (1, None, None)
    assert summary.peak.tokens_over_mean == 1
