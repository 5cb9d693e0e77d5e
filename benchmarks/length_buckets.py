"""One length bucket against several: a job of mixed lengths, alone, from its first row to its last.

    python -m benchmarks.length_buckets [--documents N] [--seed N] [--json FILE]

Echo divides the offline pool into buckets of similar length, so that batches are regular (sections
4.1 and 6). The pool's buckets hold whole prefix groups, by their median length. Here the questions
about one document are so unlike in length that buckets of single rows would split most groups:
`rows` measures that, `groups` is the pool. What regular batches are worth depends on the law of the
step time: the roofline law adds contexts up, Eq. 7 charges a batch for its longest context and for
the mean.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.feeding import RowFeed
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.ablation_runs import figures_of
from benchmarks.hit_cases import KV_BLOCKS, Record, fed
from benchmarks.hit_jobs import straddling_job
from benchmarks.hit_lru import hit_blocks_in_turn
from benchmarks.hit_plans import num_split_groups, pool_job, row_bucketed
from benchmarks.job_shapes import picked
from benchmarks.laws import LAWS
from benchmarks.optimal_hits import most_hit_blocks
from benchmarks.orders import BLOCK_TOKENS, row_blocks
from benchmarks.records import write_records
from benchmarks.row_feeds import daemon_in_order, daemon_of
from benchmarks.scenarios import Job

GROUPS, ROWS = "groups", "rows"
BUCKETS = ((GROUPS, 1), (GROUPS, 4), (GROUPS, 8), (ROWS, 4), (ROWS, 8))
LAW_NAMES = ("a100", "pooling")


def measure(job: Job, law_name: str, blocks: int, of: str, num_buckets: int) -> Record:
    """The whole job under `echo`, without online calls."""
    ordered, feed = _ordered(job, of, num_buckets)
    engine = EnginePlan(EngineShape(blocks), settings={"reserve": 0.0}, law=LAWS[law_name](0))
    simulation = fed(engine, feed)
    simulation.engines.run_until(math.inf)
    figures = figures_of(simulation)
    rows = row_blocks(ordered)
    hit_tokens = simulation.watch.offline.hit_tokens
    is_split = of == ROWS
    return {
        "law": law_name,
        "blocks": blocks,
        "buckets_of": of,
        "buckets": num_buckets,
        "split_groups": num_split_groups(job, num_buckets) if is_split else 0,
        "rows": rows.num_rows,
        "hit_tokens": hit_tokens,
        "share_of_optimum": hit_tokens / BLOCK_TOKENS / most_hit_blocks(rows, blocks),
        "in_turn_hit_tokens": hit_blocks_in_turn(rows, blocks) * BLOCK_TOKENS,
        **figures,
    }


def _ordered(job: Job, of: str, num_buckets: int) -> tuple[Job, RowFeed]:
    if of == ROWS:
        ordered = row_bucketed(job, num_buckets)
        return ordered, daemon_in_order(ordered)
    pooled = pool_job(job, num_buckets)
    return picked(job, pooled.order.rows), daemon_of([pooled])


def tables(records: Sequence[Record]) -> Iterator[str]:
    """One table for each law and KV size."""
    for (law, blocks), rows in groupby(records, key=itemgetter("law", "blocks")):
        yield f"\nlaw {law}, {blocks:,} blocks\n"
        yield "| buckets | split groups | job s | served/s | hit tokens | of the optimum |"
        yield "|---|---:|---:|---:|---:|---:|"
        for row in rows:
            yield (
                f"| {row['buckets']} of {row['buckets_of']} | {row['split_groups']} "
                f"| {row['duration_s']:.1f} | {row['offline_tokens_per_s']:,.0f} "
                f"| {row['hit_tokens']:,} | {row['share_of_optimum']:.4f} |"
            )


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    job = straddling_job(options.seed, options.documents)
    records = [
        measure(job, law_name, blocks, of, num_buckets)
        for law_name in LAW_NAMES
        for blocks in KV_BLOCKS
        for of, num_buckets in BUCKETS
    ]
    print("\n".join(tables(records)))
    if options.json is not None:
        write_records(options.json, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
