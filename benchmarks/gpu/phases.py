"""The phases of the benchmark: which policy gets which rows, with which token budget."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from batchrun.simulator.virtual.engine import TrafficSource
from benchmarks.gpu.engine import LoadedModel, Phase
from benchmarks.gpu.record import Span, figures
from benchmarks.gpu.shape import Shape
from benchmarks.replay import Figures
from benchmarks.row_feeds import RowSource, callers, planned_order
from benchmarks.scenarios import Order

PHASE_OVERHEAD_S = 1.5
"""A new scheduler, drawing the load, the steps that end a phase."""


def process_age_s() -> float:
    """Seconds since this process began: importing vLLM counts too."""
    return time.time() - psutil.Process().create_time()


@dataclass(frozen=True, slots=True)
class Share:
    """How long a phase may be, in seconds."""

    least_s: float = 10.0
    most_s: float = 60.0

    def of(self, left_s: float, num_phases: int) -> float | None:
        """The length of the next of `num_phases` with `left_s` for all; None: there is no time.

        An equal share, or that of as many phases as fit: then the last ones lack.
        """
        num_fitting = min(num_phases, int(left_s / (self.least_s + PHASE_OVERHEAD_S)))
        if num_fitting <= 0:
            return None
        return min(self.most_s, left_s / num_fitting - PHASE_OVERHEAD_S)


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

    @property
    def title(self) -> str:
        """A name for people."""
        if self.order is None:
            return "stock, online alone"
        beside = "" if self.is_online else ", no online calls"
        return f"{self.policy}, {self.order}, budget {self.budget:,}{beside}"


def phase_plans(shape: Shape) -> Iterator[PhasePlan]:
    """What the issue of the co-location scheduler asks for; what matters most comes first."""
    yield PhasePlan("bs", None, shape.budget)
    yield PhasePlan("bs", "shuffled", shape.budget)
    yield PhasePlan("echo", PLANNED, shape.budget)
    yield PhasePlan("echo", PLANNED, shape.budget, is_online=False)
    for budget in shape.grouped_budgets:
        yield PhasePlan("bs", "grouped", budget)
    yield PhasePlan("bs+e", "shuffled", shape.budget)
    yield PhasePlan("bs+e", PLANNED, shape.budget)
    yield PhasePlan("bs+e+s", PLANNED, shape.budget)


def run_phase(
    model: LoadedModel, shape: Shape, plan: PhasePlan, profile: Path, duration_s: float
) -> Figures:
    """Warm up for a fifth of `duration_s`, measure the rest, leave the engine idle."""
    settings: dict[str, object] = {
        "policy": plan.policy,
        "eviction": "next-use" if plan.policy == "echo" else "lru",
        "slo": {"ttft_s": shape.promise.ttft_s, "tpot_s": shape.promise.tpot_s},
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
    span = Span(WARM_UP_SHARE * duration_s, phase.now_s)
    found = figures(phase.requests.values(), phase.totals, span, shape.promise)
    num_sent = sum(not life.is_online for life in phase.requests.values())
    phase.finish()
    return {
        "policy": plan.policy,
        "order": plan.order,
        "blocks": shape.num_blocks,
        "budget": plan.budget,
        "seed": SEED,
        "online": plan.is_online,
        "window_s": span.length_s,
        "job_ran_out": plan.order is not None and num_sent == num_rows,
        **found,
    }


def _sources(shape: Shape, plan: PhasePlan, duration_s: float) -> tuple[list[TrafficSource], int]:
    """Who sends requests, and how many rows the job has."""
    sources: list[TrafficSource] = []
    num_rows = 0
    if plan.is_online:
        sources.append(callers(shape.online().draw(duration_s, SEED), SEED))
    if plan.order is not None:
        order = Order.GROUPED if plan.order == "grouped" else Order.SHUFFLED
        job = shape.job(order, SEED)
        if plan.order == PLANNED:
            job = planned_order(job)
        num_rows = len(job.rows)
        sources.append(RowSource(job, NUM_ROWS))
    return sources, num_rows
