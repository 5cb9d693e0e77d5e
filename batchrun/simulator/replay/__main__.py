"""`python -m batchrun.simulator.replay --base-url http://127.0.0.1:8000/v1 --model MODEL`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from batchrun.errors import BatchrunError, ConfigError
from batchrun.simulator.replay.client import (
    Arrival,
    OnlineResult,
    ReplayTarget,
    Summary,
    TraceShape,
    arrivals_of,
    generate_trace,
    replay,
    summarize,
)
from batchrun.simulator.traces.reading import Drawing, read_trace
from batchrun.simulator.traces.trace import scale_lengths, scale_rate


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a trace and print its figures. Exit code 4 if no call was answered."""
    options = _parser().parse_args(argv)
    target = ReplayTarget(
        base_url=options.base_url,
        model=options.model,
        api_key=options.api_key,
        timeout_s=options.timeout_s,
        extra_body={"ignore_eos": True} if options.ignore_eos else {},
    )
    try:
        arrivals = _arrivals(options)
        results = asyncio.run(replay(arrivals, target))
        summary = summarize(results, slo_ttft_s=options.slo_ttft_s, slo_tpot_s=options.slo_tpot_s)
        if options.json is not None:
            _write_json(options.json, summary, results)
    except BatchrunError as error:
        sys.stderr.write(f"batchrun replay: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("batchrun replay: interrupted\n")
        return 130
    sys.stdout.write(table(summary))
    if not summary["answered"]:
        reason = results[0].error if results else "the trace is empty"
        sys.stderr.write(f"batchrun replay: no call was answered; the first: {reason}\n")
        return 4
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m batchrun.simulator.replay", description=__doc__
    )
    add = parser.add_argument
    add("--base-url", required=True, help="the endpoint's address, ending in /v1")
    add("--model", required=True)
    add("--api-key")
    add("--json", type=Path, metavar="FILE", help="write the figures and every call as JSON")
    add("--duration-s", type=float, default=60.0)
    add("--rate-per-s", type=float, default=2.0)
    add("--burst-factor", type=float, default=4.0, help="rate within a burst, as a multiple")
    add("--burst-period-s", type=float, default=30.0)
    add("--burst-length-s", type=float, default=5.0)
    add("--seed", type=int, default=0)
    add("--trace", type=Path, metavar="FILE", help="take times and lengths from a recorded trace")
    add("--trace-start-s", type=float, default=0.0)
    add("--trace-scale-rate", type=float, default=1.0, help="send so many times the calls")
    add("--trace-scale-tokens", type=float, default=1.0, help="multiply both lengths by this")
    add("--timeout-s", type=float, default=120.0, help="a call longer than this has failed")
    add("--slo-ttft-s", type=float, default=1.0)
    add("--slo-tpot-s", type=float, default=0.05)
    add("--ignore-eos", action="store_true", help="vLLM: generate up to max_tokens always")
    return parser


def _arrivals(options: argparse.Namespace) -> list[Arrival]:
    for flag in ("duration_s", "burst_period_s", "timeout_s"):
        if getattr(options, flag) <= 0:
            raise ConfigError(f"--{flag.replace('_', '-')} must be above 0")
    if options.trace is not None:
        return _recorded(options)
    shape = TraceShape(
        duration_s=options.duration_s,
        rate_per_s=options.rate_per_s,
        burst_factor=options.burst_factor,
        burst_period_s=options.burst_period_s,
        burst_length_s=options.burst_length_s,
    )
    return generate_trace(shape, seed=options.seed)


def _recorded(options: argparse.Namespace) -> list[Arrival]:
    drawing = Drawing(seed=options.seed)
    start_s, seed = options.trace_start_s, options.seed
    trace = read_trace(options.trace, drawing=drawing)
    trace = trace.between(start_s, start_s + options.duration_s)
    trace = scale_rate(trace, options.trace_scale_rate, seed=seed)
    return arrivals_of(scale_lengths(trace, options.trace_scale_tokens), seed=seed)


def _write_json(path: Path, summary: Summary, results: Sequence[OnlineResult]) -> None:
    calls = [asdict(result) | {"tpot_s": result.tpot_s} for result in results]
    try:
        path.write_text(json.dumps({"summary": summary, "calls": calls}) + "\n")
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror}") from error


def table(summary: Summary) -> str:
    """The figures for people, one a line."""
    width = max(map(len, summary))
    return "".join(f"{key:<{width}}  {_shown(value):>10}\n" for key, value in summary.items())


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"


if __name__ == "__main__":
    sys.exit(main())
