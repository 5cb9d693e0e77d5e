"""The `trace` commands (record, show, convert) and the `datasets` commands (samples, importers)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from batchrun.cli.client import DaemonClient
from batchrun.cli.console import (
    HomeOption,
    JsonOption,
    LateProgress,
    note,
    prepare_file,
    print_json,
    say,
)
from batchrun.config import load_home
from batchrun.errors import DaemonUnavailableError, InputError, StateError
from batchrun.samples.dataset import WrittenDataset
from batchrun.samples.generators import write_sample
from batchrun.samples.importers import import_dataset
from batchrun.simulator.traces.reading import (
    Drawing,
    TraceFormat,
    detect_format,
    read_trace,
    save_trace,
)
from batchrun.simulator.traces.summary import Quantiles, TraceSummary, summarize_trace
from batchrun.simulator.traces.trace import Trace, scale_rate, scale_time
from batchrun.wire import MAX_CALLS_SENT, RecordedCall, RecordedCalls

app = typer.Typer(
    help="Generate sample data sets, or import the real ones.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


class DatasetName(StrEnum):
    """The data sets there are."""

    LOOGLE = "loogle"
    TOOLBENCH = "toolbench"
    NEXTQA = "nextqa"


NameArgument = Annotated[DatasetName, typer.Argument(help="Which data set.")]


class SampleScale(StrEnum):
    """How large a sample is."""

    SMALL = "small"
    FULL = "full"


@app.command()
def sample(
    name: NameArgument,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. [default: NAME.parquet]")
    ] = None,
    scale: Annotated[
        SampleScale, typer.Option("--scale", help="small: for a CPU; full: the published sizes.")
    ] = SampleScale.SMALL,
    rows: Annotated[int | None, typer.Option("--rows", help="Number of rows.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds give equal rows.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Write a sample of our own text in the shape of the real data set."""
    with LateProgress() as progress:
        written = write_sample(
            name.value,
            output or Path(f"{name.value}.parquet"),
            scale=scale.value,
            rows=rows,
            seed=seed,
            progress=progress,
        )
    _report(written, as_json=as_json)


@app.command("import")
def import_(
    name: NameArgument,
    source: Annotated[Path, typer.Argument(help="Folder with the data set's own files.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. [default: NAME.parquet]")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Keep only the first rows.")] = None,
    video_tokens: Annotated[
        int, typer.Option("--video-tokens", help="nextqa: length of a long video's stand-in.")
    ] = 512,
    as_json: JsonOption = False,
) -> None:
    """Turn the real data set's files into one Parquet file that the job files read."""
    with LateProgress() as progress:
        written = import_dataset(
            name.value,
            source,
            output or Path(f"{name.value}.parquet"),
            limit=limit,
            video_tokens=video_tokens,
            progress=progress,
        )
    _report(written, as_json=as_json)


def _report(written: WrittenDataset, *, as_json: bool) -> None:
    if as_json:
        document = {"path": str(written.path), "rows": written.num_rows}
        print_json({**document, "size_bytes": written.size_bytes})
    else:
        say(f"{written.path}: {written.num_rows:,} rows, {written.size_bytes / 1e6:.1f} MB")


POLL_S = 1.0
DRAIN_S = 60.0
"""After the time is up, calls that still run are waited for so long."""


class _Told(msgspec.Struct):
    """The daemon's answer: what each engine recorded, and which engines cannot."""

    engines: dict[str, RecordedCalls | None]
    unrecorded: list[str]


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
    """Engines that have not told any recording yet."""
    unrecorded: list[str] = field(default_factory=list)
    trouble: DaemonUnavailableError | None = None
    """Why the recording ended before its time."""
    _calls: list[RecordedCall] = field(default_factory=list)
    _places: dict[str, tuple[str, int]] = field(default_factory=dict)
    _oldest_open_at: dict[str, float | None] = field(default_factory=dict)

    def begin(self) -> None:
        """Make the engines record. Raises DaemonUnavailableError, and StateError if none can."""
        told = self._ask()
        self.unrecorded, self.silent = told.unrecorded, set(told.engines)
        self.started_at = time.time()
        self.take(told.engines)

    def poll(self) -> None:
        """Fetch what has ended since. Raises DaemonUnavailableError."""
        while self.take(self._ask().engines):
            pass

    @property
    def wanted(self) -> dict[str, int]:
        """The number of the next call of each engine that has told any."""
        return {name: number for name, (_, number) in self._places.items()}

    def is_waiting_for(self, ended_at: float) -> bool:
        """Whether a call that arrived before `ended_at` still runs."""
        return any(at is not None and at < ended_at for at in self._oldest_open_at.values())

    def run(self, seconds: float | None, report: Callable[[int], None]) -> float:
        """Record for so long, or until interrupted; returns when it ended.

        Calls that run at the end are waited for, up to `DRAIN_S`; an interrupt ends that as well.
        A daemon that goes away ends it too, and is the `trouble`. `report` is told the number of
        calls.
        """
        ended_at = float("inf") if seconds is None else self.started_at + seconds
        try:
            self._watch(ended_at, report)
        except KeyboardInterrupt:
            ended_at = min(ended_at, time.time())
            with suppress(DaemonUnavailableError):
                self.poll()
        except DaemonUnavailableError as error:
            ended_at = min(ended_at, time.time())
            self.trouble = error
        return ended_at

    def _watch(self, ended_at: float, report: Callable[[int], None]) -> None:
        while (left_s := ended_at - time.time()) > 0:
            time.sleep(min(POLL_S, left_s))
            self.poll()
            report(len(self._calls))
        while self.is_waiting_for(ended_at) and time.time() < ended_at + DRAIN_S:
            time.sleep(POLL_S)
            self.poll()

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
            source=f"recorded {began:%Y-%m-%d %H:%M:%S} UTC",
        )
        begins_s = calls[0].arrived_at - self.started_at
        moved = trace.shifted(begins_s, ended_at - self.started_at)
        return moved, len(arrived) - len(calls)

    def _ask(self) -> _Told:
        return msgspec.convert(self.client.post("/calls", {"numbers": self.wanted}), _Told)

    def take(self, told: Mapping[str, RecordedCalls | None]) -> bool:
        """Keep what is new of each engine's answer; whether one has more to tell at once."""
        has_more = False
        for name, recording in told.items():
            if recording is None:
                continue
            self.silent.discard(name)
            self._oldest_open_at[name] = recording.oldest_open_at
            known = self._places.get(name)
            if known is not None and known[0] != recording.id:
                # Another start of the engine: its numbers begin at 0, what it ran is gone.
                self._places[name] = recording.id, 0
                has_more = True
                continue
            self.num_lost += recording.first_number - (known[1] if known else 0)
            self._calls += recording.calls
            after = recording.first_number + len(recording.calls)
            self._places[name] = recording.id, after
            has_more = has_more or len(recording.calls) == MAX_CALLS_SENT
        return has_more


trace_app = typer.Typer(
    help="Traces of online calls: times and lengths, never text.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

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
        float | None,
        typer.Option("--seconds", help="How long to record. [default: until Ctrl-C]"),
    ] = None,
    home_path: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record arrival and lengths of the online calls that the engines get; never text.

    Needs engines with batchrun's scheduler. Calls that run at the end are waited for, up to a
    minute; Ctrl-C ends it with what has come.
    """
    if seconds is not None and not seconds > 0:
        raise InputError(f"--seconds must be above 0, not {seconds:g}")
    recording = CallRecording(DaemonClient(load_home(home_path)))
    prepare_file(output)
    recording.begin()
    note("recording online calls; Ctrl-C ends it")
    with LateProgress() as progress:
        ended_at = recording.run(seconds, lambda num: progress("online calls", num, 0))
    trace, num_without_token = recording.trace(ended_at)
    save_trace(trace, output)
    is_open = recording.is_waiting_for(ended_at)
    for line in _left_out(recording, num_without_token, is_open=is_open):
        note(line)
    more: dict[str, object] = {
        "num_lost": recording.num_lost,
        "num_without_token": num_without_token,
        "has_unended_calls": is_open,
    }
    _say_written(output, trace, more if as_json else None)
    if recording.trouble is not None:
        raise recording.trouble


@trace_app.command()
def show(
    path: TraceArgument,
    *,
    kind: FormatOption = None,
    peak: Annotated[
        float, typer.Option("--peak", help="Seconds of the peak window that is looked for.")
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
    if as_json:
        print_json(asdict(summary))
        return
    for line in _lines(summary):
        say(line)


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
    from_s: Annotated[float, typer.Option("--from", help="Second of the file to begin at.")] = 0.0,
    to_s: Annotated[
        float | None, typer.Option("--to", help="Second of the file to end before.")
    ] = None,
    lengths_from: Annotated[
        Path | None,
        typer.Option("--lengths-from", help="For rates: a trace to draw calls from."),
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
        trace = _cut(trace, from_s, to_s)
        trace = scale_rate(trace, scale_rate_by, seed=seed)
    trace = scale_time(trace, scale_time_by)
    if not len(trace):
        raise InputError(f"{path}: no call is left; nothing was written")
    prepare_file(output)
    save_trace(trace, output)
    _say_written(output, trace, {} if as_json else None)


def _say_written(path: Path, trace: Trace, more: Mapping[str, object] | None) -> None:
    """What was written; as JSON, with `more`, unless that is None."""
    if more is None:
        say(f"{path}: {len(trace):,} calls in {trace.duration_s:,.0f} s")
        return
    written = {"path": str(path), "num_requests": len(trace), "duration_s": trace.duration_s}
    print_json({**written, **more})


def _cut(trace: Trace, from_s: float, to_s: float | None) -> Trace:
    if not from_s and to_s is None:
        return trace
    return trace.between(from_s, trace.duration_s if to_s is None else to_s)


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
