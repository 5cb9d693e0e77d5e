"""How fast the simulator is, and what a day in short says of the whole day.

    python -m benchmarks.simulator_speed [--seconds N] [--json FILE]
    python -m benchmarks.simulator_speed --windows 24 [--hours 24] [--json FILE]
    python -m benchmarks.simulator_speed --windows 24 --stepped [--hours H] [--json FILE]

Scenario a100-8b with the shipped scheduler class, on one core, in CPU seconds of this process. The
first form runs it with and without offline work. `--windows` runs a day, in which the load swings
once up and down, as that many windows of 5 minutes, and `--stepped` steps through the same hours
wholly (a day takes hours) and compares. `--hours` of the day from its beginning: so much of it,
with its share of the windows.
"""

from __future__ import annotations

import math
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from batchrun.simulator.offline_jobs import JobShape, JobTerms, OfflineJob, job_of_shape
from batchrun.simulator.online import Calls, OnlineTraffic, windows_of
from batchrun.simulator.records import Tables
from batchrun.simulator.simulation import Simulated, SimulationPlan, simulate
from benchmarks.records import Bar, describe, finish, parser
from benchmarks.scenarios import Scenario, a100_8b, draw_calls

DAY_S = 86_400.0
HOURS = 24
WINDOW_S = 300.0
DOCUMENTS_PER_S = 0.8
"""More than an engine can read."""
SEED = 0

Record = dict[str, object]


def main() -> int:
    """Run, print and save."""
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=600.0)
    made.add_argument("--windows", type=int)
    made.add_argument("--hours", type=float, default=24.0)
    made.add_argument("--stepped", action="store_true")
    options = made.parse_args()
    if options.windows is None:
        records, bars = speeds(options.seconds)
    else:
        records, bars = day(options.hours, options.windows, is_stepped=options.stepped)
    return finish(options.json, records, bars)


def speeds(seconds: float) -> tuple[list[Record], list[Bar]]:
    """With offline work, and without."""
    scenario = replace(a100_8b(), duration_s=seconds)
    calls = Calls.of(draw_calls(scenario, SEED))
    mixed = measured("mixed", SimulationPlan(seconds, calls, [_job(seconds)]))
    alone = measured("online-only", SimulationPlan(seconds, calls))
    bars = [
        Bar("times real time, with offline work", _number(mixed, "times_real_time"), 12),
        Bar("times real time, online only", _number(alone, "times_real_time"), 60),
    ]
    return [mixed, alone], bars


def day(hours: float, num_windows: int, *, is_stepped: bool) -> tuple[list[Record], list[Bar]]:
    """The first hours of the day in windows, and wholly if asked."""
    duration_s = hours * DAY_S / HOURS
    calls = Calls.of(draw_calls(replace(_tide(), duration_s=duration_s), SEED))
    num = max(1, round(num_windows * hours / HOURS))
    short_s = num * WINDOW_S
    parts = windows_of(calls, duration_s, num, WINDOW_S, SEED)
    short = measured("windows", SimulationPlan(short_s, parts, [_job(short_s)]), grows=True)
    records = [short]
    limit_s = 900 * hours / HOURS
    bars = [
        Bar("seconds for the windows", _number(short, "wall_s"), limit_s, is_most=True),
        Bar("memory at the end / at half time", _number(short, "memory_growth"), 1.1, is_most=True),
    ]
    if is_stepped:
        whole = measured("stepped", SimulationPlan(duration_s, calls, [_job(duration_s)]))
        records.append(whole)
        for name, bound in (("served_tokens_per_s", 0.05), ("ttft_p99_s", 0.15)):
            error = abs(_number(short, name) / _number(whole, name) - 1)
            bars.append(Bar(f"error of {name}", error, bound, is_most=True))
    return records, bars


def measured(name: str, plan: SimulationPlan, *, grows: bool = False) -> Record:
    """The figures of the plan, and what they took. With `grows` half of it is run before."""
    half_kib = 0
    if grows:
        _run(replace(plan, duration_s=plan.duration_s / 2))
        half_kib = _peak_kib()
    begin_s, begin_wall_s = time.process_time(), time.perf_counter()
    figures = _run(plan)
    cpu_s, wall_s = time.process_time() - begin_s, time.perf_counter() - begin_wall_s
    record: Record = {
        "name": name,
        "virtual_s": plan.duration_s,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "times_real_time": plan.duration_s / cpu_s,
        "peak_mib": _peak_kib() / 1024,
        "memory_growth": _peak_kib() / half_kib if grows else math.nan,
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
    print(describe(record), flush=True)
    return {key: None if value is math.nan else value for key, value in record.items()}


def _run(plan: SimulationPlan) -> Simulated:
    with tempfile.TemporaryDirectory() as folder, Tables(Path(folder)) as tables:
        return simulate(plan, tables)


def _job(seconds: float) -> OfflineJob:
    num_documents = max(120, round(seconds * DOCUMENTS_PER_S))
    return job_of_shape("docs", replace(JobShape(), num_documents=num_documents), SEED, JobTerms())


def _tide() -> Scenario:
    """The reference scenario with one tide a day in the place of one every six minutes."""
    scenario = a100_8b()
    assert isinstance(scenario.online, OnlineTraffic)
    return replace(scenario, online=replace(scenario.online, swing_s=DAY_S / math.tau))


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _number(record: Record, name: str) -> float:
    value = record[name]
    assert isinstance(value, float)
    return value


if __name__ == "__main__":
    raise SystemExit(main())
