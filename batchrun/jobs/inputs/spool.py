"""Rows read back in the order in which a job was planned, whatever the order of its files.

Where reading in place would be slow, rows are copied to disk in sorted runs, and read back from all
of them at once.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import tempfile
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

from batchrun.errors import DataError
from batchrun.jobs.inputs.input_data import InputData
from batchrun.jobs.inputs.parquet import SMALL_GROUP_BYTES
from batchrun.jobs.inputs.rows import CACHE_BYTES, Row
from batchrun.pool.prefix_keys import IntArray
from batchrun.types import ProgressSink

_ROW_OVERHEAD_BYTES = 200
"""What a row takes in a dict besides its own bytes."""


@dataclass(frozen=True, slots=True)
class SpoolSizes:
    """What a spool may hold in memory, in bytes of encoded rows, and how finely it is divided.

    While rows are copied, `buffer_bytes` of them wait to be sorted. A piece holds `piece_bytes`, or
    a single larger row. `cache_bytes` of the pieces used last stay in memory; so much direct access
    to the input keeps too, and where that needs more a spool is worth its while.
    """

    buffer_bytes: int = 48 << 20
    piece_bytes: int = 64 << 10
    cache_bytes: int = CACHE_BYTES


DEFAULT_SIZES = SpoolSizes()


class RowSpool:
    """Rows at places 0 to `num_places` - 1, in an unlinked file: a crash leaves nothing behind.

    `rows` come as (place, values), every place once, in any order. They are written in runs, each
    sorted by place and cut into compressed pieces: whoever reads in the order of places needs one
    piece of each run at a time. Raises OSError when there is no room in `folder` (None: the
    system's temporary folder). Used by one thread at a time.
    """

    def __init__(
        self,
        rows: Iterable[tuple[int, Sequence[object]]],
        num_places: int,
        *,
        sizes: SpoolSizes,
        folder: Path | None,
    ) -> None:
        self._sizes = sizes
        self._piece_of = np.zeros(num_places, dtype=np.int32)
        self._ends = array("q", [0])
        self._cache: OrderedDict[int, dict[int, bytes]] = OrderedDict()
        self.cached_bytes = 0
        self._compress = zstandard.ZstdCompressor(level=1, write_checksum=True).compress
        self._decompress = zstandard.ZstdDecompressor().decompress
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - open as long as the spool
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._write(rows)
            self._file.flush()
            on_failure.pop_all()

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return self._ends[-1]

    def read(self, places: IntArray) -> list[Sequence[object]]:
        """The rows at these places. Raises OSError or ZstdError when the disk fails."""
        pieces = zip(places.tolist(), self._piece_of[places].tolist(), strict=True)
        # What is unpickled was pickled here, and no other process can reach the file.
        return [pickle.loads(self._piece(piece)[place]) for place, piece in pieces]

    def close(self) -> None:
        """Gives memory and disk back."""
        self._cache.clear()
        # With no room on the disk, what is left in the file's buffer cannot be written either.
        with contextlib.suppress(OSError):
            self._file.close()

    def _piece(self, number: int) -> dict[int, bytes]:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        start, end = self._ends[number], self._ends[number + 1]
        packed = os.pread(self._file.fileno(), end - start, start)
        piece: dict[int, bytes] = marshal.loads(self._decompress(packed))
        self._cache[number] = piece
        self.cached_bytes += _num_bytes(piece)
        while self.cached_bytes > self._sizes.cache_bytes and len(self._cache) > 1:
            self.cached_bytes -= _num_bytes(self._cache.popitem(last=False)[1])
        return piece

    def _write(self, rows: Iterable[tuple[int, Sequence[object]]]) -> None:
        run: dict[int, bytes] = {}
        num_bytes = 0
        for place, values in rows:
            run[place] = pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
            num_bytes += len(run[place]) + _ROW_OVERHEAD_BYTES
            if num_bytes >= self._sizes.buffer_bytes:
                self._write_run(run)
                run, num_bytes = {}, 0
        self._write_run(run)

    def _write_run(self, run: dict[int, bytes]) -> None:
        piece: dict[int, bytes] = {}
        num_bytes = 0
        for place in sorted(run):
            piece[place] = run[place]
            num_bytes += len(run[place]) + _ROW_OVERHEAD_BYTES
            if num_bytes >= self._sizes.piece_bytes:
                self._write_piece(piece)
                piece, num_bytes = {}, 0
        if piece:
            self._write_piece(piece)

    def _write_piece(self, piece: dict[int, bytes]) -> None:
        packed = self._compress(marshal.dumps(piece))
        self._file.write(packed)
        self._piece_of[list(piece)] = len(self._ends) - 1
        self._ends.append(self._ends[-1] + len(packed))


def _num_bytes(piece: dict[int, bytes]) -> int:
    return sum(map(len, piece.values())) + len(piece) * _ROW_OVERHEAD_BYTES


_MAX_LOADS_PER_CHUNK = 2
"""A spool decodes every chunk once, writes it and reads that: direct access may cost as much."""
_MAX_FULL_CACHES = 8
"""Each file that is read directly keeps a cache of its own; more of them hold too much memory."""
_BLOCK_STEPS = 1 << 16


class PlannedRows:
    """Random access to an input that is quick where `order`, which has all its rows, is followed.

    Inputs whose chunks that order visits few times, as those of text files, are read as
    `InputData.read_rows` does. Otherwise all rows are copied once, when this is made, to an
    unlinked file in `scratch` (None: the system's temporary folder); a crash leaves nothing behind.
    Used by one thread at a time.

    Raises DataError, one line, when the input cannot be read, or there is no room for the copy.
    """

    def __init__(
        self,
        data: InputData,
        columns: Sequence[str],
        order: IntArray,
        *,
        scratch: Path | None,
        sizes: SpoolSizes = DEFAULT_SIZES,
        progress: ProgressSink | None = None,
    ) -> None:
        self._data, self._columns, self._folder = data, tuple(columns), scratch
        self._spool: RowSpool | None = None
        if not columns or _is_direct_quick(data.chunk_sizes(columns), order, sizes.cache_bytes):
            return
        self._places = np.empty(len(order), dtype=np.int64)
        self._places[order] = np.arange(len(order))
        with self._explained(f"no copy of its rows in {scratch or tempfile.gettempdir()}"):
            rows = self._iter_placed(progress)
            self._spool = RowSpool(rows, len(order), sizes=sizes, folder=scratch)

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
        with self._explained(f"its copy in {self._folder or tempfile.gettempdir()} cannot be read"):
            found = self._spool.read(self._places[wanted])
        return [dict(zip(self._columns, values, strict=True)) for values in found]

    def close(self) -> None:
        """Gives the copy's memory and disk back; the input stays open."""
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
    def _explained(self, problem: str) -> Iterator[None]:
        try:
            yield
        except (OSError, zstandard.ZstdError, OverflowError) as failure:
            reason = getattr(failure, "strerror", None) or " ".join(str(failure).split())[:300]
            (first, *_), *others = self._data.places()
            more = f" and {len(others)} more" if others else ""
            raise DataError(f"{first}{more}: {problem}: {reason}") from None


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
    limit = _MAX_LOADS_PER_CHUNK * len(num_rows)
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
