"""Rows read back in the order in which a job was planned, whatever the order of its files.

Where reading in place would be slow, rows are copied to disk in buckets, read back one at a time.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchrun.errors import DataError
from batchrun.jobs.inputs.input_data import InputData
from batchrun.jobs.inputs.parquet import ParquetInput
from batchrun.jobs.inputs.rows import BATCH_BYTES, CACHE_BYTES, Row, native_rows
from batchrun.pool.prefix_keys import IntArray
from batchrun.types import ProgressSink

PLACE_FIELD = pa.field("place", pa.int64())
"""The first column of what a spool takes in: where the row stands in the order."""

_NUM_OPEN_CHILDREN = 2


@dataclass(frozen=True, slots=True)
class SpoolSizes:
    """What a spool may hold in memory, in decoded bytes, and how finely it is divided.

    A bucket holds about `bucket_bytes` and never more than twice that, but for a single larger
    row; the last `num_cached` stay in memory. While rows are copied, `buffer_bytes` of them wait
    for their turn. A file is divided into at most `max_buckets`. `cache_bytes`: what direct access
    to the input keeps; more makes a spool worth its while.
    """

    bucket_bytes: int = 24 << 20
    buffer_bytes: int = 48 << 20
    max_buckets: int = 1024
    num_cached: int = 3
    cache_bytes: int = CACHE_BYTES


DEFAULT_SIZES = SpoolSizes()


class RowSpool:
    """Rows at places 0 to `num_places` - 1, in unlinked files: a crash leaves nothing behind.

    `batches` have the fields of `schema`, `PLACE_FIELD` first and no dictionaries; every place
    comes once, in any order. `num_bytes` says about how much they are. Memory while they are
    copied: `sizes.buffer_bytes` and a few batches. Raises OSError when there is no room in
    `folder` (None: the system's temporary folder). Used by one thread at a time.
    """

    def __init__(
        self,
        batches: Iterable[pa.RecordBatch],
        schema: pa.Schema,
        *,
        num_places: int,
        num_bytes: int,
        sizes: SpoolSizes,
        folder: Path | None,
    ) -> None:
        bounds = _bounds(range(num_places), num_bytes, sizes)
        self._level = _Level(batches, schema, bounds, sizes, folder)
        self._num_cached = sizes.num_cached
        self._cache: OrderedDict[int, _Bucket] = OrderedDict()

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk, without the copies of large buckets."""
        return self._level.disk_bytes

    def read(self, places: IntArray) -> Iterator[tuple[IntArray, pa.RecordBatch]]:
        """(indexes into `places`, their rows without the place), bucket after bucket.

        Raises OSError or ArrowException when the disk fails, or has no room to divide a bucket.
        """
        indexes = np.argsort(places, kind="stable")
        while len(indexes):
            bucket = self._bucket(int(places[indexes[0]]))
            num_here = int(np.searchsorted(places[indexes], bucket.places.stop))
            here, indexes = indexes[:num_here], indexes[num_here:]
            yield here, bucket.take(places[here])

    def close(self) -> None:
        """Gives memory and disk back."""
        self._cache.clear()
        self._level.close()

    def _bucket(self, place: int) -> _Bucket:
        for first, bucket in self._cache.items():
            if place in bucket.places:
                self._cache.move_to_end(first)
                return bucket
        while len(self._cache) >= self._num_cached:
            self._cache.popitem(last=False)
        bucket = self._level.read(place)
        self._cache[bucket.places.start] = bucket
        return bucket


class _Bucket:
    """The rows of consecutive places, decoded."""

    def __init__(self, places: range, table: pa.Table) -> None:
        self.places = places
        self._rows: pa.RecordBatch = table.drop_columns([PLACE_FIELD.name]).to_batches()[0]
        self._offsets = np.empty(len(places), dtype=np.int64)
        found = table.column(PLACE_FIELD.name).to_numpy() - places.start
        self._offsets[found] = np.arange(table.num_rows)

    def take(self, places: IntArray) -> pa.RecordBatch:
        """Copies of the rows at these places, in the order given."""
        return self._rows.take(pa.array(self._offsets[places - self.places.start]))


class _Level:
    """One file of many small record batches, each of a single bucket.

    Bucket b holds the places from `bounds[b]` up to `bounds[b + 1]`. One that came out too large
    becomes a level of its own when it is first read, and stays one while it is in use.
    """

    def __init__(
        self,
        batches: Iterable[pa.RecordBatch],
        schema: pa.Schema,
        bounds: IntArray,
        sizes: SpoolSizes,
        folder: Path | None,
    ) -> None:
        self._schema, self._bounds, self._sizes, self._folder = schema, bounds, sizes, folder
        self._batch_numbers: list[list[int]] = [[] for _ in bounds[1:]]
        self._num_bytes = np.zeros(len(bounds) - 1, dtype=np.int64)
        self._num_batches = 0
        self._children: OrderedDict[int, _Level] = OrderedDict()
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the spool
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._fill(batches)
            self._file.flush()
            self.disk_bytes = self._file.tell()
            self._file.seek(0)
            options = pa.ipc.IpcReadOptions(use_threads=False)
            self._reader = pa.ipc.open_file(self._file, options=options)
            on_failure.pop_all()

    def read(self, place: int) -> _Bucket:
        """The bucket with this place; divides one that is too large."""
        index = int(np.searchsorted(self._bounds, place, side="right")) - 1
        places = range(int(self._bounds[index]), int(self._bounds[index + 1]))
        if self._num_bytes[index] > 2 * self._sizes.bucket_bytes and len(places) > 1:
            return self._child(index, places).read(place)
        table = pa.Table.from_batches(self._batches_of(index), schema=self._schema)
        return _Bucket(places, table.combine_chunks())

    def close(self) -> None:
        """Gives the disk back."""
        for child in self._children.values():
            child.close()
        self._children.clear()
        # With no room on the disk, what is left in the file's buffer cannot be written either.
        with contextlib.suppress(OSError):
            self._file.close()

    def _child(self, index: int, places: range) -> _Level:
        if index not in self._children:
            while len(self._children) >= _NUM_OPEN_CHILDREN:
                self._children.popitem(last=False)[1].close()
            bounds = _bounds(places, int(self._num_bytes[index]), self._sizes)
            batches = self._batches_of(index)
            self._children[index] = _Level(batches, self._schema, bounds, self._sizes, self._folder)
        self._children.move_to_end(index)
        return self._children[index]

    def _batches_of(self, index: int) -> Iterator[pa.RecordBatch]:
        return map(self._reader.get_batch, self._batch_numbers[index])

    def _fill(self, batches: Iterable[pa.RecordBatch]) -> None:
        options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
        waiting: dict[int, list[pa.RecordBatch]] = {}
        waiting_bytes = 0
        with pa.ipc.new_file(self._file, self._schema, options=options) as writer:
            for batch in batches:
                for index, part in self._divided(batch):
                    waiting.setdefault(index, []).append(part)
                waiting_bytes += batch.nbytes
                if waiting_bytes >= self._sizes.buffer_bytes:
                    self._write(writer, waiting)
                    waiting_bytes = 0
            self._write(writer, waiting)

    def _divided(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(bucket, its rows) of a batch; each bucket once."""
        owners = np.searchsorted(self._bounds, batch.column(0).to_numpy(), side="right") - 1
        order = np.argsort(owners, kind="stable")
        together = batch.take(pa.array(order))
        indexes, firsts = np.unique(owners[order], return_index=True)
        lengths = np.diff(firsts, append=len(order))
        for index, first, length in zip(indexes.tolist(), firsts, lengths, strict=True):
            yield index, together.slice(first, length)

    def _write(
        self, writer: pa.RecordBatchFileWriter, waiting: dict[int, list[pa.RecordBatch]]
    ) -> None:
        """Writes what waits, a batch for each bucket, and forgets it."""
        for index in sorted(waiting):
            parts = waiting.pop(index)
            num_bytes = sum(part.nbytes for part in parts)
            if num_bytes <= BATCH_BYTES:
                parts = pa.Table.from_batches(parts).combine_chunks().to_batches()
            for part in parts:
                writer.write_batch(part)
                self._batch_numbers[index].append(self._num_batches)
                self._num_batches += 1
            self._num_bytes[index] += num_bytes


def _bounds(places: range, num_bytes: int, sizes: SpoolSizes) -> IntArray:
    """Where buckets of equal numbers of places begin, and where the last ends."""
    num_wanted = min(-(-num_bytes // sizes.bucket_bytes), sizes.max_buckets, len(places))
    num_buckets = max(num_wanted, 1)
    return places.start + np.arange(num_buckets + 1) * len(places) // num_buckets


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
