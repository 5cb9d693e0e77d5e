"""The `trace` commands: record, show and convert traces of online calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from batchrun.cli.console import LateProgress, note, print_json, say
from batchrun.cli.daemon_client import DaemonClient
from batchrun.cli.new_file import prepare_file
from batchrun.cli.options import HomeOption, JsonOption
from batchrun.cli.recorder import CallRecording
from batchrun.config import load_home
from batchrun.errors import InputError
from batchrun.traces import (
    Drawing,
    Spread,
    Trace,
    TraceFormat,
    TraceSummary,
    detect_format,
    read_trace,
    save_trace,
    scale_rate,
    scale_time,
    summarize_trace,
)

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


def _spread(tokens: Spread) -> str:
    return (
        f"{tokens.mean:,.0f} tokens on average, p50 {tokens.p50:,.0f}, p95 {tokens.p95:,.0f}, "
        f"p99 {tokens.p99:,.0f}, most {tokens.largest:,.0f}"
    )
