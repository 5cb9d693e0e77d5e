"""What a plan costs: our `schedule()` beside vLLM's own on the same admitted set, step by step.

    python -m benchmarks.planning_cost [--steps N] [--json FILE]

`echo` drives a virtual engine. In every step vLLM's own scheduler, a second one with requests of
its own, is told what was admitted, preempted and capped, and schedules the same. The two calls are
timed one right after the other, so that whatever else the machine does hits both; their difference
is the planning. Times do not repeat exactly; what is planned does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from batchrun.simulator.offline_jobs import JobShape, LogNormalTokens
from batchrun.simulator.online import OnlineTraffic
from batchrun.simulator.virtual.engine import TrafficSource
from batchrun.simulator.virtual.laws import A100Law
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.ablation_runs import Record
from benchmarks.paired_scheduler import Pair, PairedEngine
from benchmarks.records import write_records
from benchmarks.row_feeds import RowSource, callers, planned_order
from benchmarks.scenarios import Order, Scenario, a100_8b, draw_calls, draw_job
from benchmarks.warm_up import observe

NUM_ROWS = 256 + 512
"""Running and waiting."""
WINDOW = 256
"""Rows in the engine of the reference scenario."""
WARM_UP_S = 300.0
FULL_RUNNING, FULL_CANDIDATES = 240, 480
"""Steps with fewer running or waiting requests than these do not count as full."""


@dataclass(frozen=True, slots=True)
class Load:
    """A scenario with the rows that are in the engine at once, and the engine."""

    name: str
    scenario: Scenario
    num_rows: int
    shape: EngineShape
    is_full: bool


def loads() -> Iterator[Load]:
    """256 running and 512 waiting requests, of short documents and of long ones; and the reference
    scenario as it is."""
    online = OnlineTraffic(
        rate_per_s=6.0,
        burst_factor=1.0,
        burst_length_s=8.0,
        burst_period_s=90.0,
        prompt=LogNormalTokens(5.3, 1.0, (8, 2000)),
        output=LogNormalTokens(5.0, 0.8, (4, 800)),
    )
    short = JobShape(1_000, (200, 800), (6, 18), (15, 60), (100, 400))
    long = JobShape(120, (8_000, 28_000), (30, 60), (15, 60), (100, 400))
    settings = {"batchrun": {"slo": {"ttft_s": 60.0, "tpot_s": 2.0}}}
    shape = EngineShape(num_blocks=40_000, additional_config={"batchrun": {}})
    loose = EngineShape(num_blocks=120_000, additional_config=settings)
    yield Load("full-short", Scenario("full-short", 600.0, online, short), NUM_ROWS, shape, True)
    yield Load("full-long", Scenario("full-long", 600.0, online, long), NUM_ROWS, loose, True)
    yield Load("a100-8b", a100_8b(), WINDOW, EngineShape(additional_config={"batchrun": {}}), False)


def measure(load: Load, num_steps: int) -> Record:
    """The cost in the first `num_steps` steps that count."""
    scenario = load.scenario
    law = A100Law()
    job = planned_order(draw_job(scenario.job, 0, Order.SHUFFLED))
    sources: list[TrafficSource] = [
        callers(draw_calls(scenario, 0), 0),
        RowSource(job, load.num_rows),
    ]
    engine = PairedEngine(load.shape, law, sources)
    warm_up = observe(scenario, 0, load.shape, law, online_s=WARM_UP_S)
    warm_up.tell(engine.ours)
    pairs: list[Pair] = []
    steps_s: list[float] = []
    while len(pairs) < num_steps and engine.now_s < scenario.duration_s:
        busy_s = engine.totals.busy_s
        engine.step()
        for pair in engine.ours.take_pairs():
            if not load.is_full or is_full(pair):
                pairs.append(pair)
                steps_s.append(engine.totals.busy_s - busy_s)
    return {"load": load.name, **figures(pairs, steps_s)}


def is_full(pair: Pair) -> bool:
    """Whether about 256 requests run and about 512 wait."""
    return pair.num_running >= FULL_RUNNING and pair.num_waiting >= FULL_CANDIDATES


def figures(pairs: Sequence[Pair], steps_s: Sequence[float]) -> Record:
    """Medians over the steps; the share is that of each step's virtual time. Planning is the
    difference of a pair, by the wall and by CPU time, which other programs disturb less."""
    wall_ms = [1e3 * (pair.ours.wall_s - pair.stock.wall_s) for pair in pairs]
    cpu_ms = [1e3 * (pair.ours.cpu_s - pair.stock.cpu_s) for pair in pairs]
    return {
        "steps": len(pairs),
        "running": median(pair.num_running for pair in pairs),
        "candidates": median(pair.num_waiting for pair in pairs),
        "step_ms": 1e3 * median(steps_s),
        "ours_ms": 1e3 * median(pair.ours.wall_s for pair in pairs),
        "stock_ms": 1e3 * median(pair.stock.wall_s for pair in pairs),
        "planning_ms": median(wall_ms),
        "planning_cpu_ms": median(cpu_ms),
        "planning_cpu_p90_ms": quantiles(cpu_ms, n=10)[-1],
        "planning_step_share": median(
            ms / 1e3 / step_s for ms, step_s in zip(wall_ms, steps_s, strict=True)
        ),
    }


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_500)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    records = []
    for load in loads():
        record = measure(load, options.steps)
        records.append(record)
        print(
            {k: round(v, 3) if isinstance(v, float) else v for k, v in record.items()}, flush=True
        )
    if options.json is not None:
        write_records(options.json, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
