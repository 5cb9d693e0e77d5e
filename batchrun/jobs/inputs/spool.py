"""Rows read back in the order in which a job was planned, whatever the order of its files.

Where reading in place would be slow, rows are copied to disk in sorted runs, and read back from all
of them at once, also by a daemon that starts again.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import os
import pickle
import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
import zstandard

from batchrun.errors import DataError
from batchrun.files import PRIVATE_MODE, replacing
from batchrun.jobs.inputs.input_data import InputData
from batchrun.jobs.inputs.parquet import SMALL_GROUP_BYTES
from batchrun.jobs.inputs.rows import CACHE_BYTES, Row
from batchrun.pool.prefix_keys import IntArray
from batchrun.types import ProgressSink

log = logging.getLogger(__name__)

_ROW_OVERHEAD_BYTES = 200
"""What a row takes in a dict besides its own bytes."""
_FORMAT = 1
_TRAILER = struct.Struct("<16s16sQQ")
"""The key, the digest of the index, and how many places and ends it has."""


@dataclass(frozen=True, slots=True)
class SpoolSizes:
    """What a spool may hold in memory, in bytes of encoded rows, and how finely it is divided.

    While rows are copied, `buffer_bytes` of them are in memory: half of that is sorted and written
    at a time. A piece holds at most `piece_bytes`, or a single larger row. `cache_bytes` of the
    pieces used last stay in memory; so much direct access to the input keeps too, and where that
    needs more a spool is worth its while.
    """

    buffer_bytes: int = 48 << 20
    piece_bytes: int = 32 << 10
    cache_bytes: int = CACHE_BYTES


DEFAULT_SIZES = SpoolSizes()


class RowSpool:
    """Rows at places 0 to `num_places` - 1, in a file that `write_spool` wrote.

    They lie in runs, each sorted by place and cut into compressed pieces: whoever reads in the
    order of places needs one piece of each run at a time. Used by one thread at a time.
    """

    def __init__(self, file: BinaryIO, index: SpoolIndex, *, cache_bytes: int) -> None:
        self._file, self._index = file, index
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[int, dict[int, bytes]] = OrderedDict()
        self.cached_bytes = 0
        self._decompress = zstandard.ZstdDecompressor().decompress

    @property
    def disk_bytes(self) -> int:
        """Bytes of rows on disk."""
        return int(self._index.ends[-1])

    def read(self, places: IntArray) -> list[Sequence[object]]:
        """The rows at these places. Raises OSError and ZstdError when the disk fails, and what
        `pickle.loads` does of a value that cannot be loaded any more."""
        pieces = zip(places.tolist(), self._index.piece_of[places].tolist(), strict=True)
        # What is unpickled was pickled here: nobody else may write to the file.
        return [pickle.loads(self._piece(piece)[place]) for place, piece in pieces]

    def close(self) -> None:
        """Gives memory back; the file stays."""
        self._cache.clear()
        self._file.close()

    def _piece(self, number: int) -> dict[int, bytes]:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        start, end = self._index.ends[number : number + 2].tolist()
        packed = os.pread(self._file.fileno(), end - start, start)
        piece: dict[int, bytes] = marshal.loads(self._decompress(packed))
        self._cache[number] = piece
        self.cached_bytes += _num_bytes(piece)
        while self.cached_bytes > self._cache_bytes and len(self._cache) > 1:
            self.cached_bytes -= _num_bytes(self._cache.popitem(last=False)[1])
        return piece


@dataclass(frozen=True, slots=True)
class SpoolIndex:
    """`piece_of[place]` is the piece that holds the row; piece i ends at byte `ends[i + 1]`."""

    piece_of: npt.NDArray[np.int32]
    ends: IntArray


def open_spool(path: Path, key: bytes, *, cache_bytes: int) -> RowSpool | None:
    """The spool that was written to `path` under this key of 16 bytes; None where there is none, or
    not a whole one, or one that others may have written to."""
    with contextlib.ExitStack() as on_failure:
        try:
            file = on_failure.enter_context(path.open("rb"))
            index = _read_index(file, key)
        except FileNotFoundError:
            return None
        except OSError as problem:
            log.warning("%s: cannot be read, rows are laid out anew: %s", path, problem)
            return None
        if index is None:
            return None
        on_failure.pop_all()
    return RowSpool(file, index, cache_bytes=cache_bytes)


def _read_index(file: BinaryIO, key: bytes) -> SpoolIndex | None:
    """None where the key is another, the index damaged, or the file not ours alone to write."""
    status = os.fstat(file.fileno())
    end = status.st_size - _TRAILER.size
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or end < 0:
        return None
    its_key, digest, num_places, num_ends = _TRAILER.unpack(
        os.pread(file.fileno(), _TRAILER.size, end)
    )
    start = end - 8 * num_ends - 4 * num_places
    if its_key != key or start < 0:
        return None
    packed = os.pread(file.fileno(), end - start, start)
    if xxhash.xxh3_128_digest(packed) != digest:
        return None
    ends = np.frombuffer(packed, np.int64, num_ends)
    return SpoolIndex(np.frombuffer(packed, np.int32, num_places, ends.nbytes), ends)


def write_spool(
    path: Path,
    key: bytes,
    rows: Iterable[tuple[int, Sequence[object]]],
    num_places: int,
    *,
    sizes: SpoolSizes,
) -> RowSpool:
    """Write a spool to `path`, durably and whole or not at all, and open it.

    `rows` come as (place, values), every place once, in any order. One run is compressed while rows
    of the next are read. Raises OSError when there is no room.
    """
    with contextlib.ExitStack() as on_failure:
        with replacing(path, PRIVATE_MODE) as file:
            writer = _SpoolWriter(file, num_places, sizes.piece_bytes)
            _write_runs(writer, _iter_runs(rows, sizes.buffer_bytes // 2))
            index = writer.write_index(key)
            # Opened before it has its name, which another opening of the job may take.
            reader = on_failure.enter_context(Path(file.name).open("rb"))
        on_failure.pop_all()
    return RowSpool(reader, index, cache_bytes=sizes.cache_bytes)


def _write_runs(writer: _SpoolWriter, runs: Iterable[dict[int, bytes]]) -> None:
    with ThreadPoolExecutor(1) as executor:
        written: Future[None] | None = None
        for run in runs:
            if written is not None:
                written.result()
            written = executor.submit(writer.write_run, run)
        if written is not None:
            written.result()


def _iter_runs(
    rows: Iterable[tuple[int, Sequence[object]]], max_bytes: int
) -> Iterator[dict[int, bytes]]:
    run: dict[int, bytes] = {}
    num_bytes = 0
    for place, values in rows:
        run[place] = pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
        num_bytes += len(run[place]) + _ROW_OVERHEAD_BYTES
        if num_bytes >= max_bytes:
            yield run
            run, num_bytes = {}, 0
    yield run


class _SpoolWriter:
    """Appends runs, then the index of their pieces."""

    def __init__(self, file: BinaryIO, num_places: int, piece_bytes: int) -> None:
        self._file, self._piece_bytes = file, piece_bytes
        self._piece_of = np.zeros(num_places, dtype=np.int32)
        self._ends = array("q", [0])
        self._compress = zstandard.ZstdCompressor(level=1, write_checksum=True).compress

    def write_run(self, run: dict[int, bytes]) -> None:
        piece: dict[int, bytes] = {}
        num_bytes = 0
        for place in sorted(run):
            row_bytes = len(run[place]) + _ROW_OVERHEAD_BYTES
            if piece and num_bytes + row_bytes > self._piece_bytes:
                self._write_piece(piece)
                piece, num_bytes = {}, 0
            piece[place] = run[place]
            num_bytes += row_bytes
        if piece:
            self._write_piece(piece)

    def write_index(self, key: bytes) -> SpoolIndex:
        ends = np.array(self._ends, dtype=np.int64)
        digest = xxhash.xxh3_128()
        for part in (ends.data, self._piece_of.data):
            digest.update(part)
            self._file.write(part)
        self._file.write(_TRAILER.pack(key, digest.digest(), len(self._piece_of), len(ends)))
        return SpoolIndex(self._piece_of, ends)

    def _write_piece(self, piece: dict[int, bytes]) -> None:
        packed = self._compress(marshal.dumps(piece))
        self._file.write(packed)
        self._piece_of[list(piece)] = len(self._ends) - 1
        self._ends.append(self._ends[-1] + len(packed))


def _num_bytes(piece: dict[int, bytes]) -> int:
    return sum(map(len, piece.values())) + len(piece) * _ROW_OVERHEAD_BYTES


MAX_LOADS_PER_CHUNK = 2
"""A spool decodes every chunk once, writes it and reads that: direct access may cost as much."""
_MAX_FULL_CACHES = 8
"""Each file that is read directly keeps a cache of its own; more of them hold too much memory."""
_BLOCK_STEPS = 1 << 16


@dataclass(frozen=True, slots=True)
class KeptCopy:
    """Where a copy of rows is kept; `source` names the input and what is read of it."""

    path: Path
    source: bytes


_DISK_FAILURES = (OSError, zstandard.ZstdError, OverflowError)
_READ_FAILURES = (
    *_DISK_FAILURES,
    pickle.UnpicklingError,
    ValueError,
    EOFError,
    TypeError,
    LookupError,
    ImportError,
    AttributeError,
)
"""Of the disk, and of loading a value that this process did not write."""


class PlannedRows:
    """Random access to an input that is quick where `order`, which has all its rows, is followed.

    Inputs whose chunks that order visits few times, as those of text files, are read as
    `InputData.read_rows` does. Otherwise all rows are copied once, to the file of `copy`, which
    stays: from the same source they are not copied again. Used by one thread at a time.

    Raises DataError, one line, when the input cannot be read, or there is no room for the copy.
    """

    def __init__(
        self,
        data: InputData,
        columns: Sequence[str],
        order: IntArray,
        copy: KeptCopy,
        *,
        sizes: SpoolSizes = DEFAULT_SIZES,
        progress: ProgressSink | None = None,
    ) -> None:
        self._data, self._columns, self._copy = data, tuple(columns), copy.path
        self._spool: RowSpool | None = None
        if not columns:
            return
        key = _key(copy.source, self._columns, order)
        self._spool = open_spool(copy.path, key, cache_bytes=sizes.cache_bytes)
        if self._spool is None:
            with contextlib.suppress(OSError):
                copy.path.unlink()
            if _is_direct_quick(data.chunk_sizes(columns), order, sizes.cache_bytes):
                return
        self._places = np.empty(len(order), dtype=np.int64)
        self._places[order] = np.arange(len(order))
        if self._spool is None:
            with self._explained(f"no copy of its rows in {copy.path.parent}", _DISK_FAILURES):
                rows = self._iter_placed(progress)
                self._spool = write_spool(copy.path, key, rows, len(order), sizes=sizes)

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
        problem = f"its copy {self._copy}, made anew at `batchrun resume`, is damaged"
        with self._explained(problem, _READ_FAILURES):
            try:
                found = self._spool.read(self._places[wanted])
            except _READ_FAILURES:
                with contextlib.suppress(OSError):
                    self._copy.unlink()
                raise
        self._data.refuse_changed(rows)
        return [dict(zip(self._columns, values, strict=True)) for values in found]

    def close(self) -> None:
        """Gives memory back; the copy stays, and the input open."""
        if self._spool is not None:
            self._spool.close()

    def _iter_placed(self, progress: ProgressSink | None) -> Iterator[tuple[int, Sequence[object]]]:
        """(place, values) of all rows, in the order of the files."""
        for first_row, rows in self._data.iter_rows(self._columns):
            end = first_row + len(rows)
            places = self._places[first_row:end].tolist()
            yield from zip(places, (tuple(row.values()) for row in rows), strict=True)
            if progress is not None:
                progress("laying rows out", end, self._data.num_rows)

    @contextlib.contextmanager
    def _explained(self, problem: str, failures: tuple[type[Exception], ...]) -> Iterator[None]:
        try:
            yield
        except failures as failure:
            reason = getattr(failure, "strerror", None) or " ".join(str(failure).split())[:300]
            (first, *_), *others = self._data.places()
            more = f" and {len(others)} more" if others else ""
            raise DataError(f"{first}{more}: {problem}: {reason}") from None


def _key(source: bytes, columns: Sequence[str], order: IntArray) -> bytes:
    """16 bytes for what a copy holds, and for who can read it."""
    readers = (_FORMAT, sys.implementation.cache_tag, pa.__version__)
    digest = xxhash.xxh3_128(repr((source, columns, readers)).encode())
    digest.update(np.ascontiguousarray(order).data)
    return digest.digest()


def _is_direct_quick(
    files: Sequence[Sequence[tuple[int, int]]], order: IntArray, cache_bytes: int
) -> bool:
    """Whether direct access in this order costs no more than a spool; `files` holds the rows and
    bytes of what it decodes at a time."""
    num_rows, num_bytes = np.array([chunk for chunks in files for chunk in chunks]).T
    file_bytes = [sum(num_bytes for _, num_bytes in chunks) for chunks in files]
    if num_bytes.max() > SMALL_GROUP_BYTES:
        return False
    if np.minimum(file_bytes, cache_bytes).sum() > _MAX_FULL_CACHES * cache_bytes:
        return False
    capacity = max(1, int(cache_bytes // max(num_bytes.mean(), 1)))
    limit = MAX_LOADS_PER_CHUNK * len(num_rows)
    visited = np.searchsorted(np.cumsum(num_rows), order, side="right")
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
