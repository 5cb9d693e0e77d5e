"""What `plan` prints: the kinds of engines, and the jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from batchrun.durations import count, duration, share

if TYPE_CHECKING:
    from batchrun.planner import CapacityPlan, Fleet, JobPlan


def engines_table(plan: CapacityPlan) -> Table:
    """One row for each number of engines that was simulated; the smallest that holds is marked."""
    table = Table("engines", "count", "GPUs", "TTFT kept", "TPOT kept", "holds", "an hour")
    for fleet in plan.fleets:
        for each in fleet.tried:
            table.add_row(
                fleet.kind.name,
                f"{each.num_engines:,}",
                f"{each.num_engines * fleet.kind.gpus:,}",
                share(each.ttft_share),
                share(each.tpot_share),
                _verdict(plan, fleet, each.num_engines, holds=each.holds(plan.request.promise)),
                _money(fleet.kind.price_per_hour(each.num_engines)),
            )
        if not fleet.tried:
            table.add_row(fleet.kind.name, "any", "", "", "", "impossible", "")
    return table


def jobs_table(plan: CapacityPlan) -> Table:
    """One row for each job: beside the calls, and on engines of its own."""
    table = Table(
        "job", "rows", "tokens", "done after", "deadline", "GPU-hours alone", "cost alone"
    )
    for job in plan.jobs:
        table.add_row(
            job.name,
            f"{job.num_rows:,}",
            f"{job.served_tokens:,}",
            "never" if job.takes_s is None else duration(job.takes_s),
            _deadline(job),
            f"{job.gpu_hours_alone:,.2f}",
            _money(job.cost_alone),
        )
    return table


def _verdict(plan: CapacityPlan, fleet: Fleet, num_engines: int, *, holds: bool) -> str:
    if not holds:
        return "no"
    if num_engines != fleet.num_engines:
        return "yes"
    return "chosen" if fleet is plan.chosen else "smallest"


def _deadline(job: JobPlan) -> str:
    if job.deadline_s is None:
        return ""
    return f"{duration(job.deadline_s)}, {'kept' if job.is_deadline_kept else 'missed'}"


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def peak_line(plan: CapacityPlan) -> str:
    """Where the peak is."""
    window = plan.load.window
    return (
        f"peak       seconds {window.start_s:,.0f} to {window.end_s:,.0f} of "
        f"{plan.request.trace.duration_s:,.0f}, {count(plan.load.num_judged, 'call')}"
    )
