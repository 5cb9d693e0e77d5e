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

import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.jobs.inputs.input_data import InputData, open_input
from batchrun.jobs.inputs.spool import PlannedRows
from batchrun.jobs.spec import InputSpec
from batchrun.pool.prefix_keys import IntArray
from batchrun.samples.prose import sentence
from benchmarks.records import Bar, describe, finish, in_own_process, parser

Record = dict[str, object]
Read = Callable[[Sequence[int]], object]

ROWS_PER_READ = 16
MAX_DIRECT_S = 20.0
POOL_BYTES = 16 << 20
COLUMNS = ("id", "text")


@dataclass(frozen=True, slots=True)
class Case:
    """A file: so many rows of text of so many bytes, in row groups."""

    num_rows: int
    row_bytes: int
    group_rows: int

    def path_in(self, folder: Path) -> Path:
        """Where its file is."""
        return folder / f"{self.num_rows}-{self.row_bytes}-{self.group_rows}.parquet"


def main() -> int:
    """Run every case, print and save."""
    made = parser(__doc__)
    made.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 500_000])
    made.add_argument("--row-bytes", type=int, nargs="+", default=[8192])
    made.add_argument("--group-rows", type=int, nargs="+", default=[2_000, 100_000])
    made.add_argument("--folder", type=Path)
    options = made.parse_args()
    found: list[Bar] = []
    records: list[Record] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for sizes in product(options.rows, options.row_bytes, options.group_rows):
            case = Case(*sizes)
            written = in_own_process(write_file, case, folder)
            for measure in (measure_direct, measure_planned):
                record = {**in_own_process(measure, case, folder), **written}
                print(describe(record), flush=True)
                records.append(record)
            found += bars(records[-1])
            case.path_in(folder).unlink()
    return finish(options.json, records, found)


def bars(record: Record) -> Iterator[Bar]:
    """What planned access must reach."""
    values = {key: float(str(value)) for key, value in record.items() if key != "access"}
    yield Bar("rows read per CPU s", values["rows_per_cpu_s"], 5_000)
    yield Bar("resident when copied, MiB", values["prepare_peak_bytes"] / 2**20, 256, is_most=True)
    if values["row_bytes"] <= 1024 and values["spool_bytes"]:
        copied_per_cpu_s = values["num_rows"] / values["prepare_cpu_s"]
        yield Bar("rows copied per CPU s", copied_per_cpu_s, 50_000)


def write_file(case: Case, folder: Path) -> Record:
    """The file of a case: pieces of one long text, at random."""
    rng = Random(case.num_rows)
    sentences: list[str] = []
    num_bytes = 0
    while num_bytes < POOL_BYTES:
        sentences.append(sentence(rng))
        num_bytes += len(sentences[-1]) + 1
    pool = " ".join(sentences)
    schema = pa.schema([(name, pa.string()) for name in COLUMNS])
    with pq.ParquetWriter(case.path_in(folder), schema, compression="zstd") as writer:
        for first in range(0, case.num_rows, case.group_rows):
            rows = range(first, min(first + case.group_rows, case.num_rows))
            starts = [rng.randrange(len(pool) - case.row_bytes) for _ in rows]
            texts = pa.array(pool[start : start + case.row_bytes] for start in starts)
            writer.write_table(
                pa.table([pa.array(f"row-{row}" for row in rows), texts], schema=schema)
            )
    return {"file_bytes": case.path_in(folder).stat().st_size}


def measure_direct(case: Case, folder: Path) -> Record:
    """Straight from the file."""
    order = _order(case)
    with _opened(case, folder) as data:
        began = _Began()
        data.read_rows(order[:ROWS_PER_READ].tolist(), COLUMNS)
        prepared = began.record("prepare")
        rest = order[ROWS_PER_READ:]
        read = _read_all(lambda rows: data.read_rows(rows, COLUMNS), rest, MAX_DIRECT_S)
    return {"access": "direct", **asdict(case), **prepared, **read, "spool_bytes": 0}


def measure_planned(case: Case, folder: Path) -> Record:
    """As the daemon would: a copy in the planned order where that is worth it."""
    order = _order(case)
    with _opened(case, folder) as data:
        began = _Began()
        with PlannedRows(data, COLUMNS, order, scratch=folder) as planned:
            prepared = began.record("prepare")
            read = _read_all(planned.read_rows, order, float("inf"))
            spool_bytes = planned.spool_bytes or 0
    return {"access": "planned", **asdict(case), **prepared, **read, "spool_bytes": spool_bytes}


class _Began:
    """Now, on the clock and in CPU time."""

    def __init__(self) -> None:
        self._clock_s, self._cpu_s = time.perf_counter(), time.process_time()

    def record(self, part: str) -> dict[str, float]:
        """Seconds since then, and the most memory that was resident so far."""
        return {
            f"{part}_s": time.perf_counter() - self._clock_s,
            f"{part}_cpu_s": time.process_time() - self._cpu_s,
            f"{part}_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def _opened(case: Case, folder: Path) -> InputData:
    spec = InputSpec(path=(str(case.path_in(folder)),))
    return open_input(spec, scratch=folder)


def _order(case: Case) -> IntArray:
    return np.random.default_rng(case.num_rows).permutation(case.num_rows)


def _read_all(read: Read, order: IntArray, limit_s: float) -> Record:
    """Reads in this order until its end, or until the time is over."""
    began = _Began()
    began_s = last_s = time.perf_counter()
    longest_s = 0.0
    num_read = 0
    while num_read < len(order) and last_s - began_s < limit_s:
        read(order[num_read : num_read + ROWS_PER_READ].tolist())
        num_read = min(num_read + ROWS_PER_READ, len(order))
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    spent = began.record("read")
    return {
        "num_read": num_read,
        **spent,
        "rows_per_s": num_read / spent["read_s"],
        "rows_per_cpu_s": num_read / spent["read_cpu_s"],
        "longest_read_s": longest_s,
    }


if __name__ == "__main__":
    raise SystemExit(main())
