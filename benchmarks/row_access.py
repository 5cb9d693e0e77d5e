"""How fast rows come back in a planned order that is not the file's, 16 at a time.

    python -m benchmarks.row_access [--rows N ...] [--row-bytes N ...] [--group-rows N ...]
                                    [--folder FOLDER] [--json FILE]

Writes zstd Parquet files of text into a temporary folder, in it or in `--folder`, and reads them in
a shuffled order: straight from the file (for at most 20 s), and as `PlannedRows` does. "prepare" is
what comes before: the first read of a file with large row groups, which copies it, or the spool.
Every case runs in a process of its own, with one thread. The files are in the page cache, so that
rates per second of CPU time are those of a core with nothing else to do.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.jobs.inputs.input_data import open_input
from batchrun.jobs.inputs.spool import KeptCopy, PlannedRows
from batchrun.jobs.spec import InputSpec
from batchrun.pool.prefix_keys import IntArray
from batchrun.samples.prose import sentence_pool
from benchmarks.records import Bar, Record, Spent, finish, in_own_process, parser, peak_bytes, shown

Read = Callable[[Sequence[int]], object]

ROWS_PER_READ = 16
MAX_DIRECT_S = 20.0
POOL_SENTENCES = 200_000
COLUMNS = ("id", "text")
SIZES = {"rows": (10_000, 100_000, 500_000), "row_bytes": (8192,), "group_rows": (2_000, 100_000)}


def main() -> int:
    """Run every case, print and save."""
    options = parser(__doc__, **SIZES, folder=Path(tempfile.gettempdir())).parse_args()
    cases = product(options.rows, options.row_bytes, options.group_rows)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        records = shown(record for case in cases for record in _measure_both(Path(name), *case))
    planned = [record for record in records if record["access"] == "planned"]
    return finish(options.json, records, [bar for record in planned for bar in bars(record)])


def _measure_both(folder: Path, num_rows: int, row_bytes: int, group_rows: int) -> Iterator[Record]:
    path = folder / "rows.parquet"
    in_own_process(write_file, path, num_rows, row_bytes, group_rows)
    case = {"num_rows": num_rows, "row_bytes": row_bytes, "group_rows": group_rows}
    for access in ("direct", "planned"):
        record = in_own_process(measure, path, num_rows, access)
        yield {"access": access, **case, **record, "file_bytes": path.stat().st_size}


def bars(record: Record) -> Iterator[Bar]:
    """What planned access must reach."""
    yield Bar("rows read per CPU s", record["rows_per_cpu_s"], 5_000)
    yield Bar("resident when copied, MiB", record["prepare_peak_bytes"] / 2**20, 256, is_most=True)
    if record["row_bytes"] <= 1024 and record["spool_bytes"]:
        copied_per_cpu_s = record["num_rows"] / record["prepare_cpu_s"]
        yield Bar("rows copied per CPU s", copied_per_cpu_s, 50_000)


def write_file(path: Path, num_rows: int, row_bytes: int, group_rows: int) -> None:
    """Rows of text of so many bytes, in row groups: pieces of one long text, at random."""
    rng = Random(num_rows)
    pool = " ".join(sentence_pool(rng, POOL_SENTENCES))
    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in range(0, num_rows, group_rows):
            rows = range(first, min(first + group_rows, num_rows))
            starts = [rng.randrange(len(pool) - row_bytes) for _ in rows]
            texts = pa.array(pool[start : start + row_bytes] for start in starts)
            writer.write_table(
                pa.table([pa.array(f"row-{row}" for row in rows), texts], schema=schema)
            )


def measure(path: Path, num_rows: int, access: str) -> Record:
    """`direct`: straight from the file, for a while; `planned`: as the daemon would, with a copy in
    the planned order where that is worth it."""
    order = np.random.default_rng(num_rows).permutation(num_rows)
    preparing, spool_bytes = Spent(), 0
    with ExitStack() as exits:
        data = exits.enter_context(open_input(InputSpec(path=(str(path),))))
        read: Read = partial(data.read_rows, columns=COLUMNS)
        with preparing:
            if access == "planned":
                copy = KeptCopy(path.with_suffix(".rows"), repr(path.stat()).encode())
                planned = PlannedRows(data, COLUMNS, order, copy)
                exits.enter_context(closing(planned))
                read, limit_s, spool_bytes = planned.read_rows, math.inf, planned.spool_bytes or 0
            else:
                read(order[:ROWS_PER_READ].tolist())
                order, limit_s = order[ROWS_PER_READ:], MAX_DIRECT_S
        prepare_peak_bytes = peak_bytes()
        figures = _read_all(read, order, limit_s)
    return {
        "prepare_s": preparing.wall_s,
        "prepare_cpu_s": preparing.cpu_s,
        "prepare_peak_bytes": prepare_peak_bytes,
        **figures,
        "spool_bytes": spool_bytes,
    }


def _read_all(read: Read, order: IntArray, limit_s: float) -> Record:
    """Reads in this order until its end, or until the time is over."""
    longest_s = 0.0
    num_read = 0
    reading = Spent()
    while num_read < len(order) and reading.wall_s < limit_s:
        before_s = reading.wall_s
        with reading:
            read(order[num_read : num_read + ROWS_PER_READ].tolist())
        num_read = min(num_read + ROWS_PER_READ, len(order))
        longest_s = max(longest_s, reading.wall_s - before_s)
    return {
        "num_read": num_read,
        "read_peak_bytes": peak_bytes(),
        "rows_per_s": num_read / reading.wall_s,
        "rows_per_cpu_s": num_read / reading.cpu_s,
        "longest_read_s": longest_s,
    }


if __name__ == "__main__":
    raise SystemExit(main())
