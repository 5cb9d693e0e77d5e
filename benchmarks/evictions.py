"""Which order of eviction serves the most rows, in each kind of stream?

    python -m benchmarks.evictions [--streams NAME ...] [--seeds N ...] [--blocks N ...]
                                   [--window-s N] [--json FILE]

`echo` on the virtual engine, cold, with everything but the order alike. Rows come as the pool
orders them, as they stand in a shuffled input with hints of all that is to come, or as flex calls,
of which no hint tells. A window is measured, or a planned run of `many-jobs` to its end. No order
that ships may serve over 2 % less than `lru`, in the mean over the seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from benchmarks.ablation import Trial, measure
from benchmarks.ablation_configs import EVICTIONS, SERVED, SHIPPED_EVICTION, Config, means_of
from benchmarks.records import Bar, Record, finish, grouped, parser, shown
from benchmarks.scenarios import SCENARIOS

LRU = EVICTIONS[0]
LEAST = 0.98
PLANNED = Config("planned")
UNSORTED = Config("unsorted", is_planned=False)
FLEX = Config("flex", is_planned=False, is_flex=True)
STREAMS = {
    "planned": ("a100-8b", PLANNED),
    "unsorted": ("a100-8b", UNSORTED),
    "flex": ("a100-8b", FLEX),
    "many-jobs": ("many-jobs", PLANNED),
    "many-jobs-unsorted": ("many-jobs", UNSORTED),
    "agents": ("agents", PLANNED),
    "agents-flex": ("agents", FLEX),
}


def main() -> int:
    """Measure, print, save; exit code 1 when an order falls short."""
    made = parser(__doc__, seeds=(0, 1, 100, 101), blocks=(8600, 4300), window_s=120.0)
    made.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    options = made.parse_args()
    cases = product(options.streams, options.blocks, options.seeds, EVICTIONS)
    records = shown(_measured(*case, options.window_s) for case in cases)
    return finish(options.json, records, bars(records))


def _measured(stream: str, blocks: int, seed: int, eviction: str, window_s: float) -> Record:
    name, config = STREAMS[stream]
    scenario = SCENARIOS[name]
    if not (scenario.is_to_end and config.is_planned):
        scenario = replace(scenario, duration_s=window_s, is_to_end=False)
    config = replace(config, name=f"{stream}/{eviction}", eviction=eviction)
    return {"stream": stream, **measure(Trial(scenario, "a100", config, seed, blocks, 0.0))}


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """Of each stream and size what each order serves by what `lru` does, over the same seeds."""
    for (stream, blocks), cell in grouped(records, "stream", "blocks").items():
        means = means_of(cell, "eviction")
        for order in EVICTIONS[1:]:
            least = LEAST if order == SHIPPED_EVICTION else None
            ratio = means[order][SERVED] / means[LRU][SERVED]
            yield Bar(f"{stream}, {blocks} blocks: {order} / lru", ratio, least)


if __name__ == "__main__":
    raise SystemExit(main())
