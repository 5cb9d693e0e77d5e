"""How good an order is: prefix hit rates on the virtual engine against the best possible.

    python -m benchmarks.hit_rates [--quick] [--seed N] [--processes N] [--json FILE]

Jobs shaped like four data sets, each alone and all four at once, through batchrun's scheduler from
their first row to their last: in batchrun's order, and in orders that others use. The hit rate is
that of first admissions; the optimum is the most that any order and any eviction can have with that
cache (`benchmarks.optimal_hits`). Online calls, where there are some, are those of the scenario
`a100-8b`. Engines start with observed step times, as after `batchrun calibrate`. See
`docs/hit-rates.md`.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from batchrun.pool.expected_hits import RowWalk, expected_hits
from batchrun.pool.prefix_keys import ChainBuilder
from batchrun.pool.prompt_study import Cuts, PromptTree, servable_tokens
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.online import Calls, OnlineCall
from batchrun.simulator.simulation import Simulation, SimulationPlan
from batchrun.simulator.virtual.engine import RequestRecord
from batchrun.simulator.virtual.setup import A100Law, EngineShape
from benchmarks.ablation_runs import figures_of
from benchmarks.hit_orders import (
    BASELINES,
    BLOCK_TOKENS,
    OURS,
    Setting,
    hit_blocks_in_turn,
    planned,
    pool_job,
    row_blocks,
    shuffled,
)
from benchmarks.job_shapes import JOBS, joined, prompts_of
from benchmarks.optimal_hits import RowBlocks, most_hit_blocks
from benchmarks.records import Bar, finish, markdown, parser
from benchmarks.row_feeds import daemon_in_order, daemon_of
from benchmarks.scenarios import Job, Order, a100_8b, draw_calls, draw_job
from benchmarks.warm_up import WarmUp, observe

Record = dict[str, Any]

ALONE_BAR, ONLINE_BAR = 0.97, 0.95
"""Shares of the optimum."""


def main() -> int:
    """Measure, print, save."""
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="two jobs, one KV size")
    made.add_argument("--jobs", nargs="+", choices=JOBS, help="only these")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--processes", type=int, choices=(1, 2), default=1)
    options = made.parse_args()
    chosen = options.jobs or (QUICK_JOBS if options.quick else tuple(JOBS))
    wanted = cases(chosen, options.seed, is_quick=options.quick)
    records: list[Record] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for number, record in enumerate(pool.imap(measure, wanted), start=1):
            records.append(record)
            name = ", ".join(str(record[key]) for key in ("job", "blocks", "order", "eviction"))
            note = f"{name}: {record['share_of_optimum']:.4f} of the optimum"
            print(f"{number} of {len(wanted)}: {note}", file=sys.stderr, flush=True)
    print(*tables(records), sep="\n")
    return finish(options.json, records, bars(records))


def tables(records: Sequence[Record]) -> Iterator[str]:
    """For each load, eviction and policy: hits as shares of the optimum, and how long jobs took."""
    setting = itemgetter("online", "eviction", "policy")
    for (online, eviction, policy), group in groupby(sorted(records, key=setting), key=setting):
        found = list(group)
        where = f"{policy}, eviction {eviction}{', beside online calls' if online else ''}"
        yield f"\nShare of the optimum, {where}\n\n{_table(found, 'share_of_optimum', '.4f')}"
        yield f"\nSeconds until the last row ended, {where}\n\n{_table(found, 'job_s', '.1f')}"


def _table(records: Sequence[Record], key: str, form: str) -> str:
    """A line for each job and KV size. A run that stalled has a star."""
    orders = list(dict.fromkeys(record["order"] for record in records))
    by_job: dict[tuple[str, int], dict[str, Record]] = {}
    for record in sorted(records, key=itemgetter("job", "blocks")):
        by_job.setdefault((record["job"], record["blocks"]), {})[record["order"]] = record
    rows = []
    for (job, blocks), found in by_job.items():
        optimum = next(iter(found.values()))["prefix_hit_optimum"]
        cells = [
            f"{row[key]:{form}}{'' if row['offline_rows'] == row['rows'] else '*'}"
            for row in (found[order] for order in orders)
        ]
        rows.append([job, blocks, f"{optimum:.4f}", *cells])
    return markdown(["job", "blocks", "optimum", *orders], rows)


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What our order must reach, alone and beside online calls."""
    for record in records:
        if (record["order"], record["eviction"]) == (OURS, SHIPPED):
            yield from _bars_of(record, records)


def _bars_of(ours: Record, records: Sequence[Record]) -> Iterator[Bar]:
    """Its share of the optimum, and how far its hit rate is above that of every other order."""
    where = f"{ours['job']}, {ours['blocks']} blocks{', online' if ours['online'] else ''}"
    bound = ONLINE_BAR if ours["online"] else ALONE_BAR
    yield Bar(f"{where}, by the optimum", ours["share_of_optimum"], bound)
    same = ("job", "blocks", "online", "seed")
    for other in records:
        if other["order"] in BASELINES and all(other[key] == ours[key] for key in same):
            name = f"{other['order']}, {other['eviction']}"
            points = 100 * (ours["prefix_hit_rate"] - other["prefix_hit_rate"])
            yield Bar(f"{where}, percentage points above {name}", points, 0.0)


KV_BLOCKS = (8600, 4300)
QUICK_JOBS = ("toolbench", "nextqa")
RIVALS = ("submission", "lexicographic", "lpm")
"""These also run with vLLM's own eviction, all but the first beside online calls."""
SHIPPED, LRU = "next-use", "lru"
LONGEST_S, STALLED_S, CHECK_S = 7_200.0, 60.0, 5.0
"""The clock ends a run there, or when no row has ended for so long; it looks every `CHECK_S`."""
WARM_UP_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `job` is a name of `JOBS`; `bs` takes rows as they come, as vLLM itself does."""

    job: str
    blocks: int
    order: str
    eviction: str = SHIPPED
    is_online: bool = False
    seed: int = 0
    policy: str = "echo"


def cases(jobs: Sequence[str], seed: int, *, is_quick: bool) -> list[Case]:
    """What a run of `benchmarks.hit_rates` measures."""
    sizes = KV_BLOCKS[1:] if is_quick else KV_BLOCKS
    settings = [
        (SHIPPED, False, (OURS, *(RIVALS if is_quick else BASELINES))),
        (LRU, False, (OURS, *RIVALS)),
        (SHIPPED, True, (OURS, *RIVALS[1:])),
    ]
    return [
        Case(job, blocks, order, eviction, is_online, seed)
        for blocks in sizes
        for job in jobs
        for eviction, is_online, orders in settings
        for order in orders
    ] + [
        Case(job, blocks, "shuffled", LRU, seed=seed, policy="bs")
        for blocks in sizes
        for job in jobs
    ]


def measure(case: Case) -> Record:
    """A flat record: what was run, the hit rate, the optimum, and the engine's other figures.

    `expected_hit_rate` is what `batchrun inspect` says of the order; a policy that chooses among
    waiting rows may exceed it.
    `in_turn_share_of_optimum` is the order's with rows one at a time (`benchmarks.hit_orders`).
    `job_s` is when the last row ended; a run that stalls has fewer `offline_rows` than `rows`.
    """
    jobs = _jobs(case.job, case.seed)
    job, feed = _ordered(case, jobs)
    simulation, job_s = _run(case, feed, len(job.rows))
    prompt_tokens = sum(job.num_prompt_tokens(row) for row in job.rows)
    best_tokens = most_hit_blocks(_row_blocks(case.job, case.seed), case.blocks) * BLOCK_TOKENS
    in_turn_tokens = hit_blocks_in_turn(row_blocks(job), case.blocks) * BLOCK_TOKENS
    hit_tokens = simulation.watch.offline.hit_tokens
    return {
        "job": case.job,
        "blocks": case.blocks,
        "order": case.order,
        "eviction": case.eviction,
        "policy": case.policy,
        "online": case.is_online,
        "seed": case.seed,
        "rows": len(job.rows),
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "prefix_hit_optimum": best_tokens / prompt_tokens,
        "share_of_optimum": hit_tokens / best_tokens,
        "in_turn_share_of_optimum": in_turn_tokens / best_tokens,
        "expected_hit_rate": None if case.is_online else expected_rate(case, job),
        "job_s": job_s,
        **figures_of(simulation),
        "prefix_hit_rate": hit_tokens / prompt_tokens,
    }


def expected_rate(case: Case, job: Job) -> float:
    """What `inspect` says of these rows in this order; both know the same tokens."""
    # A token id of four bytes stands for a token's text.
    texts = [prompt.astype("<u4").tobytes() for prompt in prompts_of(job)]
    cuts = Cuts()
    chains = ChainBuilder(0, cuts)
    chains.add(texts)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    tree = PromptTree.of(chains.build(), cuts, lengths, np.arange(len(texts)))
    outputs = np.array([row.num_output_tokens for row in job.rows])
    order = np.argsort(tree.rows)
    own = tree.leaf_bytes / 4 + outputs[tree.rows]
    walk = RowWalk(tree.innermost[order], own[order], tree.nodes.parents, tree.node_bytes / 4)
    found = expected_hits(walk, case.blocks * BLOCK_TOKENS, drops_used=case.eviction != LRU)
    hits = servable_tokens(np.nan_to_num(found), lengths / 4, BLOCK_TOKENS)
    return float(hits.sum() / (lengths / 4).sum())


@lru_cache(maxsize=2)
def _jobs(name: str, seed: int) -> list[Job]:
    """The jobs that run together, their rows as they arrive."""
    return [draw_job(source, seed, Order.SHUFFLED) for source in JOBS[name]()]


@lru_cache(maxsize=2)
def _row_blocks(name: str, seed: int) -> RowBlocks:
    return row_blocks(joined(_jobs(name, seed)))


@lru_cache(maxsize=1)
def _warm_up(blocks: int, seed: int) -> WarmUp:
    return observe(a100_8b(), seed, EngineShape(num_blocks=blocks), A100Law(), online_s=WARM_UP_S)


def _ordered(case: Case, jobs: Sequence[Job]) -> tuple[Job, RowFeed]:
    """The rows in the order of the case, and the daemon that sends them so."""
    if case.order == OURS:
        return planned(jobs).job, daemon_of([pool_job(job) for job in jobs])
    setting = Setting(case.seed, case.blocks)
    job = BASELINES[case.order](shuffled(joined(jobs), setting), setting)
    return job, daemon_in_order(job)


def _run(case: Case, feed: RowFeed, num_rows: int) -> tuple[Simulation, float]:
    """The simulation after the last row, and when that ended."""
    warm_up = _warm_up(case.blocks, case.seed)
    calls: Sequence[OnlineCall] = []
    if case.is_online:
        calls = draw_calls(replace(a100_8b(), duration_s=LONGEST_S), case.seed)
    else:
        warm_up = warm_up.without_online_use()
    engine = EnginePlan(EngineShape(case.blocks), case.policy, settings={"eviction": case.eviction})
    simulation = fed(engine, feed, calls, case.seed)
    warm_up.tell(simulation.engines.engines[0].scheduler)
    return simulation, run_to_end(simulation, num_rows)


def fed(
    engine: EnginePlan, feed: RowFeed, calls: Sequence[OnlineCall] = (), seed: int = 0
) -> Simulation:
    """One engine with the rows of `feed`, before its first step."""
    plan = SimulationPlan(math.inf, Calls.of(calls), engine=engine, seed=seed)
    return Simulation(plan, feed=feed)


def run_to_end(simulation: Simulation, num_rows: int) -> float:
    """Run until so many rows have ended, or the run stalls; the instant of the last end."""
    engines = simulation.engines
    (engine,) = engines.engines
    ends_s: list[float] = [0.0]

    def note(record: RequestRecord) -> None:
        if not record.is_online:
            ends_s.append(engine.now_s)

    engine.end_listeners.append(note)
    while len(ends_s) <= num_rows and engine.now_s < min(ends_s[-1] + STALLED_S, LONGEST_S):
        engines.run_until(engine.now_s + CHECK_S)
    return ends_s[-1]


if __name__ == "__main__":
    raise SystemExit(main())
