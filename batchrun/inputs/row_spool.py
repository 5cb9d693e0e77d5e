"""Rows of a stream, kept on disk in another order: buckets that are read back one at a time."""

from __future__ import annotations

import contextlib
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchrun.inputs.base import BATCH_BYTES
from batchrun.inputs.chunks import CACHE_BYTES
from batchrun.pool import IntArray

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
