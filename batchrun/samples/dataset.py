"""The data sets: their columns, the sizes of a sample, and the Parquet file that rows go into.

A sample is planned before any text is made: which rows share what, and how long each part is. The
full scale has the sizes of table 1 of the Preble paper (number of requests, mean prompt length,
share of the prompt that earlier requests had already); the small one is cut down for a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchrun.errors import InputError
from batchrun.files import atomic_file
from batchrun.types import ProgressSink

DatasetName = Literal["loogle", "toolbench", "nextqa"]
Scale = Literal["small", "full"]


def _texts(*names: str) -> pa.Schema:
    return pa.schema([pa.field(name, pa.string(), nullable=False) for name in names])


SCHEMAS: dict[DatasetName, pa.Schema] = {
    "loogle": _texts("id", "document_id", "title", "document", "question", "answer", "task"),
    "toolbench": _texts("id", "system", "tools", "query", "answer"),
    "nextqa": _texts("id", "video_id", "video", "question", "a0", "a1", "a2", "a3", "a4", "answer"),
}

PROSE_BYTES_PER_TOKEN = 4.28
"""Between the tiny model's tokenizer (4.19) and the rule of 1.3 tokens to a word (4.38)."""
TOOL_BYTES_PER_TOKEN = 3.5
"""As the tiny model's tokenizer has it."""


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


def _tailed(mean: float, deviation: float) -> Spread:
    return Spread(mean, deviation, long_tail=True)


SHAPES: dict[tuple[DatasetName, Scale], Shape] = {
    ("loogle", "full"): Shape(1951, Spread(18, 8.6), Spread(23_320, 6_105), Spread(140), 13, 0.2),
    ("loogle", "small"): Shape(32, Spread(8), Spread(5_500, 1_000), Spread(140), 13),
    ("toolbench", "full"): Shape(
        210_415, _tailed(39, 64), _tailed(1_395, 740), Spread(200, 50), 240
    ),
    ("toolbench", "small"): Shape(200, _tailed(8, 6), _tailed(900, 400), Spread(120, 30), 240),
    ("nextqa", "full"): Shape(8564, Spread(8.564, 2), _tailed(9_790, 5_976), Spread(75)),
    ("nextqa", "small"): Shape(200, Spread(8, 2), _tailed(900, 400), Spread(75)),
}
"""Rows, rows of a group, shared tokens, tail tokens, system tokens, share of groups of one row."""

SHUFFLED_GROUPS = 128
"""Rows are shuffled within so many groups: few enough to keep the shared texts in memory."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class PlannedRow(NamedTuple):
    """One row to write: `number` within its group."""

    group: int
    number: int
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


def write_rows(
    path: Path,
    schema: pa.Schema,
    rows: Iterator[Row],
    *,
    total_rows: int = 0,
    progress: ProgressSink | None = None,
) -> WrittenDataset:
    """Write `rows`, in the order of the schema's columns, to the Parquet file `path`.

    `progress` is shown `total_rows`, 0 where it is unknown. Holds one row group (8 MiB of text) in
    memory. The file gets its name when it is complete; what was there before is replaced then.
    Raises InputError when it cannot be written, StoreFullError when there is no room.
    """
    if path.suffix != ".parquet":
        raise InputError(f"{path}: the name of the file to write must end in .parquet")
    if path.parent.exists() and not path.parent.is_dir():
        raise InputError(f"{path}: cannot be written: {path.parent} is not a folder")
    num_rows = 0
    # Texts that many rows share are stored once per row group, hence the large dictionary.
    options = {"compression": "zstd", "dictionary_pagesize_limit": ROW_GROUP_BYTES}
    with (
        atomic_file(path) as file,
        pq.ParquetWriter(file, schema, store_schema=False, **options) as writer,
    ):
        while group := list(_take_group(rows)):
            columns = [
                pa.array(texts, field.type)
                for texts, field in zip(zip(*group, strict=True), schema, strict=True)
            ]
            writer.write_table(pa.table(columns, schema=schema))
            num_rows += len(group)
            if progress is not None:
                progress("writing rows", num_rows, total_rows)
    return WrittenDataset(path, num_rows, path.stat().st_size)


def _take_group(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows up to one row group's bytes; none when there are no more."""
    size_bytes = 0
    for row in rows:
        size_bytes += sum(map(len, row))
        yield row
        if size_bytes >= ROW_GROUP_BYTES:
            return
