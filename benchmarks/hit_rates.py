"""How good an order is: prefix hit rates on the virtual engine against the best possible.

    python -m benchmarks.hit_rates [--jobs NAME ...] [--seed N] [--processes N] [--json FILE]

Jobs shaped like four data sets, each alone and all four at once, through batchrun's scheduler from
their first row to their last: in batchrun's order, and in orders that others use. The hit rate is
that of first admissions; the optimum is that of `benchmarks.hit_orders`. Online calls are those of
`a100-8b`. Engines start with observed step times, as after `batchrun calibrate`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from batchrun.pool.expected_hits import RowWalk, expected_hits
from batchrun.pool.prefix_keys import ChainBuilder
from batchrun.pool.prompt_study import Cuts, PromptTree, servable_tokens
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.online import Calls, OnlineCall
from batchrun.simulator.simulation import Simulation, SimulationPlan
from batchrun.simulator.virtual.setup import A100Law, EngineShape
from benchmarks.ablation import figures_of, run_to_end
from benchmarks.hit_orders import BASELINES, OURS, RowBlocks, most_hit_blocks, pool_job, shuffled
from benchmarks.job_shapes import JOBS, joined, picked, prompts_of
from benchmarks.records import Bar, Record, finish, parser, shown
from benchmarks.row_feeds import BLOCK_TOKENS, daemon_in_order, daemon_of
from benchmarks.scenarios import CHATS, LONGEST_S, Job, Order, a100_8b
from benchmarks.warm_up import WarmUp, observe

ALONE_BAR, ONLINE_BAR = 0.97, 0.95
"""Shares of the optimum."""


def main() -> int:
    """Measure, print, save."""
    made = parser(__doc__, seed=0, processes=1)
    made.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    options = made.parse_args()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        records = shown(pool.imap(measure, cases(options.jobs, options.seed)))
    return finish(options.json, records, bars(records))


def bars(records: Sequence[Record]) -> Iterator[Bar]:
    """What our order must reach, alone and beside online calls: a share of the optimum, and no less
    than any other order."""
    same = ("job", "blocks", "online", "seed")
    for ours in records:
        if (ours["order"], ours["eviction"]) != (OURS, SHIPPED):
            continue
        where = f"{ours['job']}, {ours['blocks']} blocks{', online' if ours['online'] else ''}"
        bound = ONLINE_BAR if ours["online"] else ALONE_BAR
        yield Bar(f"{where}, by the optimum", ours["share_of_optimum"], bound)
        for other in records:
            if other["order"] in BASELINES and all(other[key] == ours[key] for key in same):
                name = f"{other['order']}, {other['eviction']}"
                points = 100 * (ours["prefix_hit_rate"] - other["prefix_hit_rate"])
                yield Bar(f"{where}, percentage points above {name}", points, 0.0)


KV_BLOCKS = (8600, 4300)
RIVALS = ("submission", "lexicographic", "lpm")
"""These also run with vLLM's own eviction, all but the first beside online calls."""
SHIPPED, LRU = "next-use", "lru"
WARM_UP_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `job` is a name of `JOBS`; `bs` takes rows as they come, as vLLM itself does."""

    job: str
    blocks: int
    order: str
    eviction: str = SHIPPED
    online: bool = False
    seed: int = 0
    policy: str = "echo"


def cases(jobs: Sequence[str], seed: int) -> list[Case]:
    """What a run measures."""
    settings = [
        (SHIPPED, False, (OURS, *BASELINES), "echo"),
        (LRU, False, (OURS, *RIVALS), "echo"),
        (SHIPPED, True, (OURS, *RIVALS[1:]), "echo"),
        (LRU, False, ("shuffled",), "bs"),
    ]
    return [
        Case(job, blocks, order, eviction, online, seed, policy)
        for blocks in KV_BLOCKS
        for job in jobs
        for eviction, online, orders, policy in settings
        for order in orders
    ]


def measure(case: Case) -> Record:
    """A flat record: what was run, the hit rate, the optimum, and the engine's other figures.

    `expected_hit_rate` is what `batchrun inspect` says of one job in this order; a policy that
    chooses among waiting rows may exceed it. `job_s` is when the last row ended, or `LONGEST_S`.
    """
    jobs = _jobs(case.job, case.seed)
    job, feed = _ordered(case, jobs)
    simulation = _run(case, feed)
    prompt_tokens = sum(job.num_prompt_tokens(row) for row in job.rows)
    best_tokens = most_hit_blocks(_row_blocks(case.job, case.seed), case.blocks) * BLOCK_TOKENS
    hit_tokens = simulation.watch.offline.hit_tokens
    is_expected = len(jobs) == 1 and not case.online
    return {
        **asdict(case),
        "rows": len(job.rows),
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "prefix_hit_optimum": best_tokens / prompt_tokens,
        "share_of_optimum": hit_tokens / best_tokens,
        "expected_hit_rate": expected_rate(case, job) if is_expected else None,
        "job_s": max(each.finished_at_s or LONGEST_S for each in feed.jobs),
        **figures_of(simulation),
        "prefix_hit_rate": hit_tokens / prompt_tokens,
    }


def expected_rate(case: Case, job: Job) -> float:
    """What `inspect` says of these rows in this order; both know the same tokens."""
    # A token id of four bytes stands for a token's text.
    texts = [prompt.tobytes() for prompt in prompts_of(job)]
    cuts = Cuts()
    chains = ChainBuilder(0, cuts)
    chains.add(texts)
    lengths = np.array([len(text) for text in texts])
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
    return [source.draw(seed, Order.SHUFFLED) for source in JOBS[name]()]


@lru_cache(maxsize=2)
def _row_blocks(name: str, seed: int) -> RowBlocks:
    return RowBlocks.of_job(joined(_jobs(name, seed)))


@lru_cache(maxsize=1)
def _warm_up(blocks: int, seed: int) -> WarmUp:
    return observe(a100_8b(), seed, EngineShape(num_blocks=blocks), A100Law(), online_s=WARM_UP_S)


def _ordered(case: Case, jobs: Sequence[Job]) -> tuple[Job, RowFeed]:
    """The rows in the order of the case, those of several jobs one after the other, and the daemon
    that sends them so, the jobs in turn."""
    if case.order == OURS:
        plans = [pool_job(job) for job in jobs]
        pairs = zip(jobs, plans, strict=True)
        return joined([picked(job, plan.order.rows) for job, plan in pairs]), daemon_of(plans)
    setting = case.seed, case.blocks
    job = BASELINES[case.order](shuffled(joined(jobs), *setting), *setting)
    return job, daemon_in_order(job)


def _run(case: Case, feed: RowFeed) -> Simulation:
    """The simulation after the last row has ended."""
    warm_up = _warm_up(case.blocks, case.seed)
    calls: Sequence[OnlineCall] = []
    if case.online:
        calls = CHATS.draw(LONGEST_S, case.seed)
    else:
        warm_up = warm_up.without_online_use()
    engine = EnginePlan(EngineShape(case.blocks), case.policy, settings={"eviction": case.eviction})
    plan = SimulationPlan(LONGEST_S, Calls.of(calls), engine=engine, seed=case.seed)
    simulation = Simulation(plan, feed=feed)
    (ran,) = simulation.engines.engines
    warm_up.tell(ran.scheduler)
    run_to_end(simulation, LONGEST_S)
    return simulation


if __name__ == "__main__":
    raise SystemExit(main())
