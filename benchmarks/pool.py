"""How long the pool takes to know a job, and to hand it out, by the number of rows.

    python -m benchmarks.pool [--shape NAME ...] [--rows N ...] [--json FILE]

Each size runs in a process of its own. "key" hashes the prompts' chunks, "sort" orders the rows by
prefix, "nodes" finds the prefix tree, "queue" makes ready to hand out; "texts" is the benchmark's
own work of making the prompts, which counts nowhere. Then rows are handed out and get results:
a turn, a place in a window, and what the daemon's hint tells.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from batchrun.pool.fair_share import JobTurns
from batchrun.pool.prefix_keys import ChainBuilder
from batchrun.pool.radix_tree import find_prefix_nodes, order_by_prefix
from batchrun.pool.row_queue import TICK_S, RowQueue, Window
from benchmarks.records import Bar, describe, finish, in_own_process, parser

Record = dict[str, object]
Result = TypeVar("Result")

BATCH_ROWS = 2_000
MAX_DISPATCHED = 200_000
ROW_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Shape:
    """A job: every prompt is the system text, one of the documents, and text of its own."""

    name: str
    system_bytes: int
    document_bytes: int
    own_bytes: int
    rows_per_document: int
    sizes: tuple[int, ...]
    limit_s: float
    limit_bytes: float


SHAPES = {
    shape.name: shape
    for shape in (
        # Preble, table 1: 1,835 prompt tokens, of which 85 % are shared by 39 requests.
        Shape("toolbench", 2_400, 4_400, 1_200, 39, (10_000, 100_000, 1_000_000), 60, 1.5 * 2**30),
        Shape("short", 256, 256, 288, 20, (100_000, 1_000_000, 10_000_000), 480, 4 * 2**30),
    )
}


def main() -> int:
    """Run every size, print and save."""
    made = parser(__doc__)
    made.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    made.add_argument("--rows", type=int, nargs="+", help="in the place of the shape's sizes")
    options = made.parse_args()
    found: list[Bar] = []
    records: list[Record] = []
    for name in options.shape:
        shape = SHAPES[name]
        for num_rows in options.rows or shape.sizes:
            record = in_own_process(measure, shape, num_rows)
            print(describe(record), flush=True)
            records.append(record)
            if num_rows == shape.sizes[-1]:
                found += bars(shape, record)
    return finish(options.json, records, found)


def bars(shape: Shape, record: Record) -> Iterator[Bar]:
    """What the largest size must reach."""
    values = {key: float(str(value)) for key, value in record.items() if key != "shape"}
    known_s = sum(values[f"{part}_s"] for part in ("key", "sort", "nodes", "queue"))
    yield Bar("key, sort and build, s", known_s, shape.limit_s, is_most=True)
    yield Bar(
        "resident, GiB", values["peak_bytes"] / 2**30, shape.limit_bytes / 2**30, is_most=True
    )
    yield Bar("rows handed out per s", values["dispatched_per_s"], 20_000)
    yield Bar("a result, us", values["result_us"], 20, is_most=True)


def measure(shape: Shape, num_rows: int) -> Record:
    """All stages at one size."""
    clock = _Clock()
    builder = ChainBuilder(salt=1)
    _add_texts(builder, shape, range(num_rows), clock)
    table = builder.build()
    order = clock.run("sort", lambda: order_by_prefix(table))
    nodes = clock.run("nodes", lambda: find_prefix_nodes(order.shared_chunks))
    queue = clock.run("queue", lambda: RowQueue(order.rows, nodes))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    num_dispatched = min(num_rows, MAX_DISPATCHED)
    dispatch_s, result_s = _hand_out(queue, num_dispatched)
    return {
        "shape": shape.name,
        "rows": num_rows,
        "chunks": int(table.starts[-1]),
        "nodes": nodes.num_nodes,
        **{f"{part}_s": seconds for part, seconds in clock.seconds.items()},
        "peak_bytes": peak_bytes,
        "dispatched_per_s": num_dispatched / dispatch_s,
        "result_us": 1e6 * result_s / num_dispatched,
    }


class _Clock:
    """Stages and how long they took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"texts": 0.0, "key": 0.0}

    def run(self, part: str, work: Callable[[], Result]) -> Result:
        """Do it, and add its time to `part`."""
        began_s = time.perf_counter()
        result = work()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began_s
        return result


def _add_texts(builder: ChainBuilder, shape: Shape, rows: range, clock: _Clock) -> None:
    """Prompts in a random order of their documents, a batch at a time."""
    num_documents = max(1, rows.stop // shape.rows_per_document)
    documents = np.random.default_rng(rows.start).integers(num_documents, size=len(rows))
    system = b"s" * shape.system_bytes

    def texts(start: int) -> list[bytes]:
        batch = range(start, min(start + BATCH_ROWS, rows.stop))
        return [
            system
            + (b"%d " % documents[row - rows.start]).ljust(shape.document_bytes, b"d")
            + (b"%d " % row).ljust(shape.own_bytes, b"q")
            for row in batch
        ]

    for start in range(rows.start, rows.stop, BATCH_ROWS):
        batch = clock.run("texts", partial(texts, start))
        clock.run("key", partial(builder.add, batch))


def _hand_out(queue: RowQueue, num_rows: int) -> tuple[float, float]:
    """Seconds to hand out so many rows with what their hints tell, and to take their results."""
    turns, window = JobTurns(), Window(num_rows + 1, num_rows * ROW_TOKENS + 1)
    turns.join("job", 1.0, num_rows * ROW_TOKENS)
    rows: list[int] = []
    began_s = time.perf_counter()
    for number in range(num_rows):
        now_s = number * TICK_S
        turn = turns.choose({"job"}, now_s)
        row = queue.peek(now_s)
        assert row is not None and turn is not None
        assert window.has_room(ROW_TOKENS, 0) and window.opens_at_s(ROW_TOKENS, now_s) == now_s
        queue.take(row)
        turns.charge(turn, row, ROW_TOKENS, ends_subtree=False)
        window.add(ROW_TOKENS, now_s)
        for node in queue.path_of(row):
            queue.num_to_come(node)
        rows.append(row)
    handed_out_s = time.perf_counter()
    for row in rows:
        queue.finish(row)
        turns.settle("job", row, ROW_TOKENS)
        window.remove(ROW_TOKENS)
    return handed_out_s - began_s, time.perf_counter() - handed_out_s


if __name__ == "__main__":
    raise SystemExit(main())
