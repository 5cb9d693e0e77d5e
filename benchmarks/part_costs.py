"""What parts of the scheduler cost: eviction and reuse per row, counting and reporting per step.

    python -m benchmarks.part_costs [--rounds N] [--json FILE]

The tiered free queue and the reuse index are asked for rows of 1,250 blocks (a prompt of 20,000
tokens); counting and telemetry, for a scheduler with 256 running and 512 waiting requests.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from batchrun.cache.eviction import EVICTIONS, EvictionOrder
from batchrun.cache.free_queue import TieredFreeQueue
from batchrun.cache.reuse import ReuseIndex
from batchrun.cache.tiers import BlockTiers, OnlinePrefixes
from batchrun.hints import NodeHint, RowHint
from batchrun.simulator.virtual.engine import Arrival, VirtualEngine
from batchrun.simulator.virtual.setup import A100Law, EngineShape
from batchrun.vllm_plugin.scheduler import ColocatedScheduler
from batchrun.vllm_plugin.telemetry import ONLINE
from batchrun.wire import encode
from benchmarks.records import Record, describe, finish, parser

NUM_BLOCKS, ROW_BLOCKS = 8_600, 1_250
NUM_DOCUMENTS = NUM_BLOCKS // ROW_BLOCKS
ROWS_OF_DOCUMENT = 12
NUM_RUNNING, NUM_WAITING = 256, 512


@dataclass(slots=True, eq=False)
class Block:
    """A block as vLLM's: the hash stands behind a property; `==` is identity."""

    block_id: int
    ref_cnt: int = 0
    prev_free_block: Any = None
    next_free_block: Any = None
    hash_key: bytes | None = None

    @property
    def block_hash(self) -> bytes | None:
        """The key of the cached content."""
        return self.hash_key


def row_hint(
    row: int, rank: int, nodes: tuple[NodeHint, ...] = (), epoch: int = 1, job: str = "job"
) -> RowHint:
    """A row's hint."""
    return RowHint(epoch=epoch, job=job, row=row, rank=rank, nodes=nodes)


def main() -> int:
    """Print a line for each part."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=500)
    options = made.parse_args()
    records: list[Record] = []
    for order in EVICTIONS.values():
        records += [queue_cost(order, options.rounds), reuse_cost(order, options.rounds // 100)]
    records += step_costs(options.rounds)
    print(*map(describe, records), sep="\n")
    return finish(options.json, records)


def queue_cost(order: EvictionOrder, rounds: int) -> Record:
    """Pop and append 1,250 blocks, over and over; the order `lru` does what vLLM's queue does."""
    queue = _full_queue(order, [Block(i) for i in range(NUM_BLOCKS)])
    pops_s, appends_s = [], []
    for _ in range(rounds):
        start_s = time.perf_counter()
        taken = queue.popleft_n(ROW_BLOCKS)
        pops_s.append(time.perf_counter() - start_s)
        appends_s.append(_time_s(partial(queue.append_n, taken)))
    return {"part": f"queue, {order.name}", "pop_ms": _ms(pops_s), "append_ms": _ms(appends_s)}


def reuse_cost(order: EvictionOrder, rounds: int) -> Record:
    """Announce and finish the rows of documents, one document in at a time."""
    times_s: dict[str, list[float]] = {"first": [], "second": [], "later": [], "finish": []}
    for _ in range(max(rounds, 1)):
        reuse = ReuseIndex(order)
        for document in range(NUM_DOCUMENTS):
            chains = [_chain(document, row) for row in range(ROWS_OF_DOCUMENT)]
            for row, chain in enumerate(chains):
                hint, name = _hint(document, row), f"{document}/{row}"
                spent_s = _time_s(partial(reuse.announce, name, hint, chain, 0.0))
                times_s[("first", "second")[row] if row < 2 else "later"].append(spent_s)
            for row in range(ROWS_OF_DOCUMENT):
                times_s["finish"].append(_time_s(partial(reuse.finished, f"{document}/{row}")))
    medians = {f"{name}_ms": _ms(spent_s) for name, spent_s in times_s.items()}
    return {"part": f"reuse, {order.name}", **medians}


def step_costs(rounds: int) -> Iterator[Record]:
    """Counting one step, one online token's, and a whole picture of the engine."""
    engine, scheduler = _busy_engine()
    meter = scheduler.daemon_link.meter
    output = scheduler.schedule()
    assert len(output.num_scheduled_tokens) == NUM_RUNNING
    view = next(view for view in scheduler.state.views.values() if view.request_class is ONLINE)
    picture = partial(scheduler.daemon_link.telemetry, engine.now_s)
    parts: dict[str, Callable[[], object]] = {
        "step": partial(meter.scheduled, output, scheduler.state.views),
        "orders, none": scheduler.obey,
        "online token": partial(meter.token, view, engine.now_s),
        "picture": picture,
        "encoding": partial(encode, picture()),
    }
    for name, call in parts.items():
        yield {"part": name, "median_ms": _ms([_time_s(call) for _ in range(rounds)])}


def _full_queue(order: EvictionOrder, blocks: list[Block]) -> TieredFreeQueue:
    """A queue full of hashed blocks, half of whose documents are still wanted."""
    reuse, online = ReuseIndex(order), OnlinePrefixes()
    tiers = BlockTiers(order, reuse, online, NUM_BLOCKS)
    for document in range(NUM_DOCUMENTS):
        chain = _chain(document, 0)
        if document % 2 == 0:
            reuse.announce(f"{document}", _hint(document, 0), chain, 0.0)
        first = document * ROW_BLOCKS
        for block, block_hash in zip(blocks[first:], chain, strict=False):
            block.hash_key = block_hash
    for key in _chain(1, 0)[:32]:
        online.hit([key], 0.0)
        online.hit([key], 0.0)
    return TieredFreeQueue(blocks, order.num_tiers, tiers.tier_of)


def _chain(document: int, row: int) -> list[bytes]:
    """Block hashes of a row: its document, then two blocks of its own."""
    names = [f"{document}/{i}" for i in range(ROW_BLOCKS - 2)]
    names += [f"{document}/{row}/a", f"{document}/{row}/b"]
    return [hashlib.sha256(name.encode()).digest() for name in names]


def _hint(document: int, row: int) -> RowHint:
    rank = document * ROWS_OF_DOCUMENT + row
    left = ROWS_OF_DOCUMENT - row - 1
    nodes = (NodeHint(0, 1_000, rank + 1), NodeHint(document + 1, left, rank + 1))
    return row_hint(rank, rank, nodes)


def _busy_engine() -> tuple[VirtualEngine, ColocatedScheduler]:
    """An engine whose 256 places are taken by decodes, online and nothing else."""
    engine = VirtualEngine(ColocatedScheduler, EngineShape(), A100Law())
    for i in range(NUM_RUNNING + NUM_WAITING):
        prompt = [5 + (7 * i + j) % 1_900 for j in range(64)]
        engine.add(Arrival(f"call-{i}", True, 0.0, prompt, 10_000, None))
    scheduler = engine.scheduler
    assert isinstance(scheduler, ColocatedScheduler)
    while len(scheduler.running) < NUM_RUNNING or engine.now_s < 5.0:
        engine.step()
    return engine, scheduler


def _time_s(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _ms(spent_s: list[float]) -> float:
    return statistics.median(spent_s) * 1e3


if __name__ == "__main__":
    raise SystemExit(main())
