"""The hit rate that `batchrun inspect` expects at a KV size, against the virtual engine's.

    python -m benchmarks.expected_hits [--jobs NAME ...] [--blocks N ...] [--seed N] [--json FILE]

Jobs shaped like three data sets run alone, from their first row to their last: in batchrun's order
with its policy and eviction, and shuffled with vLLM's. Both sides know the same tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from batchrun.pool.expected_hits import RowWalk, expected_hits
from batchrun.pool.prefix_keys import ChainBuilder
from batchrun.pool.prompt_study import PieceCoder, PromptTree, servable_tokens
from batchrun.simulator.cluster import EnginePlan
from batchrun.simulator.virtual.laws import A100Law
from batchrun.simulator.virtual.setup import EngineShape
from benchmarks.hit_cases import WARM_UP_S, fed, run_to_end
from benchmarks.hit_plans import pool_job
from benchmarks.job_shapes import ShapedJob, loogle, nextqa, picked, prompts_of, toolbench
from benchmarks.records import write_records
from benchmarks.row_feeds import daemon_in_order
from benchmarks.scenarios import Job, Order, a100_8b, draw_job
from benchmarks.warm_up import observe

JOBS: dict[str, Callable[[], ShapedJob]] = {
    "toolbench": toolbench,
    "nextqa": lambda: nextqa(100),
    "loogle": loogle,
}
SETTINGS = (("ours", "echo", "next-use"), ("shuffled", "bs", "lru"))
"""Order, policy and eviction: `bs` takes rows as they come, as vLLM's own scheduler does; `echo`
would choose among them those whose prefixes are cached."""
Setting = tuple[str, str, str]
KV_BLOCKS = (8600, 4300)
BLOCK_TOKENS = 16
TOKEN_BYTES = 4


def compare(name: str, num_blocks: int, setting: Setting, seed: int) -> dict[str, Any]:
    """A flat record: the hit rate expected and that of the virtual engine."""
    order, policy, eviction = setting
    job = draw_job(JOBS[name](), seed, Order.SHUFFLED)
    if order == "ours":
        job = picked(job, pool_job(job).order.rows)
    expected = expected_rate(job, num_blocks, drops_used=eviction != "lru")
    measured = measured_rate(job, num_blocks, setting, seed)
    return {
        "job": name,
        "kv_tokens": num_blocks * BLOCK_TOKENS,
        "order": order,
        "policy": policy,
        "eviction": eviction,
        "seed": seed,
        "expected_hit_rate": expected,
        "measured_hit_rate": measured,
        "error": expected - measured,
    }


def expected_rate(job: Job, num_blocks: int, *, drops_used: bool) -> float:
    """What `inspect` says of these rows in this order."""
    texts = _texts(job)
    builder, coder = ChainBuilder(0), PieceCoder()
    builder.add(texts)
    coder.add(texts)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    tree = PromptTree.of(builder.build(), coder.build(), lengths, np.arange(len(texts)))
    outputs = np.array([row.num_output_tokens for row in job.rows])
    order = np.argsort(tree.rows)
    own = tree.leaf_bytes / TOKEN_BYTES + outputs[tree.rows]
    nodes = tree.node_bytes / TOKEN_BYTES
    walk = RowWalk(tree.innermost[order], own[order], tree.nodes.parents, nodes)
    found = expected_hits(walk, num_blocks * BLOCK_TOKENS, drops_used=drops_used)
    prompts = lengths / TOKEN_BYTES
    hits = servable_tokens(np.nan_to_num(found), prompts, BLOCK_TOKENS)
    return float(hits.sum() / prompts.sum())


def measured_rate(job: Job, num_blocks: int, setting: Setting, seed: int) -> float:
    """Hits of first admissions by prompt tokens, on an engine with nothing else to do."""
    _, policy, eviction = setting
    shape = EngineShape(num_blocks)
    plan = EnginePlan(shape, policy, {"eviction": eviction})
    simulation = fed(plan, daemon_in_order(job))
    warm_up = observe(a100_8b(), seed, shape, A100Law(), online_s=WARM_UP_S)
    warm_up.without_online_use().tell(simulation.engines.engines[0].scheduler)
    run_to_end(simulation, len(job.rows))
    hit_rate = simulation.figures().offline.hit_rate
    assert hit_rate is not None
    return hit_rate


def _texts(job: Job) -> list[bytes]:
    """A token id of four bytes stands for a token's text."""
    return [prompt.astype("<u4").tobytes() for prompt in prompts_of(job)]


def main() -> int:
    """Compare, print, save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=tuple(JOBS), default=tuple(JOBS))
    parser.add_argument("--blocks", nargs="+", type=int, default=KV_BLOCKS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    print("| job | KV tokens | order | policy, eviction | expected | virtual engine | error |")
    print("|---|---:|---|---|---:|---:|---:|")
    for name in options.jobs:
        for num_blocks in options.blocks:
            for setting in SETTINGS:
                record = compare(name, num_blocks, setting, options.seed)
                records.append(record)
                print(_line(record), flush=True)
    if options.json is not None:
        write_records(options.json, records)
    return 0


def _line(record: dict[str, Any]) -> str:
    return (
        f"| {record['job']} | {record['kv_tokens']:,} | {record['order']} "
        f"| {record['policy']}, {record['eviction']} "
        f"| {record['expected_hit_rate']:.4f} | {record['measured_hit_rate']:.4f} "
        f"| {record['error']:+.4f} |"
    )


if __name__ == "__main__":
    raise SystemExit(main())
