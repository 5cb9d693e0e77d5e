"""Stock vLLM with priorities on the virtual engine: the rows that every policy is held against.

    python -m benchmarks.stock_baseline [--seeds N] [--burst-factor F] [--steps-in-flight 1|2]
                                        [--blocks N ...] [--json FILE]

One step in flight (the default) repeats the trial behind the design's figures: the synchronous
scheduler, no planning time, every row there at once under ids that sort as text, so that "grouped"
rows of one arrival time run as row-0, row-1, row-10, row-100, ... Its means stand beside the
printed ones. Two steps in flight is the engine as it runs on a GPU, with rows in their true order.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from batchrun.simulator.virtual.engine import Timing, TrafficSource
from batchrun.simulator.virtual.feeder import JobFeeder, OnlineSource
from batchrun.simulator.virtual.run import Run, run
from batchrun.simulator.virtual.scenarios import Order, Scenario, a100_8b, draw_calls, draw_job
from batchrun.simulator.virtual.setup import EngineShape, stock_scheduler
from benchmarks.records import write_records

Record = dict[str, object]

ONLINE_BUDGETS = (512, 768, 1024, 2048)
GROUPED_BUDGETS = (256, 512, 1024, 2048)
SHUFFLED_BUDGET = 2048
DESIGN_BURST_FACTOR = 4.0
DESIGN_TOKENS_PER_S = {
    (8600, "shuffled", 2048): 8_460,
    (8600, "grouped", 256): 61_400,
    (8600, "grouped", 512): 72_800,
    (8600, "grouped", 1024): 75_800,
    (8600, "grouped", 2048): 69_700,
    (4300, "shuffled", 2048): 7_490,
    (4300, "grouped", 256): 46_800,
    (4300, "grouped", 512): 48_600,
    (4300, "grouped", 1024): 43_300,
    (4300, "grouped", 2048): 38_700,
}
"""Design 6.4, burst factor 4, means of seeds 0 to 2."""

COLUMNS = {
    "offline_tokens_per_s": "served/s",
    "offline_computed_tokens_per_s": "computed/s",
    "prefix_hit_rate": "hits",
    "ttft_p50_s": "ttft p50",
    "ttft_p99_s": "ttft p99",
    "slo_ttft": "ttft met",
    "slo_tpot": "tpot met",
    "slo_deadline": "deadline",
}


@dataclass(frozen=True, slots=True)
class Baseline:
    """One row of the table: an order of the job's rows (None: no job), blocks and budget."""

    order: Order | None
    blocks: int
    budget: int

    @property
    def label(self) -> str:
        """`online-only`, `shuffled` or `grouped`."""
        return self.order or "online-only"


def main() -> int:
    """Run every baseline for every seed and print the means."""
    options = _parser().parse_args()
    scenario = a100_8b(burst_factor=options.burst_factor)
    records: list[Record] = []
    for baseline in baselines(options.blocks):
        seeds = range(options.seeds)
        rows = [measure(scenario, baseline, seed, options.steps_in_flight) for seed in seeds]
        records += rows
        _print_row(baseline, rows, _printed(baseline, options))
        if options.json is not None:
            write_records(options.json, records)
    return 0


def baselines(blocks: Sequence[int]) -> Iterator[Baseline]:
    """All rows of stock vLLM that the issue of the co-location scheduler asks for."""
    for num_blocks in blocks:
        for budget in ONLINE_BUDGETS:
            yield Baseline(None, num_blocks, budget)
        yield Baseline(Order.SHUFFLED, num_blocks, SHUFFLED_BUDGET)
        for budget in GROUPED_BUDGETS:
            yield Baseline(Order.GROUPED, num_blocks, budget)


def measure(scenario: Scenario, baseline: Baseline, seed: int, steps_in_flight: int) -> Record:
    """One run of stock vLLM. See the module for what one step in flight implies."""
    is_trial = steps_in_flight == 1
    sources: list[TrafficSource] = [OnlineSource(draw_calls(scenario, seed), seed)]
    if baseline.order is not None:
        job = draw_job(scenario.job, seed, baseline.order)
        sources.append(JobFeeder(job, window=None, id_digits=0 if is_trial else 7))
    timing = Timing(steps_in_flight=1, planning_s=0.0) if is_trial else Timing()
    figures = run(
        Run(
            stock_scheduler(steps_in_flight),
            scenario,
            EngineShape(num_blocks=baseline.blocks, token_budget=baseline.budget),
            sources,
            timing=timing,
        )
    )
    return {"policy": "stock", "order": baseline.order, "seed": seed, "online": True, **figures}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N-1")
    parser.add_argument("--burst-factor", type=float, default=DESIGN_BURST_FACTOR)
    parser.add_argument("--steps-in-flight", type=int, choices=(1, 2), default=1)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8600, 4300])
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _printed(baseline: Baseline, options: argparse.Namespace) -> int | None:
    """The design's figure for this row, where the run repeats its trial."""
    if options.steps_in_flight != 1 or options.burst_factor != DESIGN_BURST_FACTOR:
        return None
    return DESIGN_TOKENS_PER_S.get((baseline.blocks, baseline.label, baseline.budget))


def _print_row(baseline: Baseline, rows: Sequence[Record], printed: int | None) -> None:
    print(f"{baseline.blocks:>6} {baseline.label:<12}{baseline.budget:>5}", end="", flush=True)
    for key, title in COLUMNS.items():
        print(f"  {title} {_mean_text([row[key] for row in rows])}", end="")
    if printed is not None:
        values = [value for row in rows if isinstance(value := row["offline_tokens_per_s"], float)]
        print(f"  design {printed:,} ({fmean(values) / printed - 1:+.1%})", end="")
    print(flush=True)


def _mean_text(values: Sequence[object]) -> str:
    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return "-"
    mean = fmean(numbers)
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
