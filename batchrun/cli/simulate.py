"""The `simulate` command: what engines would do with a load, before anybody pays for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from batchrun.cli.console import LateProgress, note, out, print_json, say
from batchrun.cli.options import JsonOption
from batchrun.cli.vllm_here import vllm_needed

if TYPE_CHECKING:
    from batchrun.simulator import Simulated, SimulationPlan


def simulate(
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for records (Parquet) and figures (SVG)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the scheduler on a virtual clock: online calls, offline jobs, any number of engines."""
    with vllm_needed("simulate"):
        from batchrun.simulator import Tables, load_scenario, plan_of
        from batchrun.simulator import simulate as run_simulation
    plan = plan_of(load_scenario(scenario), scenario.absolute().parent)
    with ExitStack() as stack:
        progress = stack.enter_context(LateProgress())
        tables = None if output is None else stack.enter_context(Tables(output))
        figures = run_simulation(plan, tables, progress)
    if output is not None:
        _draw(output, plan)
    if as_json:
        print_json(figures.record())
        return
    for line in _lines(figures):
        say(line)
    if figures.jobs:
        out.print(_jobs(figures))


def _draw(folder: Path, plan: SimulationPlan) -> None:
    try:
        from batchrun.simulator.plots import draw_all
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        note(f"records in {folder}; figures need matplotlib: pip install matplotlib")
        return
    drawn = draw_all(folder, plan.slo, plan.num_engines * (plan.engine.shape.num_blocks - 1))
    note(f"records and {len(drawn)} figures in {folder}")


def _lines(figures: Simulated) -> Iterator[str]:
    online, offline = figures.online, figures.offline
    engines = f"{figures.num_engines} engine{'s' if figures.num_engines > 1 else ''}"
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
            f"promises   TTFT kept by {_share(online.ttft_kept)}, TPOT by "
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


def _jobs(figures: Simulated) -> Table:
    table = Table("job", "rows done", "served tokens", "computed tokens", "finished", "deadline")
    kept = {None: "", True: "kept", False: "missed"}
    for job in figures.jobs:
        finished = "" if job.finished_at_s is None else f"{job.finished_at_s:,.0f} s"
        table.add_row(
            job.name,
            f"{job.num_done:,} / {job.num_rows:,}",
            f"{job.served_tokens:,}",
            f"{job.computed_tokens:,}",
            finished,
            kept[job.is_deadline_kept],
        )
    return table


def _latency(p50_s: float | None, p90_s: float | None, p99_s: float | None) -> str:
    shown = (("p50", p50_s), ("p90", p90_s), ("p99", p99_s))
    return ", ".join(f"{name} {1e3 * value:,.1f} ms" for name, value in shown if value is not None)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
