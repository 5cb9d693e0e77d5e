"""The `trace` commands (record, show, convert) and the `datasets` commands (samples, importers)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer

from batchrun.cli.console import (
    HomeOption,
    JsonOption,
    ProgressBar,
    answer,
    command_group,
    note,
    prepare_file,
)
from batchrun.control.client import DaemonClient
from batchrun.errors import DaemonUnavailableError, InputError, StateError
from batchrun.mutual_tls import read_or_make_secret
from batchrun.quantities import count
from batchrun.routing.decisions import EndedCall
from batchrun.samples.dataset import DatasetName, Scale, WrittenDataset
from batchrun.samples.generators import write_sample
from batchrun.samples.importers import import_dataset
from batchrun.simulator.traces.reading import (
    Drawing,
    TraceFormat,
    detect_format,
    read_trace,
    save_trace,
)
from batchrun.simulator.traces.trace import (
    PrefixBlocks,
    Quantiles,
    Trace,
    TraceSummary,
    scale_rate,
    scale_time,
    summarize_trace,
)
from batchrun.wire import MAX_CALLS_SENT, RecordedCall, RecordedCalls

datasets_app = command_group("Generate sample data sets, or import the real ones.")

NameArgument = Annotated[DatasetName, typer.Argument(help="Which data set.")]
DatasetOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="File to write. [default: NAME.parquet]")
]


@datasets_app.command()
def sample(
    name: NameArgument,
    *,
    output: DatasetOption = None,
    scale: Annotated[
        Scale, typer.Option(help="small: for a CPU; full: the published sizes.")
    ] = "small",
    rows: Annotated[int | None, typer.Option(help="Number of rows.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal rows.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Write a sample of our own text in the shape of the real data set."""
    path = output or Path(f"{name}.parquet")
    with ProgressBar() as progress:
        written = write_sample(name, path, scale=scale, rows=rows, seed=seed, progress=progress)
    _report(written, as_json=as_json)


@datasets_app.command("import")
def import_(
    name: NameArgument,
    source: Annotated[Path, typer.Argument(help="Folder with the data set's own files.")],
    *,
    output: DatasetOption = None,
    limit: Annotated[int | None, typer.Option(help="Keep only the first rows.")] = None,
    video_tokens: Annotated[
        int, typer.Option(help="nextqa: length of a long video's stand-in.")
    ] = 512,
    as_json: JsonOption = False,
) -> None:
    """Turn the real data set's files into one Parquet file that the job files read."""
    path = output or Path(f"{name}.parquet")
    with ProgressBar() as progress:
        written = import_dataset(
            name, source, path, limit=limit, video_tokens=video_tokens, progress=progress
        )
    _report(written, as_json=as_json)


def _report(written: WrittenDataset, *, as_json: bool) -> None:
    path, num_rows, size_bytes = str(written.path), written.num_rows, written.size_bytes
    document = {"path": path, "rows": num_rows, "size_bytes": size_bytes}
    answer(
        document, f"{path}: {count(num_rows, 'row')}, {size_bytes / 1e6:.1f} MB", as_json=as_json
    )


POLL_S = 1.0
DRAIN_S = 60.0
"""After the time is up, calls that still run are waited for so long."""


@dataclass(slots=True)
class CallRecording:
    """What has come of one recording so far. Instants are UTC epoch seconds.

    `begin` starts it, `poll` fetches what is new, `trace` makes a trace of it.
    """

    client: DaemonClient
    started_at: float = 0.0
    num_lost: int = 0
    """Calls that an engine had to forget before they were fetched."""
    silent: set[str] = field(default_factory=set)
    """Engines that have not sent any recording yet."""
    unrecorded: list[str] = field(default_factory=list)
    """Engines that cannot record."""
    trouble: DaemonUnavailableError | None = None
    """Why the recording ended before its time."""
    wanted: dict[str, int] = field(default_factory=dict)
    """The number of the next call of each engine that has sent any."""
    _calls: list[RecordedCall] = field(default_factory=list)
    _last: dict[str, RecordedCalls] = field(default_factory=dict)

    def begin(self) -> None:
        """Make the engines record. Raises DaemonUnavailableError, and StateError if none can."""
        reply = self.client.post("/calls", {"numbers": {}})
        self.unrecorded, self.silent = reply["unrecorded"], set(reply["engines"])
        self.started_at = time.time()
        self.take(_recordings(reply))

    def poll(self) -> None:
        """Fetch what has ended since. Raises DaemonUnavailableError."""
        while self.take(_recordings(self.client.post("/calls", {"numbers": self.wanted}))):
            pass

    def is_waiting_for(self, ended_at: float) -> bool:
        """Whether a call that arrived before `ended_at` still runs."""
        oldest = (recording.oldest_open_at for recording in self._last.values())
        return any(at is not None and at < ended_at for at in oldest)

    def run(self, seconds: float | None, report: Callable[[int], None]) -> float:
        """Record for so long, or until interrupted; returns when it ended.

        Calls that run at the end are waited for, up to `DRAIN_S`; an interrupt ends that as well.
        A daemon that goes away ends it too, and is the `trouble`. `report` gets the number of
        calls.
        """
        ended_at = float("inf") if seconds is None else self.started_at + seconds
        try:
            while (left_s := ended_at - time.time()) > 0 or (
                left_s > -DRAIN_S and self.is_waiting_for(ended_at)
            ):
                time.sleep(min(POLL_S, left_s) if left_s > 0 else POLL_S)
                self.poll()
                report(len(self._calls))
        except KeyboardInterrupt:
            ended_at = min(ended_at, time.time())
            with suppress(DaemonUnavailableError):
                self.poll()
        except DaemonUnavailableError as error:
            ended_at = min(ended_at, time.time())
            self.trouble = error
        return ended_at

    def trace(self, ended_at: float) -> tuple[Trace, int]:
        """The calls that arrived from the start to `ended_at`, and how many of them got no token
        and are left out. Raises StateError without a call."""
        arrived = [call for call in self._calls if self.started_at <= call.arrived_at < ended_at]
        calls = [call for call in arrived if call.num_output_tokens and call.num_prompt_tokens]
        if not calls:
            duration_s = ended_at - self.started_at
            raise StateError(
                f"no online call arrived and ended within {duration_s:.0f} s; nothing was written"
            )
        calls.sort(key=lambda call: call.arrived_at)
        began = datetime.fromtimestamp(self.started_at, UTC)
        trace = Trace.of(
            [call.arrived_at for call in calls],
            [call.num_prompt_tokens for call in calls],
            [call.num_output_tokens for call in calls],
            prefix=self.prefix_of(calls),
            source=f"recorded {began:%Y-%m-%d %H:%M:%S} UTC",
        )
        begins_s = calls[0].arrived_at - self.started_at
        moved = trace.shifted(begins_s, ended_at - self.started_at)
        return moved, len(arrived) - len(calls)

    def prefix_of(self, calls: Sequence[RecordedCall]) -> PrefixBlocks | None:
        """What prompts share; engines do not tell."""
        return None

    def take(self, sent: Mapping[str, RecordedCalls | None]) -> bool:
        """Keep what is new of each engine's answer; whether one has more to send at once."""
        has_more = False
        for name, recording in sent.items():
            if recording is None:
                continue
            self.silent.discard(name)
            before, self._last[name] = self._last.get(name), recording
            if before is not None and before.id != recording.id:
                # Another start of the engine: its numbers begin at 0, what it ran is gone.
                self.wanted[name] = 0
                has_more = True
                continue
            self.num_lost += recording.first_number - self.wanted.get(name, 0)
            self._calls += recording.calls
            self.wanted[name] = recording.first_number + len(recording.calls)
            has_more = has_more or len(recording.calls) == MAX_CALLS_SENT
        return has_more


OVERLAP_S = 2.0
"""Gateway workers may note ends so much later than others."""


@dataclass(slots=True)
class GatewayRecording(CallRecording):
    """One that the gateway tells, with the keys of prompts as it routes by them, salted with
    `salt`: who has the trace cannot tell whether a text he knows is in it."""

    salt: bytes = field(default=b"", repr=False)
    _began_s: float = 0.0
    _since_s: float = 0.0
    _num_before: int = 0
    _oldest_at: float | None = None
    _seen: set[tuple[int, int, float]] = field(default_factory=set)
    _pieces: dict[int, tuple[float, array[int]]] = field(default_factory=dict)
    """Of each call: tokens in a piece, and the keys of its pieces."""

    def begin(self) -> None:
        """See `CallRecording`; raises EngineError where the gateway does not answer."""
        reply = self.client.get("/routed-calls?since=1e18")
        self._since_s = self._began_s = reply["now_s"]
        self._num_before = reply["num_decided"]
        self.started_at = time.time()

    def poll(self) -> None:
        """See `CallRecording`."""
        since_s = max(self._began_s, self._since_s - OVERLAP_S)
        self.keep(self.client.get(f"/routed-calls?since={since_s}"), time.time())

    def keep(self, reply: Mapping[str, Any], now: float) -> None:
        """Take what is new of the gateway's answer, which came at `now` (UTC epoch seconds)."""
        oldest_s = reply["oldest_running_s"]
        self._oldest_at = None if oldest_s is None else now - oldest_s
        for call in msgspec.convert(reply["calls"], list[EndedCall]):
            self._since_s = max(self._since_s, call.ended_at_s)
            key = (call.worker, call.number, call.ended_at_s)
            if key not in self._seen:
                self._seen.add(key)
                recorded = RecordedCall(now - call.age_s, call.prompt_tokens, call.output_tokens)
                self._calls.append(recorded)
                self._pieces[id(recorded)] = call.piece_tokens, array("Q", call.keys)
        num_decided = reply["num_decided"] - self._num_before - reply["num_running"]
        self.num_lost = max(0, num_decided - len(self._seen))

    def is_waiting_for(self, ended_at: float) -> bool:
        """See `CallRecording`."""
        return self._oldest_at is not None and self.started_at <= self._oldest_at < ended_at

    def prefix_of(self, calls: Sequence[RecordedCall]) -> PrefixBlocks:
        """See `CallRecording`; a block is as many tokens as a piece has in the middle."""
        pieces = [self._pieces[id(call)] for call in calls]
        tokens = max(1, round(median(piece_tokens for piece_tokens, _ in pieces)))
        blocks = [
            [self._salted(key) for key in keys[: call.num_prompt_tokens // tokens]]
            for call, (_, keys) in zip(calls, pieces, strict=True)
        ]
        return PrefixBlocks.of(blocks, tokens)

    def _salted(self, key: int) -> int:
        digest = blake2b(key.to_bytes(8, "little"), key=self.salt[:64], digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def _recordings(reply: dict[str, Any]) -> dict[str, RecordedCalls | None]:
    return msgspec.convert(reply["engines"], dict[str, RecordedCalls | None])


trace_app = command_group("Traces of online calls: times and lengths, never text.")

TraceArgument = Annotated[Path, typer.Argument(help="Trace file, of any format that is read.")]
FormatOption = Annotated[
    TraceFormat | None,
    typer.Option("--format", help="What the file is. [default: what it looks like]"),
]
OutputOption = Annotated[
    Path, typer.Option("--output", "-o", help="Trace file to write (Parquet).")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of all that is drawn.")]


@trace_app.command()
def record(
    *,
    output: OutputOption,
    seconds: Annotated[
        float | None, typer.Option(help="How long to record. [default: until Ctrl-C]")
    ] = None,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="At the gateway, with what prompts share, as hashes.")
    ] = False,
    home: HomeOption,
    as_json: JsonOption = False,
) -> None:
    """Record arrival and lengths of the online calls that the engines get; never text.

    Needs engines with batchrun's scheduler, or --prefixes. Calls that run at the end are waited
    for, up to a minute; Ctrl-C ends it with what has come.
    """
    if seconds is not None and not seconds > 0:
        raise InputError(f"--seconds must be above 0, not {seconds:g}")
    prepare_file(output)
    recording = CallRecording(DaemonClient(home))
    if prefixes:
        salt = read_or_make_secret(home.trace_salt)
        recording = GatewayRecording(DaemonClient(home), salt=salt)
    recording.begin()
    note("recording online calls; Ctrl-C ends it")
    with ProgressBar() as progress:
        ended_at = recording.run(seconds, lambda num: progress("online calls", num, 0))
    trace, num_without_token = recording.trace(ended_at)
    save_trace(trace, output)
    is_open = recording.is_waiting_for(ended_at)
    for line in _left_out(recording, num_without_token, is_open=is_open):
        note(line)
    more = {"num_lost": recording.num_lost, "num_without_token": num_without_token}
    _say_written(output, trace, **more, has_unended_calls=is_open, as_json=as_json)
    if recording.trouble is not None:
        raise recording.trouble


@trace_app.command()
def show(
    path: TraceArgument,
    *,
    kind: FormatOption = None,
    peak: Annotated[
        float, typer.Option(help="Seconds of the peak window that is looked for.")
    ] = 300.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show what a trace is like: calls, duration, rate, peak window, lengths."""
    if not peak > 0:
        raise InputError(f"--peak must be above 0, not {peak:g}")
    trace = read_trace(path, kind, Drawing(seed=seed))
    if not len(trace):
        raise InputError(f"{path}: has no calls")
    summary = summarize_trace(trace, peak_s=peak)
    answer(asdict(summary), *_lines(summary), as_json=as_json)


@trace_app.command()
def convert(
    path: TraceArgument,
    *,
    output: OutputOption,
    kind: FormatOption = None,
    scale_rate_by: Annotated[
        float, typer.Option("--scale-rate", help="So many times the calls, bursts kept.")
    ] = 1.0,
    scale_time_by: Annotated[
        float, typer.Option("--scale-time", help="So many times the time: 2 is half as fast.")
    ] = 1.0,
    from_s: Annotated[float, typer.Option("--from", help="Second of the trace to begin at.")] = 0.0,
    to_s: Annotated[
        float | None, typer.Option("--to", help="Second of the trace to end before.")
    ] = None,
    lengths_from: Annotated[
        Path | None, typer.Option(help="For rates: a trace to draw calls from.")
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Write a trace as batchrun's own Parquet: cut first, then scaled in rate, then in time."""
    for name, factor in (("--scale-rate", scale_rate_by), ("--scale-time", scale_time_by)):
        if not 0 < factor < float("inf"):
            raise InputError(f"{name} must be above 0, not {factor:g}")
    end_s = float("inf") if to_s is None else to_s
    if not 0 <= from_s < end_s:
        raise InputError(f"--from {from_s:g} --to {end_s:g}: no time between them")
    kind = kind or detect_format(path)
    if lengths_from is not None and not kind.has_rates:
        raise InputError(f"--lengths-from: {path} has lengths of its own")
    like = None if lengths_from is None else read_trace(lengths_from)
    trace = read_trace(path, kind, Drawing(seed, scale_rate_by, from_s, end_s, like))
    if not kind.has_rates:
        if from_s or to_s is not None:
            trace = trace.between(from_s, trace.duration_s if to_s is None else to_s)
        trace = scale_rate(trace, scale_rate_by, seed=seed)
    trace = scale_time(trace, scale_time_by)
    if not len(trace):
        raise InputError(f"{path}: no call is left; nothing was written")
    prepare_file(output)
    save_trace(trace, output)
    _say_written(output, trace, as_json=as_json)


def _say_written(path: Path, trace: Trace, *, as_json: bool, **more: Any) -> None:
    written = {"path": str(path), "num_requests": len(trace), "duration_s": trace.duration_s}
    shown = f"{path}: {len(trace):,} calls in {trace.duration_s:,.0f} s"
    answer(written | more, shown, as_json=as_json)


def _left_out(recording: CallRecording, num_without_token: int, *, is_open: bool) -> Iterator[str]:
    """What is not in the trace, a line each."""
    if recording.unrecorded:
        names = ", ".join(recording.unrecorded)
        yield f"not recorded: engine {names}, which runs without batchrun's scheduler"
    if recording.silent:
        names = ", ".join(sorted(recording.silent))
        yield f"not recorded: engine {names}, which does not listen or is of an older batchrun"
    if recording.num_lost:
        yield f"lost: {recording.num_lost:,} calls, which came faster than they were fetched"
    if num_without_token:
        yield f"left out: {num_without_token:,} calls that ended without a token"
    if is_open:
        yield "left out: calls that had not ended"


def _lines(summary: TraceSummary) -> Iterator[str]:
    peak = summary.peak
    yield f"source     {summary.source or '-'}"
    yield f"calls      {summary.num_requests:,} in {summary.duration_s:,.0f} s"
    burst = "" if summary.gap_cv is None else f"; gaps vary by {summary.gap_cv:.2f} (Poisson: 1)"
    yield f"rate       {summary.rate_per_s:.3g} calls/s{burst}"
    yield (
        f"peak       seconds {peak.window.start_s:,.0f} to {peak.window.end_s:,.0f}: "
        f"{peak.rate_per_s:.3g} calls/s ({peak.rate_over_mean:.2f} of the mean), "
        f"{peak.tokens_per_s:,.0f} tokens/s ({peak.tokens_over_mean:.2f} of the mean)"
    )
    yield f"prompt     {_spread(summary.prompt_tokens)}"
    yield f"output     {_spread(summary.output_tokens)}"
    if summary.prefix_hit_rate is not None:
        yield f"prefixes   {summary.prefix_hit_rate:.1%} of the prompt tokens were seen before"


def _spread(tokens: Quantiles) -> str:
    return (
        f"{tokens.mean:,.0f} tokens on average, p50 {tokens.p50:,.0f}, p95 {tokens.p95:,.0f}, "
        f"p99 {tokens.p99:,.0f}, most {tokens.largest:,.0f}"
    )
