"""The data sets: their columns, the sizes of a sample, and the Parquet file that rows go into.

A sample is planned before any text is made: which rows share what, and how long each part is. The
full scale has the sizes of table 1 of the Preble paper (number of requests, mean prompt length,
share of the prompt that earlier requests had already). The small scale has the same form, cut down
so that a CPU finishes a job in well under two minutes.

Generated prose has 4.28 bytes to a token, half-way between the tiny model's tokenizer (4.19) and
the rule of 1.3 tokens to a word (4.38); generated tool documentation has 3.5, as the tiny model's
tokenizer has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchrun.errors import InputError
from batchrun.types import ProgressSink


def _texts(*names: str) -> pa.Schema:
    return pa.schema([pa.field(name, pa.string(), nullable=False) for name in names])


SCHEMAS = {
    "loogle": _texts("id", "document_id", "title", "document", "question", "answer", "task"),
    "toolbench": _texts("id", "system", "tools", "query", "answer"),
    "nextqa": _texts("id", "video_id", "video", "question", "a0", "a1", "a2", "a3", "a4", "answer"),
}
DATASET_NAMES = tuple(SCHEMAS)


def schema_of(name: str) -> pa.Schema:
    """The schema of the data set `name`; InputError for a name that is not in DATASET_NAMES."""
    if name not in SCHEMAS:
        raise InputError(f"unknown data set {name!r}: choose one of {', '.join(DATASET_NAMES)}")
    return SCHEMAS[name]


PROSE_BYTES_PER_TOKEN = 4.28
TOOL_BYTES_PER_TOKEN = 3.5

Scale = Literal["small", "full"]


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean and a standard deviation; `long_tail` means log-normal instead of normal."""

    mean: float
    deviation: float = 0.0
    long_tail: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """The planned sizes of one sample.

    A group is the rows that share one long text: a document, a tool list, a video.
    `system_tokens` are shared by all rows, `shared_tokens` by a group, `tail_tokens` belong to
    the row alone. `single_share` (0-1) of the groups have one row only.
    """

    num_rows: int
    rows_per_group: Spread
    shared_tokens: Spread
    tail_tokens: Spread
    system_tokens: int = 0
    single_share: float = 0.0


SHAPES: dict[tuple[str, Scale], Shape] = {
    ("loogle", "full"): Shape(
        num_rows=1951,
        rows_per_group=Spread(18, 8.6),
        shared_tokens=Spread(23_320, 6_105),
        tail_tokens=Spread(140),
        system_tokens=13,
        single_share=0.2,
    ),
    ("loogle", "small"): Shape(
        num_rows=32,
        rows_per_group=Spread(8),
        shared_tokens=Spread(5_500, 1_000),
        tail_tokens=Spread(140),
        system_tokens=13,
    ),
    ("toolbench", "full"): Shape(
        num_rows=210_415,
        rows_per_group=Spread(39, 64, long_tail=True),
        shared_tokens=Spread(1_395, 740, long_tail=True),
        tail_tokens=Spread(200, 50),
        system_tokens=240,
    ),
    ("toolbench", "small"): Shape(
        num_rows=200,
        rows_per_group=Spread(8, 6, long_tail=True),
        shared_tokens=Spread(900, 400, long_tail=True),
        tail_tokens=Spread(120, 30),
        system_tokens=240,
    ),
    ("nextqa", "full"): Shape(
        num_rows=8564,
        rows_per_group=Spread(8.564, 2),
        shared_tokens=Spread(9_790, 5_976, long_tail=True),
        tail_tokens=Spread(75),
    ),
    ("nextqa", "small"): Shape(
        num_rows=200,
        rows_per_group=Spread(8, 2),
        shared_tokens=Spread(900, 400, long_tail=True),
        tail_tokens=Spread(75),
    ),
}


SHUFFLED_GROUPS = 128
"""Rows are shuffled within so many groups: few enough to keep the shared texts in memory."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One row to write: the `index`-th of its group."""

    group: int
    index: int
    tail_tokens: int


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Sizes of every group and row of a sample."""

    seed: int
    system_tokens: int
    group_rows: IntArray
    shared_tokens: IntArray
    tail_tokens: IntArray

    def rows(self) -> Iterator[PlannedRow]:
        """All rows in file order: rows of one group lie apart, but not very far."""
        first_row = 0
        for start in range(0, len(self.group_rows), SHUFFLED_GROUPS):
            window = [
                (group, index)
                for group, num_rows in enumerate(
                    self.group_rows[start : start + SHUFFLED_GROUPS].tolist(), start
                )
                for index in range(num_rows)
            ]
            Random(f"{self.seed} rows {start}").shuffle(window)
            tails = self.tail_tokens[first_row : first_row + len(window)].tolist()
            for (group, index), tail_tokens in zip(window, tails, strict=True):
                yield PlannedRow(group, index, tail_tokens)
            first_row += len(window)


def plan_sample(shape: Shape, *, num_rows: int, seed: int) -> SamplePlan:
    """Draw the sizes of `num_rows` rows of `shape`; the same seed gives the same plan.

    Lengths of groups are scaled so that their mean over rows, not over groups, is the shape's.
    """
    rng = Random(f"{seed} plan")
    group_rows = _group_rows(shape, num_rows, rng)
    shared = np.maximum(_draw(shape.shared_tokens, len(group_rows), rng), 16.0)
    shared *= shape.shared_tokens.mean * num_rows / float(shared @ group_rows)
    tails = np.maximum(_draw(shape.tail_tokens, num_rows, rng), 16.0)
    return SamplePlan(
        seed=seed,
        system_tokens=shape.system_tokens,
        group_rows=group_rows,
        shared_tokens=np.rint(shared).astype(np.int64),
        tail_tokens=np.rint(tails).astype(np.int64),
    )


def _group_rows(shape: Shape, num_rows: int, rng: Random) -> IntArray:
    """Rows of each group: at least one each, `num_rows` in all."""
    num_groups = max(1, round(num_rows / shape.rows_per_group.mean))
    weights = np.maximum(_draw(shape.rows_per_group, num_groups, rng) - 1.0, 0.0)
    weights[: int(shape.single_share * num_groups)] = 0.0
    total = float(weights.sum()) or 1.0
    ends = np.rint(np.cumsum(weights) / total * (num_rows - num_groups)).astype(np.int64)
    group_rows: IntArray = 1 + np.diff(ends, prepend=0)
    group_rows[-1] += num_rows - int(group_rows.sum())
    return group_rows


def _draw(spread: Spread, count: int, rng: Random) -> FloatArray:
    """`count` values at evenly spaced quantiles, in random order: no luck in small samples."""
    quantiles = [(number + 0.5) / count for number in range(count)]
    rng.shuffle(quantiles)
    standard = np.array([NormalDist().inv_cdf(quantile) for quantile in quantiles])
    if not spread.long_tail:
        return spread.mean + spread.deviation * standard
    variance = np.log1p((spread.deviation / spread.mean) ** 2)
    return np.asarray(np.exp(np.log(spread.mean) - variance / 2 + np.sqrt(variance) * standard))


ROW_GROUP_BYTES = 8 * 2**20

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WrittenDataset:
    """What was written: where, how many rows, and the size of the file."""

    path: Path
    num_rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """Whom to tell of written rows, and how many there will be (0 when unknown)."""

    sink: ProgressSink | None = None
    total_rows: int = 0

    def tell(self, num_rows: int) -> None:
        """Report that `num_rows` rows are written."""
        if self.sink is not None:
            self.sink("writing rows", num_rows, self.total_rows)


def write_rows(
    path: Path, schema: pa.Schema, rows: Iterator[Row], *, report: ProgressReport
) -> WrittenDataset:
    """Write `rows`, in the order of the schema's columns, to the Parquet file `path`.

    Holds one row group (8 MiB of text) in memory. The file gets its name when it is complete;
    what was there before is replaced then. Raises InputError when it cannot be written.
    """
    if path.suffix != ".parquet":
        raise InputError(f"{path}: the name of the file to write must end in .parquet")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            num_rows = _write_file(unfinished, schema, rows, report)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{path}: cannot be written: {path.parent} is not a folder") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return WrittenDataset(path, num_rows, path.stat().st_size)


def _write_file(path: Path, schema: pa.Schema, rows: Iterator[Row], report: ProgressReport) -> int:
    num_rows = 0
    # Texts that many rows share are stored once per row group, hence the large dictionary.
    options = {"compression": "zstd", "dictionary_pagesize_limit": ROW_GROUP_BYTES}
    with pq.ParquetWriter(path, schema, store_schema=False, **options) as writer:
        while group := list(_take_group(rows)):
            columns = [
                pa.array(texts, field.type)
                for texts, field in zip(zip(*group, strict=True), schema, strict=True)
            ]
            writer.write_table(pa.table(columns, schema=schema))
            num_rows += len(group)
            report.tell(num_rows)
    return num_rows


def _take_group(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows up to one row group's bytes; none when there are no more."""
    size_bytes = 0
    for row in rows:
        size_bytes += sum(map(len, row))
        yield row
        if size_bytes >= ROW_GROUP_BYTES:
            return
