"""Rows read back in the order in which a job was planned, whatever the order of its files."""

from __future__ import annotations

import contextlib
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchrun.errors import DataError
from batchrun.inputs.base import BATCH_BYTES, Row
from batchrun.inputs.data import InputData
from batchrun.inputs.native import native_rows
from batchrun.inputs.parquet import ParquetInput
from batchrun.inputs.row_spool import DEFAULT_SIZES, PLACE_FIELD, RowSpool, SpoolSizes
from batchrun.pool import IntArray
from batchrun.types import ProgressSink

_Files = Sequence[tuple[int, ParquetInput]]

_MAX_LOADS_PER_CHUNK = 2
"""A spool decodes every chunk once, writes it and reads that: direct access may cost as much."""
_MAX_FULL_CACHES = 8
"""Each file that is read directly keeps a cache of its own; more of them hold too much memory."""
_BLOCK_STEPS = 1 << 16


class PlannedRows:
    """Random access to an input that is quick where `rows`, the planned order, is followed.

    Text files, and Parquet files whose chunks that order visits few times, are read as
    `InputData.read_rows` does. Otherwise the Parquet rows of the order are copied once, when this
    is made, to unlinked files in `scratch` (None: the system's temporary folder); a crash leaves
    nothing behind. A row comes at most once in `rows`; one that does not can be read too, at the
    price of direct access. Used by one thread at a time.

    Raises DataError, one line, when the input cannot be read, or there is no room for the copy.
    """

    def __init__(
        self,
        data: InputData,
        columns: Sequence[str],
        rows: IntArray,
        *,
        scratch: Path | None,
        sizes: SpoolSizes = DEFAULT_SIZES,
        progress: ProgressSink | None = None,
    ) -> None:
        self._data, self._columns, self._folder = data, tuple(columns), scratch
        self._files = data.chunked_files() if columns else []
        self._spool: RowSpool | None = None
        chunks = _Chunks(self._files, self._columns)
        copied = rows[chunks.hold(rows)]
        if chunks.suit(copied, sizes.cache_bytes):
            return
        self._places = np.full(data.num_rows, -1, dtype=np.int64)
        self._places[copied] = np.arange(len(copied))
        self._types = _FileTypes(self._files, self._columns)
        with self._telling(f"no copy of its rows in {scratch or tempfile.gettempdir()}"):
            self._spool = RowSpool(
                self._placed_batches(progress),
                self._types.schema,
                num_places=len(copied),
                num_bytes=chunks.bytes_of(len(copied)),
                sizes=sizes,
                folder=scratch,
            )

    @property
    def spool_bytes(self) -> int | None:
        """Bytes of the copy on disk; None where rows are read from the input."""
        return None if self._spool is None else self._spool.disk_bytes

    def read_rows(self, rows: Sequence[int]) -> list[Row]:
        """The given rows in the order given, with the values of `InputData.read_rows`.

        Raises IndexError out of range, DataError when the input or the copy cannot be read.
        """
        wanted = np.asarray(rows, dtype=np.int64)
        if self._spool is None or not len(wanted):
            return self._data.read_rows(rows, self._columns)
        if not 0 <= wanted.min() <= wanted.max() < len(self._places):
            raise IndexError(f"rows must lie within 0 and {len(self._places) - 1}")
        places = self._places[wanted]
        found: dict[int, Row] = {}
        direct, copied = np.flatnonzero(places < 0), np.flatnonzero(places >= 0)
        if len(direct):
            values = self._data.read_rows(wanted[direct].tolist(), self._columns)
            found.update(zip(direct.tolist(), values, strict=True))
        with self._telling(f"its copy in {self._folder or tempfile.gettempdir()} cannot be read"):
            for indexes, batch in self._spool.read(places[copied]):
                here = copied[indexes]
                values = self._types.native(batch, wanted[here])
                found.update(zip(here.tolist(), values, strict=True))
        return [found[index] for index in range(len(rows))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the copy's memory and disk back; the input stays open."""
        if self._spool is not None:
            self._spool.close()

    def _placed_batches(self, progress: ProgressSink | None) -> Iterator[pa.RecordBatch]:
        """All rows of the order in file order, with their places in front."""
        for index, (first, file) in enumerate(self._files):
            schema = file.schema(self._columns)
            for start, batch in file.iter_batches(self._columns, schema, BATCH_BYTES):
                row = first + start
                places = self._places[row : row + batch.num_rows]
                placed = self._types.placed(index, places, batch)
                yield placed if places.min() >= 0 else placed.filter(pa.array(places >= 0))
                if progress is not None:
                    progress("laying rows out", row + batch.num_rows, self._data.num_rows)

    @contextlib.contextmanager
    def _telling(self, problem: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, UnicodeDecodeError, OverflowError) as failure:
            reason = getattr(failure, "strerror", None) or " ".join(str(failure).split())[:300]
            more = f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
            raise DataError(f"{self._files[0][1].path}{more}: {problem}: {reason}") from None


class _FileTypes:
    """One schema for files whose columns may differ in type: a field for each type of a column.

    Rows keep the types of their own file, since whole numbers in one and floats in another give
    different values. The fields that are not a row's own are null.
    """

    def __init__(self, files: _Files, columns: Sequence[str]) -> None:
        self._columns = list(columns)
        self._firsts = np.array([first for first, _ in files], dtype=np.int64)
        numbers: dict[tuple[str, pa.DataType], int] = {}
        self._choices: list[tuple[int, ...]] = []
        for _, file in files:
            keys = [(field.name, _without_dictionary(field.type)) for field in file.schema(columns)]
            choice = tuple(numbers.setdefault(key, len(numbers) + 1) for key in keys)
            self._choices.append(choice)
        fields = [pa.field(str(number), kind) for (_, kind), number in numbers.items()]
        self.schema = pa.schema([PLACE_FIELD, *fields])
        self._distinct = sorted(set(self._choices))
        self._kinds = np.array([self._distinct.index(choice) for choice in self._choices])

    def placed(self, file: int, places: IntArray, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of a file (by its index) in the common schema, with its places in front."""
        arrays = [pa.nulls(batch.num_rows, field.type) for field in self.schema]
        for number, array in zip(self._choices[file], batch.columns, strict=True):
            kind = self.schema.field(number).type
            arrays[number] = array if array.type == kind else array.cast(kind)
        return pa.RecordBatch.from_arrays([pa.array(places), *arrays[1:]], schema=self.schema)

    def native(self, batch: pa.RecordBatch, rows: IntArray) -> list[Row]:
        """A batch of the common schema without places, which holds these rows of the input."""
        kinds = self._kinds[np.searchsorted(self._firsts, rows, side="right") - 1]
        found: dict[int, Row] = {}
        for kind in np.unique(kinds).tolist():
            here = np.flatnonzero(kinds == kind)
            part = batch if len(here) == len(rows) else batch.take(pa.array(here))
            arrays = [part.column(number - 1) for number in self._distinct[kind]]
            values = native_rows(pa.RecordBatch.from_arrays(arrays, names=self._columns))
            found.update(zip(here.tolist(), values, strict=True))
        return [found[index] for index in range(len(rows))]


class _Chunks:
    """What direct access decodes at a time: the rows and bytes of each chunk, file after file."""

    def __init__(self, files: _Files, columns: Sequence[str]) -> None:
        self._firsts = np.array([first for first, _ in files], dtype=np.int64)
        self._ends = self._firsts + [file.num_rows for _, file in files]
        starts: list[int] = []
        sizes: list[int] = []
        for first, file in files:
            for num_rows, num_bytes in file.chunk_sizes(columns):
                starts.append(first)
                sizes.append(num_bytes)
                first += num_rows
        self._starts = np.array(starts, dtype=np.int64)
        self._num_bytes = np.array(sizes, dtype=np.int64)

    def hold(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Which of these rows lie in chunks."""
        if not len(self._firsts):
            return np.zeros(len(rows), dtype=np.bool_)
        owners = np.searchsorted(self._firsts, rows, side="right") - 1
        is_held: npt.NDArray[np.bool_] = (owners >= 0) & (rows < self._ends[owners])
        return is_held

    def bytes_of(self, num_rows: int) -> int:
        """About how much so many rows decode to."""
        num_all = int((self._ends - self._firsts).sum())
        return int(self._num_bytes.sum() * num_rows / num_all)

    def suit(self, rows: IntArray, cache_bytes: int) -> bool:
        """Whether direct access to these rows, in this order, costs no more than a spool."""
        if not len(rows):
            return True
        owners = np.searchsorted(self._firsts, self._starts, side="right") - 1
        file_bytes = np.bincount(owners, weights=self._num_bytes)
        if np.minimum(file_bytes, cache_bytes).sum() > _MAX_FULL_CACHES * cache_bytes:
            return False
        capacity = max(1, int(cache_bytes // max(self._num_bytes.mean(), 1)))
        limit = _MAX_LOADS_PER_CHUNK * len(self._starts)
        visited = np.searchsorted(self._starts, rows, side="right") - 1
        return count_loads(visited, capacity, limit) <= limit


def count_loads(chunks: IntArray, capacity: int, limit: int) -> int:
    """Loads of a cache that keeps the `capacity` chunks used last, over this sequence of chunks.

    Counts no further than a while after `limit`. A plain loop takes 0.2 to 0.7 us a step; counting
    stack distances in arrays took two to eight times that.
    """
    steps = chunks[np.flatnonzero(np.diff(chunks, prepend=-1))]
    cached: OrderedDict[int, None] = OrderedDict()
    num_loads = 0
    for start in range(0, len(steps), _BLOCK_STEPS):
        for chunk in steps[start : start + _BLOCK_STEPS].tolist():
            if chunk in cached:
                cached.move_to_end(chunk)
                continue
            num_loads += 1
            cached[chunk] = None
            if len(cached) > capacity:
                cached.popitem(last=False)
        if num_loads > limit:
            break
    return num_loads


def _without_dictionary(kind: pa.DataType) -> pa.DataType:
    """The type of the values themselves: an IPC file cannot change its dictionaries."""
    types = pa.types
    if types.is_dictionary(kind):
        return _without_dictionary(kind.value_type)
    if types.is_list(kind):
        return pa.list_(_field_without_dictionary(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(_field_without_dictionary(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_field_without_dictionary(kind.value_field), kind.list_size)
    if types.is_struct(kind):
        return pa.struct([_field_without_dictionary(field) for field in kind])
    return kind


def _field_without_dictionary(field: pa.Field) -> pa.Field:
    return field.with_type(_without_dictionary(field.type))
