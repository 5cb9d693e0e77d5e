"""The `plan` command: how many engines, and what jobs cost beside the calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchrun.cli.console import LateProgress, out, print_json, say
from batchrun.cli.options import JsonOption
from batchrun.cli.vllm_here import vllm_needed
from batchrun.durations import parse_duration_s
from batchrun.errors import InputError
from batchrun.traces import read_trace

if TYPE_CHECKING:
    from batchrun.planner import CapacityPlan, PlanRequest

NO_PLAN = 1
REFERENCE = "a100-8b"


def _seconds(option: str, text: str) -> float:
    """Seconds of `1s`, `5m`, `6h` or a plain number of seconds, such as `0.05`."""
    try:
        return parse_duration_s(float(text) if text.replace(".", "", 1).isdigit() else text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from error


def plan(
    *,
    trace: Annotated[Path, typer.Option("--trace", help="Trace of the online calls, any format.")],
    job: Annotated[
        list[Path] | None, typer.Option("--job", help="Job file; as often as there are jobs.")
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            help="[NAME=]PROFILE[@PRICE[xGPUS]]: a profile of `batchrun calibrate`, a YAML file "
            "of constants or `a100-8b`; price of a GPU-hour, GPUs of an engine; give several and "
            "the cheapest is chosen. [default: a100-8b]",
        ),
    ] = None,
    max_model_len: Annotated[
        int,
        typer.Option("--max-model-len", min=2, max=131_072, help="vLLM's option of this name."),
    ] = 32_768,
    ttft: Annotated[str, typer.Option("--ttft", help="Bound of the TTFT.")] = "1s",
    tpot: Annotated[str, typer.Option("--tpot", help="Bound of the TPOT, in seconds.")] = "0.05",
    target: Annotated[
        float, typer.Option("--target", help="Share of the calls that is to be within each bound.")
    ] = 0.99,
    peak: Annotated[str, typer.Option("--peak", help="Length of the busiest window.")] = "5m",
    windows: Annotated[
        int, typer.Option(min=1, max=10_000, help="Windows that stand for the day.")
    ] = 24,
    window: Annotated[
        str | None,
        typer.Option("--window", help="Length of each. [default: 5m / engines, at least 1m]"),
    ] = None,
    submit_at: Annotated[
        str | None,
        typer.Option("--submit-at", help="When jobs are submitted. [default: the trace's start]"),
    ] = None,
    max_engines: Annotated[
        int, typer.Option(min=1, max=65_536, help="The most engines that are tried.")
    ] = 1024,
    as_json: JsonOption = False,
) -> None:
    """How many engines hold the SLOs at the peak, and what jobs cost beside the calls.

    Simulates the busiest window of the trace, then a day with the jobs. Exit code 1: nothing holds.
    """
    with vllm_needed("plan"):
        from batchrun.planner import PlanRequest as Request
        from batchrun.planner import Promise, check_kinds, parse_kind, record_of
        from batchrun.simulator import JobTerms, job_of_file

    if not 0 < target <= 1:
        raise InputError(f"--target: must be above 0 and at most 1, not {target:g}")
    promise = Promise(_seconds("--ttft", ttft), _seconds("--tpot", tpot), target)
    kinds = [
        parse_kind(each, promise, Path.cwd()).with_context(max_model_len)
        for each in profile or [REFERENCE]
    ]
    check_kinds(kinds)
    calls = read_trace(trace)
    if not len(calls):
        raise InputError(f"{trace}: has no calls")
    jobs = [job_of_file(path, JobTerms()) for path in job or []]
    request = Request(
        calls,
        kinds,
        promise,
        jobs,
        _seconds("--peak", peak),
        max_engines,
        windows,
        None if window is None else _seconds("--window", window),
        0.0 if submit_at is None else _seconds("--submit-at", submit_at),
    )
    found = _run(request)
    if as_json:
        print_json(record_of(found))
    else:
        _show(found)
    if found.chosen is None:
        raise typer.Exit(NO_PLAN)


def _run(request: PlanRequest) -> CapacityPlan:
    from batchrun.planner import plan_capacity

    with LateProgress() as progress:
        return plan_capacity(request, progress)


def _show(found: CapacityPlan) -> None:
    from batchrun.cli.plan_tables import engines_table, jobs_table, peak_line
    from batchrun.planner import paragraph

    say(peak_line(found))
    out.print(engines_table(found))
    if found.jobs:
        out.print(jobs_table(found))
    say(paragraph(found))
