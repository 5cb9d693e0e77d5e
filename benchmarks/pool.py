"""How long the pool takes to know a job, and to hand it out, by the number of rows.

    python -m benchmarks.pool [--rows N ...] [--json FILE]

Each size runs in a process of its own. "key" hashes the prompts' chunks, "sort" orders the rows by
prefix, "nodes" finds the prefix tree, "queue" makes ready to hand out; "texts" is the benchmark's
own work of making the prompts, which counts nowhere. Then rows are handed out and get results:
a turn, a place in a window, and what the daemon's hint tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchrun.pool.fair_share import JobTurns
from batchrun.pool.prefix_keys import ChainBuilder
from batchrun.pool.radix_tree import build_radix_tree, order_by_prefix
from batchrun.pool.row_queue import TICK_S, RowQueue, Window
from benchmarks.records import Bar, Record, Spent, finish, in_own_process, parser, peak_bytes, shown

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
    limit_gib: float


SHAPES = {
    shape.name: shape
    for shape in (
        # Preble, table 1: 1,835 prompt tokens, of which 85 % are shared by 39 requests.
        Shape("toolbench", 2_400, 4_400, 1_200, 39, (10_000, 100_000, 1_000_000), 60, 1.5),
        Shape("short", 256, 256, 288, 20, (100_000, 1_000_000, 10_000_000), 480, 4),
    )
}


def main() -> int:
    """Run every size, print and save."""
    made = parser(__doc__)
    made.add_argument("--rows", type=int, nargs="+", help="in the place of the shapes' sizes")
    options = made.parse_args()
    records = shown(
        in_own_process(measure, shape, num_rows)
        for shape in SHAPES.values()
        for num_rows in options.rows or shape.sizes
    )
    return finish(options.json, records, [bar for record in records for bar in bars(record)])


def bars(record: Record) -> Iterator[Bar]:
    """What the largest size of a shape must reach."""
    shape = SHAPES[record["shape"]]
    if record["rows"] != shape.sizes[-1]:
        return
    known_s = sum(record[f"{part}_s"] for part in ("key", "sort", "nodes", "queue"))
    yield Bar("key, sort and build, s", known_s, shape.limit_s, is_most=True)
    yield Bar("resident, GiB", record["peak_bytes"] / 2**30, shape.limit_gib, is_most=True)
    yield Bar("rows handed out per s", record["dispatched_per_s"], 20_000)
    yield Bar("a result, us", record["result_us"], 20, is_most=True)


def measure(shape: Shape, num_rows: int) -> Record:
    """All stages at one size."""
    spent = {part: Spent() for part in ("texts", "key", "sort", "nodes", "queue")}
    builder = ChainBuilder(salt=1)
    num_documents = max(1, num_rows // shape.rows_per_document)
    documents = np.random.default_rng(0).integers(num_documents, size=num_rows)
    system = b"s" * shape.system_bytes
    for start in range(0, num_rows, BATCH_ROWS):
        with spent["texts"]:
            texts = [
                system
                + (b"%d " % documents[row]).ljust(shape.document_bytes, b"d")
                + (b"%d " % row).ljust(shape.own_bytes, b"q")
                for row in range(start, min(start + BATCH_ROWS, num_rows))
            ]
        with spent["key"]:
            builder.add(texts)
    table = builder.build()
    with spent["sort"]:
        order = order_by_prefix(table)
    with spent["nodes"]:
        nodes = build_radix_tree(order.shared_chunks)
    with spent["queue"]:
        queue = RowQueue(order.rows, nodes)
    peak = peak_bytes()
    num_dispatched = min(num_rows, MAX_DISPATCHED)
    dispatch_s, result_s = _hand_out(queue, num_dispatched)
    return {
        "shape": shape.name,
        "rows": num_rows,
        "chunks": int(table.starts[-1]),
        "nodes": nodes.num_nodes,
        **{f"{part}_s": each.wall_s for part, each in spent.items()},
        "peak_bytes": peak,
        "dispatched_per_s": num_dispatched / dispatch_s,
        "result_us": 1e6 * result_s / num_dispatched,
    }


def _hand_out(queue: RowQueue, num_rows: int) -> tuple[float, float]:
    """Seconds to hand out so many rows with what their hints tell, and to take their results."""
    turns, window = JobTurns(), Window(num_rows + 1, num_rows * ROW_TOKENS + 1)
    turns.join("job", 1.0, num_rows * ROW_TOKENS)
    rows: list[int] = []
    with Spent() as handing_out:
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
    with Spent() as finishing:
        for row in rows:
            queue.finish(row)
            turns.settle("job", row, ROW_TOKENS)
            window.remove(ROW_TOKENS)
    return handing_out.wall_s, finishing.wall_s


if __name__ == "__main__":
    raise SystemExit(main())
