"""`batchrun trace show` and `convert` as their user meets them, and what a recording makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_call import Cli, cli_in, line_of

from batchrun.cli.data import CallRecording, GatewayRecording
from batchrun.control.client import DaemonClient
from batchrun.errors import StateError
from batchrun.home import Home
from batchrun.routing.decisions import EndedCall
from batchrun.simulator.traces.reading import load_parquet, save_trace
from batchrun.simulator.traces.trace import Trace
from batchrun.wire import MAX_CALLS_SENT, RecordedCall, RecordedCalls


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Calls the command in a folder with a trace of 100 calls, one a second, and rates."""
    trace = Trace.of(range(100), range(10, 110), [5] * 100, source="made by hand")
    save_trace(trace, tmp_path / "calls.parquet")
    (tmp_path / "rates.csv").write_text("time_s,rate_per_s\n0,1\n600,3\n")
    return cli_in(tmp_path, monkeypatch, capsys)


def test_show_has_rate_peak_and_lengths(cli: Cli) -> None:
    code, out, err = cli("trace", "show", "calls.parquet", "--peak", "10")
    _, shown, _ = cli("trace", "show", "calls.parquet", "--peak", "10", "--json")

    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == [
        "source", "calls", "rate", "peak", "prompt", "output"
    ]  # fmt: skip
    assert "100 in 100 s" in out and "seconds 90 to 100" in out
    figures = json.loads(shown)
    assert figures["rate_per_s"] == 1
    assert figures["peak"]["window"]["start_s"] == 90
    assert figures["prompt_tokens"]["largest"] == 109


def test_convert_cuts_then_scales(cli: Cli, tmp_path: Path) -> None:
    arguments = "--from", "20", "--to", "60", "--scale-rate", "2", "--scale-time", "0.5"
    code, out, err = cli("trace", "convert", "calls.parquet", "-o", "new/out.parquet", *arguments)
    trace = load_parquet(tmp_path / "new" / "out.parquet")

    assert (code, out, err) == (0, "new/out.parquet: 80 calls in 20 s\n", "")
    assert (len(trace), trace.duration_s) == (80, 20)
    assert set(trace.num_prompt_tokens.tolist()) == set(range(30, 70))


def test_convert_draws_calls_from_rates(cli: Cli, tmp_path: Path) -> None:
    like = "--lengths-from", "calls.parquet", "--seed", "7"
    code, _, _ = cli("trace", "convert", "rates.csv", "-o", "day.parquet", *like)
    trace = load_parquet(tmp_path / "day.parquet")

    assert (code, trace.duration_s) == (0, 1_200)
    assert len(trace.between(600, 1_200)) == pytest.approx(3 * len(trace.between(0, 600)), rel=0.3)
    assert set(trace.num_prompt_tokens.tolist()) <= set(range(10, 110))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "none.csv"], "none.csv: cannot read the trace: No such file"),
        (["show", "rates.csv", "--format", "azure"], "rates.csv: line 1: no column TIMESTAMP"),
        (["show", "calls.parquet", "--peak", "0"], "--peak must be above 0"),
        (["convert", "calls.parquet", "-o", "o", "--scale-rate", "0"], "--scale-rate must be abov"),
        (["convert", "calls.parquet", "-o", "o", "--scale-time", "inf"], "--scale-time must be ab"),
        (["convert", "calls.parquet", "-o", "o", "--from", "9", "--to", "9"], "no time between"),
        (["convert", "calls.parquet", "-o", "o", "--from", "200"], "it has 0 to 100"),
        (["convert", "calls.parquet", "-o", "o", "--lengths-from", "x"], "has lengths of its own"),
        (["convert", "calls.parquet", "-o", "."], ".: is a folder; name a file"),
        (["record", "-o", "o", "--seconds", "0"], "--seconds must be above 0"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    cli: Cli, tmp_path: Path, arguments: list[str], says: str
) -> None:
    assert says in line_of(cli("trace", *arguments), 2)
    assert not (tmp_path / "o").exists()


def test_record_needs_a_daemon(cli: Cli) -> None:
    assert "no daemon runs" in line_of(cli("trace", "record", "-o", "calls.parquet"), 3)


def test_what_engines_told_becomes_a_trace(tmp_path: Path) -> None:
    recording = CallRecording(DaemonClient(Home(tmp_path)), started_at=100.0)
    calls = [RecordedCall(*call) for call in ((99.0, 1, 1), (101.0, 5, 6), (102.0, 7, 0))]
    first = RecordedCalls("a", 0, tuple(calls), oldest_open_at=103.0)
    later = RecordedCalls("a", 5, (RecordedCall(130.0, 1, 1), RecordedCall(100.5, 3, 4)))

    assert not recording.take({"0": first, "1": None})
    assert recording.is_waiting_for(120.0) and not recording.is_waiting_for(103.0)
    assert not recording.take({"0": later, "1": None})
    trace, num_without_token = recording.trace(120.0)

    assert trace.arrival_s.tolist() == [0.5, 1.0]
    assert trace.num_prompt_tokens.tolist() == [3, 5]
    assert (trace.duration_s, num_without_token, recording.num_lost) == (20.0, 1, 2)
    assert not recording.is_waiting_for(120.0)


def test_an_engine_that_started_anew_is_asked_from_its_first_call_on(tmp_path: Path) -> None:
    recording = CallRecording(DaemonClient(Home(tmp_path)), started_at=0.0)
    full = tuple(RecordedCall(1.0 + i, 1, 1) for i in range(MAX_CALLS_SENT))

    assert recording.take({"0": RecordedCalls("a", 0, full)})
    assert recording.take({"0": RecordedCalls("b", MAX_CALLS_SENT, ())})
    assert recording.wanted == {"0": 0}
    assert not recording.take({"0": RecordedCalls("b", 0, full[:3])})
    assert (len(recording.trace(1e6)[0]), recording.num_lost) == (MAX_CALLS_SENT + 3, 0)


def seen_at_gateway(tmp_path: Path, salt: bytes) -> GatewayRecording:
    """Two calls that share two pieces of three, one a stranger to them, and one without answer."""
    recording = GatewayRecording(DaemonClient(Home(tmp_path)), started_at=100.0, salt=salt)
    calls = [
        EndedCall(0, 1, 9.0, 3.0, 800, 5, 250.0, [1, 2, 3]),
        EndedCall(1, 1, 8.0, 4.0, 510, 6, 250.0, [1, 2, 9]),
        EndedCall(1, 2, 7.0, 5.0, 90, 7, 260.0, []),
        EndedCall(1, 3, 7.0, 5.0, 90, 0, 250.0, [1]),
    ]
    told = {"now_s": 6.0, "num_decided": 6, "num_running": 1, "oldest_running_s": 4.0}
    for _ in range(2):
        recording.keep(told | {"calls": calls}, now=110.0)
    return recording


def test_what_the_gateway_told_becomes_a_trace_of_salted_prefixes(tmp_path: Path) -> None:
    recording = seen_at_gateway(tmp_path, b"salt")
    trace, num_without_token = recording.trace(110.0)

    assert (num_without_token, recording.num_lost) == (1, 1)
    assert recording.is_waiting_for(110.0) and not recording.is_waiting_for(106.0)
    assert trace.arrival_s.tolist() == [1.0, 2.0, 3.0]
    assert trace.num_prompt_tokens.tolist() == [800, 510, 90]
    assert trace.prefix is not None and trace.prefix.block_tokens == 250
    first, second, third = (trace.prefix.of_request(index).tolist() for index in range(3))
    assert (len(first), second, third) == (3, first[:2], [])
    assert not {1, 2, 3} & set(first)
    other, _ = seen_at_gateway(tmp_path, b"other").trace(110.0)
    assert other.prefix is not None
    assert not set(other.prefix.hashes.tolist()) & set(first)


def test_a_recording_without_calls_is_no_trace(tmp_path: Path) -> None:
    recording = CallRecording(DaemonClient(Home(tmp_path)), started_at=100.0)
    with pytest.raises(StateError, match="no online call arrived and ended within 20 s"):
        recording.trace(120.0)
