"""What holds of every trace, whatever its arrivals."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.simulator.traces.rates import RateSeries, draw_trace
from batchrun.simulator.traces.reading import load_parquet, read_trace, save_trace
from batchrun.simulator.traces.trace import (
    PrefixBlocks,
    Trace,
    find_peak,
    prefix_hit_rate,
    scale_rate,
    scale_time,
    stratified_windows,
)

BLOCK_TOKENS = 512

Call = tuple[int, int, int, list[int]]
"""Milliseconds, prompt tokens, output tokens, prefix blocks."""


@st.composite
def calls(draw: st.DrawFn) -> Call:
    hashes = draw(st.lists(st.integers(0, 9), max_size=3))
    least = max(1, (len(hashes) - 1) * BLOCK_TOKENS + 1)
    prompt = draw(st.integers(least, least + 2_000))
    return draw(st.integers(0, 60_000)), prompt, draw(st.integers(1, 500)), hashes


def make(rows: list[Call]) -> Trace:
    at_ms, prompts, outputs, hashes = zip(*rows, strict=True)
    prefix = PrefixBlocks.of(hashes, BLOCK_TOKENS)
    return Trace.of(np.array(at_ms) / 1000, prompts, outputs, prefix=prefix, source="t")


some_calls = st.lists(calls(), min_size=1, max_size=40)
traces = some_calls.map(make)
factors = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.75])
seeds = st.integers(0, 2**32)


def rows_of(trace: Trace) -> list[tuple[object, ...]]:
    assert trace.prefix is not None
    blocks = [tuple(trace.prefix.of_request(i).tolist()) for i in range(len(trace))]
    columns = trace.arrival_s, trace.num_prompt_tokens, trace.num_output_tokens
    return list(zip(*(column.tolist() for column in columns), blocks, strict=True))


@given(traces)
def test_a_file_gives_back_the_trace(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        save_trace(trace, path)
        again = load_parquet(path)

    assert rows_of(again) == rows_of(trace)
    assert (again.duration_s, again.source) == (trace.duration_s, trace.source)


@given(some_calls)
def test_the_public_layouts_give_back_the_same_calls(rows: list[Call]) -> None:
    rows.sort(key=lambda row: row[0])
    expected = make(rows)
    mooncake = "".join(
        json.dumps({"timestamp": at, "input_length": p, "output_length": o, "hash_ids": h}) + "\n"
        for at, p, o, h in rows
    )
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2024-05-10 10:{at // 60_000:02}:{at % 60_000 / 1000:09.6f}+00:00,{p},{o}\n"
        for at, p, o, _ in rows
    )
    burstgpt = "Timestamp,Model,Request tokens,Response tokens\n" + "".join(
        f"{at / 1000},m,{p},{o}\n" for at, p, o, _ in rows
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        path.write_text(mooncake)
        assert rows_of(read_trace(path)) == rows_of(expected)
        for text in (azure, burstgpt):
            path.write_text(text)
            read = read_trace(path)
            assert read.arrival_s == pytest.approx(expected.arrival_s, abs=1e-6)
            assert read.num_prompt_tokens.tolist() == expected.num_prompt_tokens.tolist()
            assert read.num_output_tokens.tolist() == expected.num_output_tokens.tolist()


@given(traces, st.integers(1, 90))
def test_the_peak_is_that_of_brute_force(trace: Trace, window_s: int) -> None:
    tokens = trace.num_tokens
    times_s = trace.arrival_s
    largest = max(
        tokens[(times_s >= start) & (times_s < start + window_s)].sum() for start in times_s
    )

    window = find_peak(trace, window_s)

    assert window.of(trace).num_tokens.sum() == largest
    assert window.start_s >= 0
    assert window.end_s <= max(trace.duration_s, window_s) * (1 + 1e-12)


@given(traces, st.lists(st.floats(0.001, 0.999), max_size=5))
def test_slices_share_the_calls_out(trace: Trace, cuts: list[float]) -> None:
    edges = sorted({0.0, *(cut * trace.duration_s for cut in cuts), trace.duration_s})
    parts = [trace.between(start, end) for start, end in itertools.pairwise(edges)]

    assert sum(map(len, parts)) == len(trace)
    tokens = [part.num_tokens.tolist() for part in parts]
    assert list(itertools.chain(*tokens)) == trace.num_tokens.tolist()
    blocks = [row[3] for part in parts for row in rows_of(part)]
    assert blocks == [row[3] for row in rows_of(trace)]


@given(traces, factors)
def test_time_scaling_keeps_calls_and_their_order(trace: Trace, factor: float) -> None:
    scaled = scale_time(trace, factor)
    assert [row[1:] for row in rows_of(scaled)] == [row[1:] for row in rows_of(trace)]
    assert scaled.arrival_s == pytest.approx(trace.arrival_s * factor)
    assert scaled.rate_per_s == pytest.approx(trace.rate_per_s / factor)


@given(traces, factors, seeds)
def test_rate_scaling_makes_so_many_of_each_call(trace: Trace, factor: float, seed: int) -> None:
    scaled = scale_rate(trace, factor, seed=seed)
    least, most = math.floor(factor), math.ceil(factor)

    assert least * len(trace) <= len(scaled) <= most * len(trace)
    assert scaled.duration_s == trace.duration_s
    before, after = (sorted(row[1:3] for row in rows_of(each)) for each in (trace, scaled))
    for lengths in set(before):
        count = before.count(lengths)
        assert least * count <= after.count(lengths) <= most * count
    if factor == 1:
        assert rows_of(scaled) == rows_of(trace)


@settings(max_examples=15)
@given(st.sampled_from([0.2, 0.5, 1.5, 2.7]), seeds)
def test_rate_scaling_is_right_in_expectation(factor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num = 4_000
    trace = Trace.of(np.cumsum(rng.exponential(1, num)), [1] * num, [1] * num)
    scaled = scale_rate(trace, factor, seed=seed)
    rest = factor % 1
    sigma = math.sqrt(num * rest * (1 - rest))
    assert abs(len(scaled) - factor * num) < 6 * sigma + 1


@given(traces)
def test_prefix_hits_are_those_of_a_plain_walk(trace: Trace) -> None:
    assert trace.prefix is not None
    seen: set[int] = set()
    hits = 0
    for i in range(len(trace)):
        blocks = trace.prefix.of_request(i).tolist()
        leading = list(itertools.takewhile(seen.__contains__, blocks))
        hits += min(len(leading) * BLOCK_TOKENS, int(trace.num_prompt_tokens[i]))
        seen.update(blocks)
    assert prefix_hit_rate(trace) == hits / trace.num_prompt_tokens.sum()


@given(traces, st.integers(1, 30), st.floats(0.5, 60))
def test_windows_do_not_overlap_and_weigh_the_whole(
    trace: Trace, num: int, window_s: float
) -> None:
    windows = stratified_windows(trace, num, window_s)
    assert len(windows) == num
    assert sum(window.weight_s for window in windows) == pytest.approx(trace.duration_s)
    for one, other in itertools.pairwise(windows):
        assert one.end_s <= other.start_s * (1 + 1e-9) + 1e-9


@settings(max_examples=25)
@given(st.lists(st.floats(0, 40), min_size=2, max_size=6), st.sampled_from([0.5, 1.0, 2.0]), seeds)
def test_drawn_calls_follow_their_rates(rates: list[float], cv: float, seed: int) -> None:
    series = RateSeries.steady(
        np.arange(len(rates)) * 50.0, len(rates) * 50.0, np.array(rates), cv=cv
    )
    trace = draw_trace([series], seed=seed)
    expected = sum(rates) * 50

    assert trace.duration_s == len(rates) * 50
    # The variance of a renewal process' count is about cv ** 2 times its mean.
    assert abs(len(trace) - expected) <= 6 * cv * math.sqrt(expected) + 12
    counts = np.bincount((trace.arrival_s // 50).astype(int), minlength=len(rates))
    assert all(count == 0 for count, rate in zip(counts, rates, strict=True) if rate == 0)
