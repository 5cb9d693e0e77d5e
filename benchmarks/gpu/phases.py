"""The phases of the benchmark: which policy gets which rows and budget, and the figures of each."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from batchrun.config import SloConfig
from batchrun.simulator.replay import OnlineResult
from batchrun.simulator.virtual.engine import RequestRecord, TrafficSource
from benchmarks.gpu.engine import LoadedModel, Phase, Step
from benchmarks.gpu.shape import Shape
from benchmarks.replay import Figures, summarize
from benchmarks.row_feeds import RowSource, callers, planned_order
from benchmarks.scenarios import Order, azure_calls

PHASE_OVERHEAD_S = 1.5
"""A new scheduler, drawing the load, the steps that end a phase."""


def process_age_s() -> float:
    """Seconds since this process began: importing vLLM counts too."""
    return time.time() - psutil.Process().create_time()


def phase_s(left_s: float, num_phases: int, least_s: float, most_s: float) -> float | None:
    """Seconds for the next of `num_phases` with `left_s` for all; None: there is no time.

    An equal share, or that of as many phases as fit: then the last ones lack.
    """
    num_fitting = min(num_phases, int(left_s / (least_s + PHASE_OVERHEAD_S)))
    return min(most_s, left_s / num_fitting - PHASE_OVERHEAD_S) if num_fitting > 0 else None


PLANNED = "planned"
"""Shuffled rows in the order in which batchrun's pool sends them."""
NUM_ROWS = 256
"""Rows in the engine at once."""
WARM_UP_SHARE = 0.2
SEED = 1
"""Begins four minutes into the recorded trace: its first seconds hold hardly a call."""


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """One phase. `order` is None without offline rows, else `shuffled`, `grouped` or `planned`."""

    policy: str
    order: str | None
    budget: int
    is_online: bool = True


def phase_plans(shape: Shape) -> list[PhasePlan]:
    """What matters most comes first."""
    budget = shape.budget
    return [
        PhasePlan("bs", None, budget),
        PhasePlan("bs", "shuffled", budget),
        PhasePlan("echo", PLANNED, budget),
        PhasePlan("echo", PLANNED, budget, is_online=False),
        *(PhasePlan("bs", "grouped", grouped_budget) for grouped_budget in shape.grouped_budgets),
        PhasePlan("bs+e", "shuffled", budget),
        PhasePlan("bs+e", PLANNED, budget),
        PhasePlan("bs+e+s", PLANNED, budget),
    ]


def run_phase(
    model: LoadedModel, shape: Shape, plan: PhasePlan, profile: Path, duration_s: float
) -> Figures:
    """Warm up for a fifth of `duration_s`, measure the rest, leave the engine idle."""
    settings: dict[str, object] = {
        "policy": plan.policy,
        "eviction": "next-use" if plan.policy == "echo" else "lru",
        "slo": shape.slo.model_dump(exclude_none=True),
        "profile": str(profile),
    }
    sources, num_rows = _sources(shape, plan, duration_s)
    scheduler = model.renew_scheduler(plan.budget, settings)
    # Prompts are long lists that every full collection would walk; none of them is garbage.
    gc.collect()
    gc.freeze()
    phase = Phase(model, scheduler, sources)
    phase.run_until(duration_s)
    gc.unfreeze()
    begin_s, end_s = WARM_UP_SHARE * duration_s, phase.now_s
    found = figures(phase.requests.values(), phase.steps, begin_s, end_s, shape.slo)
    num_sent = sum(not record.is_online for record in phase.requests.values())
    phase.finish()
    return {
        "policy": plan.policy,
        "order": plan.order,
        "blocks": shape.num_blocks,
        "budget": plan.budget,
        "seed": SEED,
        "online": plan.is_online,
        "window_s": end_s - begin_s,
        "job_ran_out": plan.order is not None and num_sent == num_rows,
        **found,
    }


def _sources(shape: Shape, plan: PhasePlan, duration_s: float) -> tuple[list[TrafficSource], int]:
    """Who sends requests, and how many rows the job has."""
    sources: list[TrafficSource] = []
    num_rows = 0
    if plan.is_online:
        trace = azure_calls(shape.time_scale, shape.token_scale)
        sources.append(callers(trace.draw(duration_s, SEED), SEED))
    if plan.order is not None:
        order = Order.GROUPED if plan.order == "grouped" else Order.SHUFFLED
        job = shape.job(order, SEED)
        if plan.order == PLANNED:
            job = planned_order(job)
        num_rows = len(job.rows)
        sources.append(RowSource(job, NUM_ROWS))
    return sources, num_rows


def figures(
    requests: Iterable[RequestRecord],
    steps: Iterable[Step],
    begin_s: float,
    end_s: float,
    slo: SloConfig,
) -> Figures:
    """All figures of the part of a phase that is measured. Every call that arrived in it and whose
    TTFT bound has passed counts; one without its first token then is a miss."""
    records = list(requests)
    judged = [
        _online_result(record, end_s)
        for record in records
        if record.is_online and begin_s <= record.arrival_at_s <= end_s - slo.ttft_s
    ]
    offline = [record for record in records if not record.is_online]
    measured = [step for step in steps if step.at_s >= begin_s]
    length_s = end_s - begin_s
    return {
        **summarize(judged, slo_ttft_s=slo.ttft_s, slo_tpot_s=slo.tpot_s),
        **_offline_figures(offline, begin_s, end_s),
        "computed_tokens_per_s": sum(step.num_tokens for step in measured) / length_s,
        "offline_computed_tokens_per_s": sum(s.num_offline_tokens for s in measured) / length_s,
        "steps": len(measured),
        "plan_ms": 1e3 * median(step.planning_s for step in measured) if measured else None,
    }


def _online_result(record: RequestRecord, end_s: float) -> OnlineResult:
    times_s = [at_s - record.arrival_at_s for at_s in record.token_times_s]
    return OnlineResult(
        arrived_at_s=record.arrival_at_s,
        ttft_s=times_s[0] if times_s else None,
        e2e_s=times_s[-1] if times_s else end_s - record.arrival_at_s,
        itl_s=tuple(b - a for a, b in pairwise(times_s)),
        num_output_tokens=len(times_s),
        error=None if times_s else "no token before the phase ended",
    )


def _offline_figures(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> Figures:
    """Hits count at the first admission of a row; an aborted row is not served."""

    def is_measured(at_s: float | None) -> bool:
        return at_s is not None and begin_s <= at_s < end_s

    done = [r for r in records if is_measured(r.finished_at_s) and r.finish_reason != "abort"]
    served = sum(record.num_prompt_tokens + len(record.token_times_s) for record in done)
    admitted = [record for record in records if is_measured(record.admitted_at_s)]
    prompt = sum(record.num_prompt_tokens for record in admitted)
    hits = sum(record.num_hit_tokens for record in admitted)
    waits_s = [
        (end_s if record.admitted_at_s is None else record.admitted_at_s) - record.arrival_at_s
        for record in records
    ]
    return {
        "offline_tokens_per_s": served / (end_s - begin_s),
        "offline_rows_per_s": len(done) / (end_s - begin_s),
        "offline_rows": len(done),
        "prefix_hit_rate": hits / prompt if prompt else None,
        "offline_longest_wait_s": max(waits_s, default=None),
    }
