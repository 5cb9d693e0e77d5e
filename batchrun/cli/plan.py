"""What to expect before anybody pays: `plan` sizes engines, `simulate` runs a scenario."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from batchrun.cli.console import JsonOption, ProgressBar, answer, columns, figure, note, vllm_needed
from batchrun.cli.inspect import answering, earlier_jobs
from batchrun.config import load_home
from batchrun.control.client import DaemonClient
from batchrun.control.starting import read_deployment
from batchrun.errors import InputError, known_name
from batchrun.jobs.expected_answers import estimate_outputs
from batchrun.jobs.job_file import load_job_file
from batchrun.quantities import count, duration, parse_duration_s, share
from batchrun.routing.routers import DEFAULT_ROUTER, ROUTERS
from batchrun.simulator.traces.reading import Drawing, detect_format, read_trace
from batchrun.simulator.traces.trace import Trace
from batchrun.types import DEFAULT_MODEL

if TYPE_CHECKING:
    from batchrun.simulator.offline_jobs import OfflineJob
    from batchrun.simulator.planner.capacity import CapacityPlan, PlannedJob
    from batchrun.simulator.planner.fleet import Attainment, Fleet
    from batchrun.simulator.simulation import Simulated, SimulationPlan


NO_PLAN = 1
REFERENCE = "a100-8b"
SHOWN_ENGINES = 16
"""Of a simulation, each on a line of its own; of more the JSON tells."""


def _known_router(name: str | None) -> str | None:
    try:
        return name and known_name(name, ROUTERS)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


ROUTER_HELP = "Who chooses the engine of a call; names as in batchrun.yaml."


def _seconds(option: str, text: str) -> float:
    """Seconds of `1s`, `5m`, `6h` or a plain number of seconds, such as `0.05`."""
    try:
        return parse_duration_s(float(text) if text.replace(".", "", 1).isdigit() else text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from error


def plan(
    *,
    trace: Annotated[Path, typer.Option(help="Trace of the online calls, any format.")],
    job: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Job file; as often as there are jobs."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROFILE",
            help="[NAME=]PROFILE[@PRICE[xGPUS]]: a profile of `batchrun calibrate`, a YAML file "
            "of constants or `a100-8b`; price of a GPU-hour, GPUs of an engine; give several and "
            "the cheapest is chosen. [default: a100-8b]",
        ),
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(min=2, max=131_072, help="vLLM's option of this name.")
    ] = 32_768,
    ttft: Annotated[str, typer.Option(help="Bound of the TTFT.")] = "1s",
    tpot: Annotated[str, typer.Option(help="Bound of the TPOT, in seconds.")] = "0.05",
    target: Annotated[
        float, typer.Option(help="Share of the calls that is to be within each bound.")
    ] = 0.99,
    peak: Annotated[str, typer.Option(help="Length of the busiest window.")] = "5m",
    windows: Annotated[
        int, typer.Option(min=1, max=10_000, help="Windows that stand for the day.")
    ] = 24,
    window: Annotated[
        str | None, typer.Option(help="Length of each. [default: 5m / engines, at least 1m]")
    ] = None,
    submit_at: Annotated[
        str | None, typer.Option(help="When jobs are submitted. [default: the trace's start]")
    ] = None,
    max_engines: Annotated[
        int, typer.Option(min=1, max=65_536, help="The most engines that are tried.")
    ] = 1024,
    draws: Annotated[
        int,
        typer.Option(
            min=1, max=1_000, help="Draws of the trace's traffic; the hardest are simulated."
        ),
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    router: Annotated[
        str, typer.Option(metavar="NAME", callback=_known_router, help=ROUTER_HELP)
    ] = DEFAULT_ROUTER,
    as_json: JsonOption = False,
) -> None:
    """How many engines hold the SLOs at the peak, and what jobs cost beside the calls.

    Simulates the busiest window of the trace and of draws like it, alone and beside the jobs, then
    a day with the jobs. Exit code 1: nothing holds.
    """
    with vllm_needed("plan"):
        from batchrun.simulator.planner.capacity import (
            PlanRequest,
            paragraph,
            plan_capacity,
            record_of,
        )
        from batchrun.simulator.planner.colocation import fitting
        from batchrun.simulator.planner.fleet import context_tokens
        from batchrun.simulator.planner.kinds import SloTarget, check_kinds, parse_kind

    if not 0 < target <= 1:
        raise InputError(f"--target: must be above 0 and at most 1, not {target:g}")
    slo = SloTarget(_seconds("--ttft", ttft), _seconds("--tpot", tpot), target)
    kinds = [
        parse_kind(each, slo, Path.cwd()).with_context(max_model_len).with_router(router)
        for each in profile or [REFERENCE]
    ]
    check_kinds(kinds)

    def drawn(seed: int) -> Trace:
        return read_trace(trace, drawing=Drawing(seed))

    calls = drawn(seed)
    if not len(calls):
        raise InputError(f"{trace}: has no calls")
    jobs = [_offline_job(path) for path in job or []]
    unable = {}
    for (path, planned), kind in product(zip(job or [], jobs, strict=True), kinds):
        if not planned.num_rows:
            raise InputError(f"--job {path}: no row can run; `batchrun submit --dry-run` says why")
        if not fitting(planned, kind.engine).num_rows:
            unable[kind.name] = (
                f"--job {path}: no row can run on {kind.name} with its context of "
                f"{context_tokens(kind.engine):,}; `batchrun submit --dry-run` says more"
            )
    for line in unable.values():
        if len(unable) == len(kinds):
            raise InputError(line)
        note(f"left out: {line}")
    kinds = [kind for kind in kinds if kind.name not in unable]
    request = PlanRequest(
        calls,
        kinds,
        slo,
        jobs,
        _seconds("--peak", peak),
        max_engines,
        windows,
        None if window is None else _seconds("--window", window),
        0.0 if submit_at in {None, "0", "0s"} else _seconds("--submit-at", submit_at),
        draws,
        seed,
        drawn if detect_format(trace).has_rates else None,
    )
    with ProgressBar() as progress:
        found = plan_capacity(request, progress)
    shown = [*_plan_shown(found), paragraph(found)]
    answer(record_of(found), *shown, as_json=as_json)
    if found.chosen is None:
        raise typer.Exit(NO_PLAN)


def _offline_job(path: Path) -> OfflineJob:
    """The job of a file, with answers as long as a dry run expects them."""
    from batchrun.simulator.offline_jobs import JobTerms, job_of_file

    spec, home = load_job_file(path, cwd=Path.cwd()), load_home(None)
    folder, model = _model_folder(spec.model), answering(spec, home)
    with earlier_jobs(home) if DaemonClient(home).is_running() else nullcontext() as stored:
        estimate = partial(estimate_outputs, stored=stored, default_model=model)
        return job_of_file(path, JobTerms(), model_folder=folder, estimate=estimate)


def _model_folder(model: str) -> Path | None:
    """The files of a job's model, where an engine of batchrun.yaml has it and they are here."""
    deployment = read_deployment(None)
    for engine in deployment.engines if deployment.file else ():
        is_named = engine.attach is None or engine.model is not None
        if is_named and model in {
            DEFAULT_MODEL,
            deployment.first_model_of(engine),
            *engine.adapters,
        }:
            own = deployment.model_copy(update={"engines": (engine,)})
            return own.model_folder(load_home(None))
    return None


def _plan_shown(plan: CapacityPlan) -> Iterator[RenderableType]:
    """Where the peak is, the numbers of engines that were simulated, and the jobs."""
    load, window = plan.loads[0], plan.loads[0].window
    rate_per_s = load.num_judged / (window.end_s - window.start_s)
    yield (
        f"peak       seconds {window.start_s:,.0f} to {window.end_s:,.0f} of "
        f"{plan.request.trace.duration_s:,.0f}, {count(load.num_judged, 'call')}, "
        f"{rate_per_s:,.2f} a second"
    )
    if plan.loads[1:]:
        nums = [each.num_judged for each in plan.loads[1:]]
        others = count(plan.request.num_draws - 1, "other draw")
        calls = f"{min(nums):,} to {max(nums):,} calls"
        yield f"           the {len(nums)} hardest of {others} have {calls}"
    headings = "engines", "count", "GPUs", "beside", "draws", "TTFT kept", "TPOT kept", "holds"
    yield columns(*headings, "an hour", rows=_engine_rows(plan))
    if plan.jobs:
        yield columns(
            "job", "rows", "tokens", "done after", "deadline", "GPU-hours alone", "cost alone",
            rows=map(_job_row, plan.jobs),
        )  # fmt: skip


def _engine_rows(plan: CapacityPlan) -> Iterator[Sequence[str]]:
    """One for each number of engines that was simulated, with the least of the draws; the smallest
    that holds on all of them is marked."""
    for fleet in plan.fleets:
        for (num, has_jobs), group in groupby(fleet.tried, lambda e: (e.num_engines, e.has_jobs)):
            tried = list(group)
            held = sum(each.holds(plan.request.slo) for each in tried)
            yield (
                fleet.kind.name,
                f"{num:,}",
                f"{num * fleet.kind.gpus:,}",
                "jobs" if has_jobs else "-",
                f"{held} of {len(tried)}",
                share(min(each.ttft_share for each in tried)),
                share(min(each.tpot_share for each in tried)),
                _verdict(plan, fleet, num, tried),
                figure(fleet.kind.price_per_hour(num), "{:,.2f}"),
            )
        if not fleet.tried:
            yield fleet.kind.name, "any", *[""] * 5, "impossible", ""


def _job_row(job: PlannedJob) -> Sequence[str]:
    """Beside the calls, and on engines of its own."""
    deadline = "-"
    if job.deadline_s is not None:
        kept = "kept" if job.is_deadline_kept else "missed"
        deadline = f"{duration(job.deadline_s)}, {kept}"
    return (
        job.name,
        f"{job.num_rows:,}",
        f"{job.served_tokens:,}",
        "never" if job.takes_s is None else duration(job.takes_s),
        deadline,
        f"{job.gpu_hours_alone:,.2f}",
        figure(job.cost_alone, "{:,.2f}"),
    )


def _verdict(
    plan: CapacityPlan, fleet: Fleet, num_engines: int, tried: Sequence[Attainment]
) -> str:
    from batchrun.simulator.planner.fleet import have_room, keep_together

    slo = plan.request.slo
    if not keep_together(tried, slo):
        return "no"
    if num_engines != fleet.num_engines:
        return "yes" if have_room(tried, slo) else "barely"
    return "chosen" if fleet is plan.chosen else "smallest"


def simulate(
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for records (Parquet) and figures (SVG)."),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", callback=_known_router, help=f"{ROUTER_HELP} [default: the scenario's]"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the scheduler on a virtual clock: online calls, offline jobs, any number of engines."""
    with vllm_needed("simulate"):
        from batchrun.simulator.records import Tables
        from batchrun.simulator.scenario_file import load_scenario, plan_of
        from batchrun.simulator.simulation import simulate as run_simulation
    plan = plan_of(load_scenario(scenario), scenario.absolute().parent)
    if router is not None:
        plan = replace(plan, router=router)
    with ExitStack() as stack:
        progress = stack.enter_context(ProgressBar())
        tables = None if output is None else stack.enter_context(Tables(output))
        figures = run_simulation(plan, tables, progress)
    if output is not None:
        _draw(output, plan)
    answer(figures.record(), *_simulation_shown(figures), as_json=as_json)


def _draw(folder: Path, plan: SimulationPlan) -> None:
    try:
        from batchrun.simulator.plots import draw_all
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        note(f"records in {folder}; figures need matplotlib: pip install matplotlib")
        return
    drawn = draw_all(folder, plan.slo, sum(each.shape.num_blocks - 1 for each in plan.engine_plans))
    note(f"records and {len(drawn)} figures in {folder}")


def _simulation_shown(figures: Simulated) -> Iterator[RenderableType]:
    online, offline = figures.online, figures.offline
    engines = count(figures.num_engines, "engine")
    yield (
        f"time       {figures.duration_s:,.0f} s on {engines}, {figures.num_steps:,} steps, "
        f"busy {figures.busy_share:.0%}"
    )
    yield (
        f"online     {online.num_arrived:,} calls, {online.num_ended:,} ended, "
        f"{online.num_unfinished:,} unfinished"
    )
    if online.num_judged:
        yield f"TTFT       {_latency(online.ttft_p50_s, online.ttft_p90_s, online.ttft_p99_s)}"
        yield f"TPOT       {_latency(online.tpot_p50_s, online.tpot_p90_s, online.tpot_p99_s)}"
        yield (
            f"SLOs       TTFT kept by {_share(online.ttft_kept)}, TPOT by "
            f"{_share(online.tpot_kept)}, every token in time for {_share(online.deadline_kept)}"
        )
    if offline.num_rows:
        yield (
            f"offline    {offline.served_tokens_per_s:,.0f} tokens/s served, "
            f"{offline.computed_tokens_per_s:,.0f} computed, hit rate {_share(offline.hit_rate)}"
        )
        yield (
            f"rows       {offline.num_ended:,} of {offline.num_rows:,} ended, "
            f"{offline.num_in_engines:,} in the engines, {offline.num_preemptions:,} preemptions"
        )

    if 1 < figures.num_engines <= SHOWN_ENGINES:
        yield columns(
            *("engine", "steps", "busy", "tokens for calls", "for rows"),
            rows=(
                (
                    str(number),
                    f"{engine.num_steps:,}",
                    f"{engine.busy_share:.0%}",
                    f"{engine.online_computed_tokens:,}",
                    f"{engine.offline_computed_tokens:,}",
                )
                for number, engine in enumerate(figures.engines)
            ),
        )

    if figures.jobs:
        kept = {None: "-", True: "kept", False: "missed"}
        headings = "job", "rows done", "served tokens", "computed tokens", "finished", "deadline"
        yield columns(
            *headings,
            rows=(
                (
                    job.name,
                    f"{job.num_done:,} / {job.num_rows:,}",
                    f"{job.served_tokens:,}",
                    f"{job.computed_tokens:,}",
                    figure(job.finished_at_s, "{:,.0f} s"),
                    kept[job.is_deadline_kept],
                )
                for job in figures.jobs
            ),
        )


def _latency(p50_s: float | None, p90_s: float | None, p99_s: float | None) -> str:
    shown = (("p50", p50_s), ("p90", p90_s), ("p99", p99_s))
    return ", ".join(f"{name} {1e3 * value:,.1f} ms" for name, value in shown if value is not None)


def _share(value: float | None) -> str:
    return "-" if value is None else share(value)
