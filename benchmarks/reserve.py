"""Is a reserve of KV for online bursts worth its blocks?

    python -m benchmarks.reserve [--scenarios NAME ...] [--reserves NAME ...] [--seeds N ...]
                                 [--data FOLDER] [--json FILE]

Runs `echo` with no reserve, with constant ones and with every forecast rule, in scenarios whose
calls come in bursts. `servegen` has arrivals drawn from ServeGen's rates, with lengths of the Azure
conversation trace; FOLDER holds the public files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from batchrun.estimator.forecast import ForecastRule
from batchrun.simulator.traces.reading import Drawing, read_trace
from benchmarks.ablation import Trial, measure
from benchmarks.ablation_configs import Config, means_of
from benchmarks.forecast import AZURE, DATA, DAY_S, SERVEGEN
from benchmarks.records import Record, finish, grouped, markdown, parser, shown
from benchmarks.scenarios import SCENARIOS, CallTable, Scenario

CONSTANT_RESERVES = (0.0, 0.1, 0.2, 0.3)
BLOCKS = (4300, 3200)
SERVEGEN_RATE = 0.002
"""Of ServeGen's calls one in 500: 2.4 a second on average."""
SERVEGEN_S = 7_200.0
COLUMNS = ("slo_ttft", "slo_deadline", "ttft_p99_s", "online_preemptions", "offline_tokens_per_s")


def servegen(folder: Path) -> Scenario:
    """Two hours of ServeGen, from the second evening at eight on; each seed begins elsewhere."""
    from_s = DAY_S + 20 * 3600
    drawing = Drawing(
        seed=0,
        rate=SERVEGEN_RATE,
        from_s=from_s,
        to_s=from_s + SERVEGEN_S,
        like=read_trace(folder / AZURE),
    )
    trace = read_trace(folder / SERVEGEN, drawing=drawing)
    calls = CallTable(
        trace.arrival_s.tolist(),
        trace.num_prompt_tokens.tolist(),
        trace.num_output_tokens.tolist(),
        SERVEGEN_S,
    )
    return Scenario("servegen", 180.0, calls)


CONFIGS = {
    str(reserve): Config(str(reserve), reserve=reserve)
    for reserve in (*CONSTANT_RESERVES, *ForecastRule)
}
"""`echo` with every reserve."""


def trials(
    names: Sequence[str], reserves: Sequence[str], seeds: Sequence[int], folder: Path
) -> Iterator[Trial]:
    """All runs; those of one warm-up follow one another."""
    for name in names:
        scenario = servegen(folder) if name == "servegen" else SCENARIOS[name]
        for blocks in BLOCKS:
            for seed in seeds:
                for reserve in reserves:
                    yield Trial(scenario, "a100", CONFIGS[reserve], seed, blocks)


def table(records: Sequence[Record]) -> str:
    """The means over the seeds, by scenario and blocks."""
    rows = [
        [f"{scenario}, {blocks:,}", config, *map(means.get, COLUMNS)]
        for (scenario, blocks), of in grouped(records, "scenario", "blocks").items()
        for config, means in means_of(of).items()
    ]
    return markdown(["scenario, blocks", "reserve", *COLUMNS], rows)


def main() -> int:
    """Measure, print, save."""
    names = ("servegen", "kv-pressure", "heavy-tail-1", "shared-prompts-2000")
    made = parser(__doc__, scenarios=names, seeds=(0, 1), data=DATA)
    made.add_argument("--reserves", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    options = made.parse_args()
    plan = trials(options.scenarios, options.reserves, options.seeds, options.data)
    records = shown(measure(trial) for trial in plan)
    print(table(records))
    return finish(options.json, records)


if __name__ == "__main__":
    raise SystemExit(main())
