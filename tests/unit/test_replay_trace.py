"""Traces are the same every time, bursty as asked, and read from real files line by line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from batchrun.errors import DataError
from batchrun.replay import Arrival, TokenRange, TraceShape, generate_trace, load_azure_trace
from batchrun.replay.azure import AzureScale

SHAPE = TraceShape(duration_s=900, rate_per_s=2, burst_period_s=90, burst_length_s=9)
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = [
    "2023-11-16 18:15:46.6805900,374,44\n",
    "2023-11-16 18:15:50.9951690,396,109\n",
    "2023-11-16 18:15:51.2224670,879,55\n",
]
WHOLE = gzip.compress(HEADER.encode() + ROWS[0].encode() * 99)
UNREADABLE = {
    "not gzip": b"not gzip",
    "cut off": WHOLE[:60],
    "broken inside": WHOLE[:60] + b"#" * 60,
}


def write_trace(path: Path, *lines: str) -> Path:
    path.write_bytes(gzip.compress("".join(lines).encode()))
    return path


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    assert generate_trace(SHAPE, seed=1) == generate_trace(SHAPE, seed=1)
    assert generate_trace(SHAPE, seed=1) != generate_trace(SHAPE, seed=2)


def test_arrivals_are_in_order_and_within_the_duration() -> None:
    times_s = [arrival.at_s for arrival in generate_trace(SHAPE, seed=1)]
    assert times_s == sorted(times_s)
    assert 0 <= times_s[0] < times_s[-1] < SHAPE.duration_s


def test_bursts_have_their_multiple_of_the_quiet_rate() -> None:
    times_s = [arrival.at_s for arrival in generate_trace(SHAPE, seed=1)]
    num_in_burst = sum(at_s % 90 < 9 for at_s in times_s)
    assert num_in_burst / 90 == pytest.approx(8, rel=0.15)
    assert (len(times_s) - num_in_burst) / 810 == pytest.approx(2, rel=0.15)


def test_lengths_stay_within_their_bounds() -> None:
    lengths = TokenRange(mu=3, sigma=2, min_tokens=5, max_tokens=50)
    shape = TraceShape(duration_s=200, rate_per_s=2, prompt=lengths, output=lengths)
    arrivals = generate_trace(shape, seed=1)
    words = {len(arrival.prompt.split()) for arrival in arrivals}
    assert (min(words), max(words)) == (5, 50)
    assert {min(a.max_tokens for a in arrivals), max(a.max_tokens for a in arrivals)} == {5, 50}


@pytest.mark.parametrize("rate_per_s", [0, -1])
def test_no_rate_is_an_empty_trace(rate_per_s: float) -> None:
    assert generate_trace(TraceShape(duration_s=10, rate_per_s=rate_per_s), seed=1) == []


def test_azure_times_and_lengths_are_kept(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.csv.gz", HEADER, *ROWS)
    first, second, third = load_azure_trace(path, seed=1)
    assert (first.at_s, first.max_tokens, len(first.prompt.split())) == (0, 44, 374)
    assert second.at_s == pytest.approx(4.314579)
    assert third.at_s == pytest.approx(4.541877)


def test_azure_trace_is_cut_thinned_and_scaled(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "".join(ROWS))

    def load(scale: AzureScale) -> list[Arrival]:
        return load_azure_trace(path, seed=1, scale=scale)

    assert [arrival.max_tokens for arrival in load(AzureScale(start_s=4.4))] == [55]
    assert [arrival.max_tokens for arrival in load(AzureScale(duration_s=4.4))] == [44, 109]
    assert [arrival.max_tokens for arrival in load(AzureScale(keep_every=2))] == [44, 55]
    assert [arrival.max_tokens for arrival in load(AzureScale(tokens=0.01))] == [1, 1, 1]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["a,b\n"], "line 1: no column TIMESTAMP"),
        ([HEADER, ROWS[0], "yesterday,1,2\n"], "line 3: not a time"),
        ([HEADER, ROWS[0], ROWS[1][:20] + "\n"], "line 3: not a time"),
    ],
)
def test_a_wrong_azure_file_is_one_line_that_names_the_place(
    tmp_path: Path, lines: list[str], complaint: str
) -> None:
    path = write_trace(tmp_path / "t.csv.gz", *lines)
    with pytest.raises(DataError, match=complaint) as caught:
        load_azure_trace(path, seed=1)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_azure_file_is_a_data_error(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(damage)
    with pytest.raises(DataError, match="cannot read the trace"):
        load_azure_trace(path, seed=1)
    with pytest.raises(DataError, match="No such file"):
        load_azure_trace(tmp_path / "none", seed=1)
