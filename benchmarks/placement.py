"""Rows of one job over several engines: when the job ends, against work over speed.

    python -m benchmarks.placement [--case NAME ...] [--seeds N ...] [--json FILE]

The shipped dispatch on the virtual clock. Jobs of two minutes and more ask questions about
documents of 10,000 to 32,000 tokens; engines have no profile, so their speeds have to be seen. The
bound is the time of one engine for the same job, over the sum of the speeds that were there.
"""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from batchrun.pool.prefix_keys import ChainTable
from batchrun.pool.radix_tree import order_by_prefix
from batchrun.routing.routers import DEFAULT_ROUTER
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.offline_jobs import OfflineJob, key_of, mixed
from batchrun.simulator.online import Calls
from batchrun.simulator.simulation import Simulation, SimulationPlan, own_heap
from batchrun.simulator.virtual.setup import A100Law
from benchmarks.laws import SlowedLaw
from benchmarks.records import Bar, Record, finish, grouped, markdown, parser

NUM_PROCESSES = 2
CHUNK_TOKENS = 64
DOCUMENT_TOKENS, QUESTIONS = (10_000, 32_000), (12, 24)
QUESTION_TOKENS, OUTPUT_TOKENS = (15, 60), (4, 32)
SYSTEM_TOKENS = 119
"""475 bytes; the first 256 of them are a chunk of their own."""
HOT_SHARE = 0.4
KILLED_AT = 0.4
MOST_LOSS = 0.03


@dataclass(frozen=True, slots=True)
class Case:
    """Documents beside a hot one, or behind a system prompt, on engines of these speeds."""

    num_documents: int
    speeds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    is_hot: bool = False
    is_killed: bool = False
    system_tokens: int = 0
    most: float | None = None
    """Makespan over the bound."""


CASES = {
    "hot-group": Case(120, is_hot=True, most=1.15),
    "unequal": Case(140, (1.0, 1.0, 0.35, 0.35), most=1.25),
    "engine-lost": Case(170, is_killed=True, most=1.2),
    "system-prompt": Case(200, system_tokens=SYSTEM_TOKENS),
}
PLAIN = Case(200)
"""What the system prompt is compared with."""


def main() -> int:
    """Run, print and save."""
    made = parser(__doc__, seeds=(0, 1, 2, 3, 4, 100, 101, 102, 103, 104))
    made.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    options = made.parse_args()
    trials = [(name, seed) for name in options.case for seed in options.seeds]
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        records = pool.starmap(trial, trials, chunksize=1)
    rows = [[record["case"], str(record["seed"]), *map(record.get, FIGURES)] for record in records]
    print(markdown(["case", "seed", *FIGURES], rows))
    return finish(options.json, records, _bars(records))


FIGURES = ("makespan_s", "bound_s", "of_bound", "computed", "loss")


def trial(name: str, seed: int) -> Record:
    """A flat record of one case on one seed."""
    case = CASES[name]
    job = job_of(case, seed)
    alone_s, alone_tokens = makespan(job, (1.0,), seed)
    bound_s = alone_s / sum(case.speeds)
    kill_at_s = KILLED_AT * bound_s if case.is_killed else math.inf
    if case.is_killed:
        rest_s = alone_s - kill_at_s * sum(case.speeds)
        bound_s = kill_at_s + rest_s / sum(case.speeds[:-1])
    taken_s, tokens = makespan(job, case.speeds, seed, kill_at_s)
    loss = None
    if case.system_tokens:
        plain = job_of(PLAIN, seed)
        plain_s = makespan(plain, case.speeds, seed)[0]
        served = [
            each.num_prompt_tokens.sum() + each.num_output_tokens.sum() for each in (job, plain)
        ]
        loss = 1 - float(served[0] / taken_s / (served[1] / plain_s))
    return {
        "case": name,
        "router": DEFAULT_ROUTER,
        "num_engines": len(case.speeds),
        "seed": seed,
        "makespan_s": taken_s,
        "bound_s": bound_s,
        "of_bound": taken_s / bound_s,
        "computed": tokens / alone_tokens,
        "loss": loss,
    }


def _num_tokens(job: OfflineJob) -> int:
    return int(job.num_prompt_tokens.sum() + job.num_output_tokens.sum())


def makespan(
    job: OfflineJob, speeds: Sequence[float], seed: int, kill_at_s: float = math.inf
) -> tuple[float, int]:
    """When the job ends whose last engine dies at `kill_at_s`, and the tokens it has computed."""
    law = A100Law()
    engines = [EnginePlan(law=law if speed == 1 else SlowedLaw(law, speed)) for speed in speeds]
    plan = SimulationPlan(
        math.inf, Calls.of([]), [job], len(engines), engines[0], seed=seed, engines=engines
    )
    with own_heap():
        simulation = Simulation(plan)
        if kill_at_s < math.inf:
            simulation.engines.run_until(kill_at_s)
            simulation.engines.lose(len(engines) - 1)
        simulation.engines.run_until(math.inf)
        done = simulation.feed.jobs[0]
        assert done.finished_at_s is not None
        return done.finished_at_s, done.computed_tokens


def job_of(case: Case, seed: int) -> OfflineJob:
    """The case's job; with one document that has `HOT_SHARE` of the work where it is hot."""
    rng = random.Random(seed)
    sizes = [rng.randint(*DOCUMENT_TOKENS) for _ in range(case.num_documents)]
    rows = [(document, *_own(rng)) for document in range(len(sizes)) for _ in _questions(rng)]
    if case.is_hot:
        rows += _hot_rows(sizes, rows, rng)
    rng.shuffle(rows)
    documents, questions, outputs = np.array(rows, np.int64).T
    tokens = np.array(sizes)[documents]
    num_chunks = (tokens + case.system_tokens) // CHUNK_TOKENS
    starts = np.concatenate(([0], np.cumsum(num_chunks)))
    places = np.arange(starts[-1]) - np.repeat(starts[:-1], num_chunks)
    owners = np.repeat(documents + 1, num_chunks) << 32
    if case.system_tokens:
        owners[places < case.system_tokens // CHUNK_TOKENS] = 0
    table = ChainTable(mixed(key_of(seed, len(rows)), owners + places), starts)
    return OfflineJob(
        "job",
        table,
        np.full(len(rows), float(CHUNK_TOKENS)),
        order_by_prefix(table),
        tokens + questions + case.system_tokens,
        outputs,
        round(float(outputs.mean())),
    )


def _own(rng: random.Random) -> tuple[int, int]:
    return rng.randint(*QUESTION_TOKENS), rng.randint(*OUTPUT_TOKENS)


def _questions(rng: random.Random) -> range:
    return range(rng.randint(*QUESTIONS))


def _hot_rows(
    sizes: list[int], rows: Sequence[tuple[int, int, int]], rng: random.Random
) -> list[tuple[int, int, int]]:
    """Adds a document of the middle size to `sizes`; its rows."""
    work_s = sum(_prefill_s(size) for size in sizes)
    work_s += sum(_row_s(sizes[document], *own) for document, *own in rows)
    hot_s = work_s * HOT_SHARE / (1 - HOT_SHARE)
    number, size = len(sizes), sum(DOCUMENT_TOKENS) // 2
    sizes.append(size)
    hot_s -= _prefill_s(size)
    found = []
    while hot_s > 0:
        own = _own(rng)
        hot_s -= _row_s(size, *own)
        found.append((number, *own))
    return found


def _prefill_s(num_tokens: int) -> float:
    return num_tokens * _token_s(num_tokens / 2)


def _row_s(document_tokens: int, question_tokens: int, output_tokens: int) -> float:
    """What a row takes of a full engine's time, the document's KV being there."""
    law = A100Law()
    reading_s = document_tokens * law.kv_bytes_per_token / law.bytes_per_s
    return question_tokens * _token_s(document_tokens) + output_tokens * reading_s


def _token_s(context_tokens: float) -> float:
    law = A100Law()
    return (law.flop_per_token + law.flop_per_token_pair * context_tokens) / law.flop_per_s


def _bars(records: Sequence[Record]) -> Iterator[Bar]:
    for (name,), of_it in grouped(records, "case").items():
        worst = max(record["of_bound"] for record in of_it)
        mean = fmean(record["of_bound"] for record in of_it)
        yield Bar(f"{name}: makespan over the bound, mean", mean, CASES[name].most, is_most=True)
        yield Bar(f"{name}: makespan over the bound, worst seed", worst)
        if name == "system-prompt":
            loss = fmean(record["loss"] for record in of_it)
            yield Bar(f"{name}: tokens/s lost", loss, MOST_LOSS, is_most=True)


if __name__ == "__main__":
    raise SystemExit(main())
