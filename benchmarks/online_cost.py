"""What offline work costs calls in time, and brings in tokens: the curve of the dial `online_cost`.

    python -m benchmarks.online_cost [--seeds N ...] [--blocks N ...] [--law NAME ...] [--json FILE]

In the scenario a100-8b, cold. Each cost is a ratio of means over the seeds: the calls beside
offline work over the same calls alone on stock vLLM, at p50 and at p99. All figures but `plan_ms`
repeat exactly.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Mapping

from benchmarks.ablation import Trial, measure
from benchmarks.ablation_configs import ATTAINMENTS, SERVED, STOCK, Config, means_of
from benchmarks.laws import LAWS
from benchmarks.records import Bar, finish, grouped, markdown, parser
from benchmarks.scenarios import SCENARIOS

SCENARIO = "a100-8b"
NUM_PROCESSES = 2
DIALS = (None, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0)
JUDGED = (1.1, 1.3, 2.0)
NOISY_POINTS = 0.05
"""So much more a cost may be where steps take a random time."""
LEAST_KEPT = 0.99
LEAST_SHARE = 0.85
"""Offline tokens at 1.3, of those at 2.0."""
ALONE = "online-only-2048"
PLACE = ("law", "blocks", "config", "seed")
LATENCIES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
COLUMNS = (SERVED, *(f"{name}_cost" for name in LATENCIES), *ATTAINMENTS, "plan_ms")

Means = Mapping[str, Mapping[str, float]]


def main() -> int:
    """Run, print, save; 1 when a bar is missed."""
    defaults = {"seeds": (0, 1, 2, 3, 4), "blocks": (8600, 4300), "law": ("a100", "noisy")}
    options = parser(__doc__, **defaults).parse_args()
    if not set(options.law) <= set(LAWS):
        raise SystemExit(f"--law: one of {', '.join(LAWS)}")
    configs = [
        Config(ALONE, STOCK, None, is_planned=False),
        *(Config(name_of(dial), online_cost=dial) for dial in DIALS),
    ]
    trials = [
        Trial(SCENARIOS[SCENARIO], law, config, seed, blocks, 0.0)
        for law in options.law
        for blocks in options.blocks
        for config in configs
        for seed in options.seeds
    ]
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        records = []
        for record in pool.imap(measure, trials):
            print(*(record[key] for key in PLACE), file=sys.stderr, flush=True)
            records.append(record)
    bars: list[Bar] = []
    for (law, blocks), of in grouped(records, "law", "blocks").items():
        means = with_costs(means_of(of))
        _print_part(law, blocks, len(options.seeds), means)
        bars += judge(law, blocks, means)
    return finish(options.json, records, bars)


def name_of(dial: float | None) -> str:
    """The name of the configuration with this dial."""
    return f"online_cost {'none' if dial is None else f'{dial:g}'}"


def with_costs(means: Means) -> dict[str, dict[str, float]]:
    """The means, with each latency over that of the calls alone."""
    alone = means[ALONE]
    return {
        config: {**row, **{f"{it}_cost": row[f"{it}_s"] / alone[f"{it}_s"] for it in LATENCIES}}
        for config, row in means.items()
    }


def judge(law: str, blocks: int, means: Means) -> Iterator[Bar]:
    """What the dial must keep, with `with_costs`."""
    room = NOISY_POINTS if law == "noisy" else 0.0
    prefix = f"{law}, {blocks:,} blocks"
    for dial in JUDGED:
        row = means[name_of(dial)]
        for name in LATENCIES:
            cost = row[f"{name}_cost"]
            yield Bar(f"{prefix}, {name_of(dial)}: {name}", cost, dial + room, is_most=True)
        for name in ATTAINMENTS:
            yield Bar(f"{prefix}, {name_of(dial)}: {name}", row[name], LEAST_KEPT)
    share = means[name_of(1.3)][SERVED] / means[name_of(2.0)][SERVED]
    yield Bar(f"{prefix}, offline tokens at 1.3 / at 2.0", share, LEAST_SHARE)


def _print_part(law: str, blocks: int, num_seeds: int, means: Means) -> None:
    print(f"\n{SCENARIO}, law {law}, {blocks:,} blocks, means of {num_seeds} seeds\n")
    rows: list[list[object]] = [[name, *map(row.get, COLUMNS)] for name, row in means.items()]
    print(markdown(["config", *COLUMNS], rows), end="\n\n")


if __name__ == "__main__":
    raise SystemExit(main())
