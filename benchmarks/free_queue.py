"""What the tiered free queue and the reuse index cost per row of 1,250 blocks (a 20 k prompt)."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from batchrun.cache.eviction import EVICTIONS, EvictionOrder
from batchrun.cache.free_queue import TieredFreeQueue
from batchrun.cache.reuse import ReuseIndex
from batchrun.cache.tiers import BlockTiers, OnlinePrefixes
from batchrun.hints import NodeHint, RowHint
from benchmarks.cache_blocks import Block, row_hint
from benchmarks.records import Record, write_records

NUM_BLOCKS = 8_600
ROW_BLOCKS = 1_250
NUM_DOCUMENTS = NUM_BLOCKS // ROW_BLOCKS
NUM_ROWS_OF_DOCUMENT = 12


def chain_of(document: int, row: int) -> list[bytes]:
    """Block hashes of a row: its document, then two blocks of its own."""
    hashes = [_hash(f"{document}/{i}") for i in range(ROW_BLOCKS - 2)]
    return [*hashes, _hash(f"{document}/{row}/a"), _hash(f"{document}/{row}/b")]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def measure_queue(order: EvictionOrder, rounds: int) -> Record:
    """Pop and append 1,250 blocks, over and over; the order `lru` does what vLLM's queue does."""
    blocks = [Block(i) for i in range(NUM_BLOCKS)]
    queue = _tiered(order, blocks)
    pops, appends = [], []
    for _ in range(rounds):
        start_s = time.perf_counter()
        taken = queue.popleft_n(ROW_BLOCKS)
        pops.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        queue.append_n(taken)
        appends.append(time.perf_counter() - start_s)
    return {
        "queue": order.name,
        "blocks": ROW_BLOCKS,
        "pop_ms": statistics.median(pops) * 1e3,
        "append_ms": statistics.median(appends) * 1e3,
        "pop_and_append_ms": (statistics.median(pops) + statistics.median(appends)) * 1e3,
    }


def _tiered(order: EvictionOrder, blocks: list[Block]) -> TieredFreeQueue:
    """A queue full of hashed blocks, half of whose documents are still wanted."""
    reuse = ReuseIndex(order)
    online = OnlinePrefixes()
    tiers = BlockTiers(order, reuse, online, NUM_BLOCKS)
    for document in range(NUM_DOCUMENTS):
        chain = chain_of(document, 0)
        if document % 2 == 0:
            reuse.announce(f"{document}", _hint(document, 0), chain, 0.0)
        first = document * ROW_BLOCKS
        for block, block_hash in zip(blocks[first:], chain, strict=False):
            block.hash_key = block_hash
    for key in chain_of(1, 0)[:32]:
        online.hit([key], 0.0)
        online.hit([key], 0.0)
    return TieredFreeQueue(blocks, order.num_tiers, tiers.tier_of)


def _hint(document: int, row: int) -> RowHint:
    rank = document * NUM_ROWS_OF_DOCUMENT + row
    left = NUM_ROWS_OF_DOCUMENT - row - 1
    nodes = (NodeHint(0, 1_000, rank + 1), NodeHint(document + 1, left, rank + 1))
    return row_hint(rank, rank, nodes)


def measure_reuse(order: EvictionOrder, rounds: int) -> Record:
    """Announce and finish the rows of documents, one document in at a time."""
    times: dict[str, list[float]] = {"first": [], "second": [], "later": [], "finish": []}
    for _ in range(rounds):
        reuse = ReuseIndex(order)
        for document in range(NUM_DOCUMENTS):
            chains = [chain_of(document, row) for row in range(NUM_ROWS_OF_DOCUMENT)]
            for row, chain in enumerate(chains):
                hint, name = _hint(document, row), f"{document}/{row}"
                spent_s = _time(partial(reuse.announce, name, hint, chain, 0.0))
                times[("first", "second")[row] if row < 2 else "later"].append(spent_s)
            for row in range(NUM_ROWS_OF_DOCUMENT):
                name = f"{document}/{row}"
                times["finish"].append(_time(partial(reuse.finished, name)))
    medians = {f"{name}_ms": statistics.median(spent) * 1e3 for name, spent in times.items()}
    return {"reuse": order.name, "blocks": ROW_BLOCKS, **medians}


def _time(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def main() -> None:
    """Print the table; write the records where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    orders = list(EVICTIONS.values())
    records = [measure_queue(order, arguments.rounds) for order in orders]
    records += [measure_reuse(order, max(1, arguments.rounds // 100)) for order in orders]
    for record in records:
        print(
            json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()})
        )
    if arguments.json:
        write_records(arguments.json, records)


if __name__ == "__main__":
    main()
