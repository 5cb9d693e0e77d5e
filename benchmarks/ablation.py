"""Every policy against stock vLLM on the virtual engine, with the bars it must clear.

    python -m benchmarks.ablation [--scenario NAME] [--seeds N ...] [--blocks N ...] [--law NAME]
                                  [--only PATTERN ...] [--json FILE]

Prints the means over the seeds as a table, and below it each bar: met or missed. With `--json` the
steps of Echo's ladder are watched in the first seed: NAME.jsonl gets the records, NAME-series.jsonl
what `benchmarks.plots` draws.

"stock" rows run two steps ahead, as on a GPU, with rows in their true order; "trial" rows repeat
the trial behind the design's printed figures, which stand beside theirs: one step in flight, no
planning time, and rows that all arrive at once, in the order of their numbers as text, row-0,
row-1, row-10, row-100, ... `bs` to `echo` are our scheduler class. Whoever schedules, the daemon of
`batchrun.simulator` sends the rows and keeps at most 256 of them waiting.
Policies that learn start from 20 observed minutes of other traffic of the same generator and from
one of offline work, never from the step law. All figures but `plan_ms` repeat exactly.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.ablation_bars import judge, means_of
from benchmarks.ablation_configs import LADDER, Config, configs
from benchmarks.ablation_runs import Record, Trial, measure, measure_watched
from benchmarks.laws import LAWS
from benchmarks.records import write_records
from benchmarks.scenarios import SCENARIOS

NUM_PROCESSES = 2

COLUMNS = {
    "offline_tokens_per_s": ("served/s", ",.0f"),
    "offline_computed_tokens_per_s": ("computed/s", ",.0f"),
    "offline_rows_per_s": ("rows/s", ".2f"),
    "prefix_hit_rate": ("hit rate", ".3f"),
    "ttft_p50_s": ("TTFT p50 s", ".3f"),
    "ttft_p99_s": ("TTFT p99 s", ".3f"),
    "slo_ttft": ("TTFT met", ".4f"),
    "slo_tpot": ("TPOT met", ".4f"),
    "slo_deadline": ("deadline met", ".4f"),
    "online_longest_wait_s": ("longest wait online s", ".2f"),
    "offline_longest_wait_s": ("offline s", ".0f"),
    "plan_ms": ("schedule() ms", ".2f"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of one process: every configuration of one seed and KV size.

    If `is_watched`, the steps of the ladder record their series.
    """

    scenario_name: str
    law: str
    blocks: int
    seed: int
    configs: Sequence[Config]
    is_watched: bool = False


def main() -> int:
    """Run, print and save."""
    options = _parser().parse_args()
    chosen = [c for c in configs(options.scenario) if _is_wanted(c.name, options.only)]
    sizes = options.blocks or SCENARIOS[options.scenario][1]
    cells = [
        Cell(
            options.scenario,
            options.law,
            blocks,
            seed,
            chosen,
            is_watched=options.json is not None and seed == options.seeds[0],
        )
        for seed in options.seeds
        for blocks in sizes
    ]
    records, series = _run_all(cells)
    if options.json is not None:
        write_records(options.json, records)
        write_records(series_path(options.json), series)
    for blocks in sizes:
        of_size = [record for record in records if record["blocks"] == blocks]
        _print_size(options.scenario, options.law, blocks, of_size)
    return 0


def series_path(path: Path) -> Path:
    """Where the series beside a file of records stand."""
    return path.with_name(f"{path.stem}-series.jsonl")


def run_cell(cell: Cell) -> tuple[list[Record], list[Record]]:
    """The records of one cell, in the order of its configurations, and those of its series."""
    scenario = SCENARIOS[cell.scenario_name][0]()
    records: list[Record] = []
    series: list[Record] = []
    for config in cell.configs:
        trial = Trial(scenario, cell.law, config, cell.seed, cell.blocks)
        if cell.is_watched and config.name in LADDER:
            record, columns = measure_watched(trial)
            series.append(columns)
        else:
            record = measure(trial)
        records.append(record)
    return records, series


def _run_all(cells: Sequence[Cell]) -> tuple[list[Record], list[Record]]:
    """In two processes; a cell's records come together, cells in their order."""
    records: list[Record] = []
    series: list[Record] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(NUM_PROCESSES, len(cells))) as pool:
        for cell, done in zip(cells, pool.imap(run_cell, cells), strict=True):
            print(f"seed {cell.seed}, {cell.blocks} blocks: done", file=sys.stderr, flush=True)
            records += done[0]
            series += done[1]
    return records, series


def _is_wanted(name: str, patterns: Sequence[str] | None) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _print_size(scenario_name: str, law: str, blocks: int, records: Sequence[Record]) -> None:
    means = means_of(records)
    num_seeds = len({record["seed"] for record in records})
    print(f"\n{scenario_name}, law {law}, {blocks:,} blocks, means of {num_seeds} seeds\n")
    for line in _table(means):
        print(line)
    print()
    for bar in judge(scenario_name, law, blocks, means):
        print(f"- {bar}")


def _table(means: dict[str, dict[str, float]]) -> Iterator[str]:
    yield f"| | {' | '.join(title for title, _ in COLUMNS.values())} |"
    yield f"|---|{'---:|' * len(COLUMNS)}"
    for name, figures in means.items():
        texts = [
            format(figures[key], form) if key in figures else "-"
            for key, (_, form) in COLUMNS.items()
        ]
        yield f"| {name} | {' | '.join(texts)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenario", choices=SCENARIOS, default="a100-8b")
    parser.add_argument("--law", choices=LAWS, default="a100")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--blocks", type=int, nargs="+", help="KV sizes; by default the scenario's")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="configurations, by name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
