"""Do length buckets pay (Echo, section 6)? Jobs of unlike lengths to their end, in other orders.

    python -m benchmarks.buckets [--jobs NAME ...] [--laws NAME ...] [--seeds N ...] [--json FILE]

Prefix groups stay whole. `planned` is the order that ships; `sorted` has the groups by the median
length of their rows, the shortest first, as with buckets without number; `longest-first` likewise,
from the other end: its batches are as regular, but it ends with other rows. `buckets-8` keeps the
planned order within eight buckets that are geometric in length. Every job runs beside the calls of
`a100-8b` and alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from batchrun.pool.prefix_groups import group_rows
from batchrun.pool.prefix_keys import IntArray
from batchrun.pool.radix_tree import build_radix_tree
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import JobShape, LogNormalTokens, in_order
from batchrun.simulator.online import Calls
from batchrun.simulator.simulation import Simulation, SimulationPlan, own_heap
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.ablation import figures_of, run_to_end
from benchmarks.job_shapes import joined, picked
from benchmarks.laws import LAWS
from benchmarks.records import Bar, Record, finish, parser, shown
from benchmarks.row_feeds import DrawnJob, daemon_of, drawn_job
from benchmarks.scenarios import CHATS, FOUR_JOBS, JOB_SEEDS, LONGEST_S, Job, Order, draw_job

ANSWERS = LogNormalTokens(4.5, 0.8, (4, 600))
JOBS: Mapping[str, Sequence[JobShape]] = {
    "lone": [JobShape(700, LogNormalTokens(6.0, 1.5, (16, 30_000)), (1, 1), (1, 1), ANSWERS)],
    "documents": [
        JobShape(70, LogNormalTokens(8.0, 1.2, (200, 30_000)), (2, 10), (9, 60), ANSWERS)
    ],
    "two sizes": [
        JobShape(400, (150, 250), (1, 1), (1, 1), (150, 250)),
        JobShape(60, (8_000, 12_000), (1, 1), (1, 1), (150, 250)),
    ],
    "mixed": FOUR_JOBS,
}
"""Rows that share nothing, and documents, both of lengths from tens to 30,000 tokens; rows of two
sizes with long answers; rows of four kinds in one job."""


def main() -> int:
    """Measure, print, save."""
    made = parser(__doc__, seeds=(0, 1, 100, 101), blocks=8600)
    made.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    made.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    options = made.parse_args()
    cases = product(options.jobs, options.seeds, options.laws, (True, False), ORDERS)
    records = shown(measure(Case(*case, options.blocks)) for case in cases)
    return finish(options.json, records, bars(records))


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    job: str
    seed: int
    law: str
    online: bool
    order: str
    blocks: int


def measure(case: Case) -> Record:
    """A flat record; `job_s` is when the last row ended."""
    with own_heap():
        return _measured(case)


def _measured(case: Case) -> Record:
    """A call of its own, so that nobody holds the engine once it returns."""
    plan = _planned(case.job, case.seed)
    feed = daemon_of([in_order(plan, ORDERS[case.order](plan))])
    calls = Calls.of(CHATS.draw(LONGEST_S, case.seed) if case.online else [])
    engine = EnginePlan(EngineShape(case.blocks), law=LAWS[case.law](case.seed))
    simulation = Simulation(SimulationPlan(LONGEST_S, calls, engine=engine), feed=feed)
    run_to_end(simulation, LONGEST_S)
    job_s = feed.jobs[0].finished_at_s
    return {**asdict(case), "job_s": job_s, **figures_of(simulation)}


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """How much sooner the other orders end, least and mean over the seeds."""
    found: dict[tuple[object, ...], dict[tuple[str, int], float]] = {}
    for each in records:
        case = each["job"], each["law"], each["online"]
        found.setdefault(case, {})[each["order"], each["seed"]] = each["job_s"]
    for (job, law, online), ends in found.items():
        seeds = sorted({seed for _, seed in ends})
        for order in list(ORDERS)[1:]:
            sooner = [ends[PLANNED, seed] / ends[order, seed] - 1 for seed in seeds]
            where = f"{job}, {law}{', online' if online else ''}: {order} ends sooner by (share)"
            yield Bar(f"{where}, least", min(sooner))
            yield Bar(f"{where}, mean", float(np.mean(sooner)))


PLANNED = "planned"
NUM_BUCKETS = 8


def by_length(job: DrawnJob, num_buckets: int | None = None, *, descends: bool = False) -> IntArray:
    """The rows by the length of their prefix group, in so many buckets or strictly."""
    rows = job.order.rows
    groups = group_rows(job.order, build_radix_tree(job.order.shared_chunks), job.chains)
    medians = np.array([
        np.median(job.num_prompt_tokens[groups == group]) for group in range(groups.max() + 1)
    ])
    key = medians
    if num_buckets is not None:
        share = np.log(medians / medians.min()) / np.log(medians.max() / medians.min())
        key = np.minimum((share * num_buckets).astype(np.int64), num_buckets - 1)
    return rows[np.argsort((-key if descends else key)[groups[rows]], kind="stable")]


ORDERS: Mapping[str, Callable[[DrawnJob], IntArray]] = {
    PLANNED: lambda job: job.order.rows,
    f"buckets-{NUM_BUCKETS}": lambda job: by_length(job, NUM_BUCKETS),
    "sorted": by_length,
    "longest-first": lambda job: by_length(job, descends=True),
}


@lru_cache(maxsize=1)
def _planned(name: str, seed: int) -> DrawnJob:
    """One job of all the rows, shuffled in its input."""
    jobs = [
        draw_job(shape, seed + number * JOB_SEEDS, Order.SHUFFLED)
        for number, shape in enumerate(JOBS[name])
    ]
    together: Job = joined(jobs)
    shuffle = np.random.default_rng(seed).permutation(len(together.rows))
    return drawn_job(picked(together, shuffle))


if __name__ == "__main__":
    raise SystemExit(main())
