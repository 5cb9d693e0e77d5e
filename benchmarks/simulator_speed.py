"""How fast the simulator is, what a day in short says of the whole day, and how long a plan takes.

    python -m benchmarks.simulator_speed [--seconds N] [--json FILE]
    python -m benchmarks.simulator_speed --windows 24 [--stepped] [--json FILE]
    python -m benchmarks.simulator_speed --plan [--json FILE]

Scenario a100-8b with the shipped scheduler class, on one core, in CPU seconds of this process. The
first form runs it with and without offline work. `--windows` runs a day, in which the load swings
once up and down, as that many windows of 5 minutes, and `--stepped` steps through the whole day
too, which takes hours, and compares. `--plan` times `batchrun plan` for a day of 29 million calls
whose busiest hour needs 64 engines.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from batchrun.simulator.offline_jobs import JobShape, JobTerms, OfflineJob, job_of_shape
from batchrun.simulator.online import Calls, windows_of
from batchrun.simulator.records import Tables
from batchrun.simulator.simulation import Simulated, SimulationPlan, simulate
from benchmarks.records import Bar, Record, Spent, finish, parser, peak_bytes, shown
from benchmarks.scenarios import CHATS

DAY_S = 86_400.0
WINDOW_S = 300.0
DOCUMENTS_PER_S = 0.8
"""More than an engine can read."""
SEED = 0
ONE_TIDE = replace(CHATS, swing_s=DAY_S / math.tau)
"""Once up and down a day, in the place of every six minutes."""
MEAN_PER_S, SWING_PER_S = 340.0, 255.0
HOUR_S, NUM_HOURS, BUSIEST_HOUR = 3_600, 24, 15
LENGTHS = "1.3,400,1.0,150,0.8"
RATES = "time_s,rate_per_s,cv,prompt_median_tokens,prompt_sigma,output_median_tokens,output_sigma\n"


def main() -> int:
    """Run, print and save."""
    defaults = {"seconds": 600.0, "windows": 0, "stepped": False, "plan": False}
    options = parser(__doc__, **defaults).parse_args()
    if options.plan:
        records = shown([planned()])
    elif options.windows:
        records = shown(day(options.windows, is_stepped=options.stepped))
    else:
        records = shown(speeds(options.seconds))
    return finish(options.json, records, bars({record["name"]: record for record in records}))


def speeds(seconds: float) -> Iterator[Record]:
    """With offline work, and without."""
    calls = Calls.of(CHATS.draw(seconds, SEED))
    yield measured("mixed", SimulationPlan(seconds, calls, [_job(seconds)]))
    yield measured("online-only", SimulationPlan(seconds, calls))


def day(num_windows: int, *, is_stepped: bool) -> Iterator[Record]:
    """The day in windows, and wholly if asked."""
    calls = Calls.of(ONE_TIDE.draw(DAY_S, SEED))
    short_s = num_windows * WINDOW_S
    parts = windows_of(calls, DAY_S, num_windows, WINDOW_S, SEED)
    yield measured("windows", SimulationPlan(short_s, parts, [_job(short_s)]), grows=True)
    if is_stepped:
        yield measured("stepped", SimulationPlan(DAY_S, calls, [_job(DAY_S)]))


def planned() -> Record:
    """The plan of a large fleet by the command that a user gives."""
    with tempfile.TemporaryDirectory() as folder, Spent() as spent:
        trace = Path(folder) / "day.csv"
        trace.write_text(RATES + "".join(_hour(number) for number in range(NUM_HOURS)))
        command = [sys.executable, "-m", "batchrun", "plan", "--json", "--trace", str(trace)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    plan = json.loads(printed)
    return {
        "name": "plan",
        "engines": plan["chosen"]["num_engines"],
        "wall_s": spent.wall_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10,
    }


def _hour(number: int) -> str:
    swing = math.cos(math.tau * (number - BUSIEST_HOUR) / NUM_HOURS)
    return f"{number * HOUR_S},{MEAN_PER_S + SWING_PER_S * swing:.2f},{LENGTHS}\n"


def bars(records: dict[str, Record]) -> Iterator[Bar]:
    """What the runs, by name, must reach."""
    for name, title, bound in (
        ("mixed", "with offline work", 12),
        ("online-only", "online only", 60),
    ):
        if name in records:
            yield Bar(f"times real time, {title}", records[name]["times_real_time"], bound)
    if plan := records.get("plan"):
        yield Bar("engines planned", plan["engines"], 64)
        yield Bar("seconds for the plan", plan["wall_s"], 600, is_most=True)
    if short := records.get("windows"):
        yield Bar("seconds for the windows", short["wall_s"], 900, is_most=True)
        growth = short["memory_growth"]
        yield Bar("memory at the end / at half time", growth, 1.1, is_most=True)
        if whole := records.get("stepped"):
            for name, most in (("served_tokens_per_s", 0.05), ("ttft_p99_s", 0.15)):
                error = abs(short[name] / whole[name] - 1)
                yield Bar(f"error of {name}", error, most, is_most=True)


def measured(name: str, plan: SimulationPlan, *, grows: bool = False) -> Record:
    """The figures of the plan, and what they took. With `grows` half of it is run before."""
    half_bytes = 0
    if grows:
        _run(replace(plan, duration_s=plan.duration_s / 2))
        half_bytes = peak_bytes()
    with Spent() as spent:
        figures = _run(plan)
    return {
        "name": name,
        "virtual_s": plan.duration_s,
        "cpu_s": spent.cpu_s,
        "wall_s": spent.wall_s,
        "times_real_time": plan.duration_s / spent.cpu_s,
        "peak_mib": peak_bytes() / 2**20,
        "memory_growth": peak_bytes() / half_bytes if grows else None,
        "steps": figures.num_steps,
        "quick_steps": figures.num_quick_steps,
        "served_tokens_per_s": figures.offline.served_tokens_per_s,
        "computed_tokens_per_s": figures.offline.computed_tokens_per_s,
        "hit_rate": figures.offline.hit_rate,
        "ttft_p50_s": figures.online.ttft_p50_s,
        "ttft_p99_s": figures.online.ttft_p99_s,
        "tpot_p50_s": figures.online.tpot_p50_s,
        "tpot_p99_s": figures.online.tpot_p99_s,
    }


def _run(plan: SimulationPlan) -> Simulated:
    with tempfile.TemporaryDirectory() as folder, Tables(Path(folder)) as tables:
        return simulate(plan, tables)


def _job(seconds: float) -> OfflineJob:
    num_documents = max(120, round(seconds * DOCUMENTS_PER_S))
    return job_of_shape("docs", replace(JobShape(), num_documents=num_documents), SEED, JobTerms())


if __name__ == "__main__":
    raise SystemExit(main())
