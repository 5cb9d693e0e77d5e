"""Does the number of engines that the planner finds on one draw of a traffic hold on another?

    python -m benchmarks.plan_trials [--seeds N ...] [--traffic NAME ...] [--data FOLDER]
        [--json FILE]

The planner sees the first of two draws only, as a trace. The number that it finds is judged on the
peak of the second: alone, and beside the job. What the trace as given needs, which a planner with
one draw would have said, is judged too.

`azure` deals the minutes of the recorded hour, three of ten calls: of each two neighbours one goes
to each draw, by lot. `servegen` draws an hour of ServeGen's clients twice, with their gaps (Gamma
and Weibull) and log-normal lengths. Engines are a card with a quarter of an A100's bytes and flops
a second, so that several are needed. Peak, target and draws are the defaults of `batchrun plan`.
How many engines would have been enough is asked of the second draw, alone and beside the job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import JobShape, JobTerms, OfflineJob, job_of_shape
from batchrun.simulator.planner.capacity import PlanRequest, peak_loads
from batchrun.simulator.planner.fleet import Attainment, attainment, beside_jobs, size_fleet
from batchrun.simulator.planner.kinds import EngineKind, SloTarget
from batchrun.simulator.planner.peak import PEAK_S, PeakLoad, peak_load
from batchrun.simulator.traces.reading import Drawing, read_trace
from batchrun.simulator.traces.trace import Trace, scale_rate
from batchrun.simulator.virtual.setup import A100Law, EngineShape
from benchmarks.forecast import AZURE, DATA, DAY_S, SERVEGEN
from benchmarks.records import Bar, Record, finish, grouped, parser, shown

SLO = SloTarget(ttft_s=3.0, tpot_s=0.15)
MINUTE_S = 60.0
MOST_OVER = 1.15
"""So many times the engines that would have been enough are not too many, nor is one more."""
SETTINGS = {"slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}}
LAW = A100Law(flop_per_s=55e12, bytes_per_s=0.35e12)
SHAPE = EngineShape(num_blocks=2_700, max_num_seqs=32)
KIND = EngineKind("small", EnginePlan(SHAPE, settings=SETTINGS, law=LAW))
JOB = JobShape(1_000, (1_000, 4_000), (2, 8), (15, 60), (16, 128))
EVENING_S, HOUR_S, SERVEGEN_RATE = DAY_S + 70_000.0, 3_600.0, 0.003


def main() -> int:
    """Run the pairs, print and save them; exit code 1 when too few numbers hold."""
    defaults = {"seeds": tuple(range(100, 120)), "traffic": ("azure", "servegen"), "data": DATA}
    options = parser(__doc__, **defaults).parse_args()
    records = shown(
        trial(name, seed, options.data) for name in options.traffic for seed in options.seeds
    )
    return finish(options.json, records, bars(records))


def trial(traffic: str, seed: int, data: Path) -> Record:
    """One pair of draws."""
    begin_s = time.process_time()
    first, second = (dealt if traffic == "azure" else drawn)(data, seed)
    loads = list(peak_loads(PlanRequest(first, [KIND], SLO, seed=seed)))
    jobs = [replace(job_of_shape("job", JOB, seed, JobTerms()), context_tokens=32_768)]
    alone = size_fleet(loads, KIND, SLO, 64)
    fleet = beside_jobs(alone, loads, jobs, SLO)
    num, given = fleet.num_engines, fleet.num_as_given
    assert num is not None and given is not None and alone.num_engines is not None
    planned_s = time.process_time() - begin_s
    other = peak_load(second, PEAK_S, SLO)
    before, calls, beside = (
        judged(other, each, work) for each, work in ((given, []), (num, []), (num, jobs))
    )
    return {
        "traffic": traffic,
        "seed": seed,
        "num_calls": loads[0].num_judged,
        "num_calls_other": other.num_judged,
        "as_given": given,
        "found": num,
        "enough": enough(other, jobs, num) if beside.holds(SLO) else None,
        "for_calls": alone.num_engines,
        "is_kept_beside_jobs": bool(fleet.is_beside_kept),
        "as_given_holds": before.holds(SLO),
        "holds": calls.holds(SLO),
        "holds_beside_jobs": beside.holds(SLO),
        "ttft_kept": calls.ttft_share,
        "tpot_kept": calls.tpot_share,
        "ttft_kept_beside_jobs": beside.ttft_share,
        "tpot_kept_beside_jobs": beside.tpot_share,
        "planning_cpu_s": planned_s,
        "cpu_s": time.process_time() - begin_s,
    }


def judged(load: PeakLoad, num_engines: int, jobs: Sequence[OfflineJob]) -> Attainment:
    """What so many engines give to the peak of the other draw."""
    return attainment(load, KIND, num_engines, SLO, jobs)


def enough(load: PeakLoad, jobs: Sequence[OfflineJob], held: int) -> int:
    """The smallest number that holds alone and beside the jobs, where `held` does."""
    num = held
    while num > 1 and all(judged(load, num - 1, work).holds(SLO) for work in ([], jobs)):
        num -= 1
    return num


def dealt(data: Path, seed: int) -> tuple[Trace, Trace]:
    """Azure's minutes, dealt to two traces of half an hour."""
    trace = scale_rate(read_trace(data / AZURE), 0.3, seed=0)
    minute = (trace.arrival_s // MINUTE_S).astype(np.int64)
    num = int(minute[-1]) // 2
    is_second = np.random.default_rng(seed).integers(2, size=num + 1)
    hands = (minute + is_second[minute // 2]) % 2

    def hand(number: int) -> Trace:
        chosen = np.flatnonzero((hands == number) & (minute < 2 * num))
        at_s = trace.arrival_s[chosen] % MINUTE_S + MINUTE_S * (minute[chosen] // 2)
        return replace(trace.take(chosen), arrival_s=at_s, duration_s=num * MINUTE_S)

    return hand(0), hand(1)


def drawn(data: Path, seed: int) -> tuple[Trace, Trace]:
    """An evening hour of ServeGen's clients, drawn twice."""
    first, second = (
        Drawing(2 * seed + each, SERVEGEN_RATE, EVENING_S, EVENING_S + HOUR_S) for each in (0, 1)
    )
    return read_trace(data / SERVEGEN, drawing=first), read_trace(data / SERVEGEN, drawing=second)


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """19 of 20 numbers hold on the other draw, all beside the jobs, and none is much too large."""
    for (name,), of in grouped(records, "traffic").items():
        bounds = {"as_given_holds": None, "holds": 0.95, "is_kept_beside_jobs": 1.0}
        for key, bound in {**bounds, "holds_beside_jobs": 1.0}.items():
            yield Bar(f"{name}: {key}", sum(r[key] for r in of) / len(of), bound)
        too_many = [
            r["found"] - max(r["enough"] + 1, math.floor(MOST_OVER * r["enough"]))
            for r in of
            if r["enough"] is not None
        ]
        yield Bar(f"{name}: engines too many", max(too_many, default=0), 0, is_most=True)


if __name__ == "__main__":
    raise SystemExit(main())
