"""Where each record of a text file begins and ends, found without parsing the records."""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import zstandard

from batchrun.errors import DataError
from batchrun.inputs.base import ROW_LIMIT_BYTES, is_blank

_BLOCK_BYTES = 4 << 20
_BOM = b"\xef\xbb\xbf"
_PEEK_BYTES = 4096
_Offsets = npt.NDArray[np.int64]
_MAY_BEGIN_BLANK = np.array([is_blank(bytes([octet])) for octet in range(256)])


@dataclass(frozen=True, slots=True)
class LineIndex:
    """Half-open byte ranges of the records that are not blank, in file order."""

    starts: _Offsets
    ends: _Offsets

    def __len__(self) -> int:
        return len(self.starts)

    def without_first(self) -> LineIndex:
        """The index without its first record (a header)."""
        return LineIndex(self.starts[1:], self.ends[1:])

    def spans(self, max_bytes: int, max_rows: int) -> Iterator[tuple[int, int]]:
        """(first row, row after the last) of runs of records that hold about `max_bytes`."""
        first = 0
        while first < len(self):
            limit = self.starts[first] + max_bytes
            last = int(np.searchsorted(self.ends, limit, side="right"))
            last = min(max(last, first + 1), first + max_rows, len(self))
            yield first, last
            first = last


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what can go wrong while reading `path` into DataError."""
    try:
        yield
    except (OSError, EOFError, zstandard.ZstdError) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise DataError(f"{path}: cannot be read: {reason}") from None


def open_plain(path: Path, *, scratch: Path | None) -> BinaryIO:
    """The file, or for .gz and .zst an unpacked copy in an unlinked file in `scratch`."""
    raw = path.open("rb")
    if path.suffix not in {".gz", ".zst"}:
        return raw
    with raw, _unpacking(path, raw) as packed, contextlib.ExitStack() as on_failure:
        plain: BinaryIO = on_failure.enter_context(tempfile.TemporaryFile(dir=scratch))
        while block := packed.read(_BLOCK_BYTES):
            plain.write(block)
        plain.flush()
        on_failure.pop_all()
        return plain


def _unpacking(path: Path, raw: BinaryIO) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(raw))
    reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return cast("IO[bytes]", reader)


def build_index(file: BinaryIO, path: Path, *, quoted: bool) -> LineIndex:
    """The records of `file`: its lines; with `quoted`, a line end inside "..." belongs to a field.

    Raises DataError for a record over 64 MiB and for a quote that is never closed.
    """
    breaks, indented, num_bytes = _scan(file, path, quoted=quoted)
    if not len(breaks) or breaks[-1] != num_bytes:
        breaks = np.append(breaks, num_bytes)
    starts = np.concatenate([[_bom_bytes(file)], breaks[:-1]]).astype(np.int64)
    index = LineIndex(starts, breaks)
    lengths = index.ends - index.starts
    if len(lengths) and lengths.max() > ROW_LIMIT_BYTES:
        line = line_number(file, int(index.starts[int(lengths.argmax())]))
        raise DataError(f"{path}:{line}: this row holds over {ROW_LIMIT_BYTES >> 20} MiB")
    return _without_blank(file, index, indented)


def read_span(file: BinaryIO, index: LineIndex, first: int, last: int) -> list[bytes]:
    """The bytes of the records from `first` up to but not including `last`."""
    base = int(index.starts[first])
    block = os.pread(file.fileno(), int(index.ends[last - 1]) - base, base)
    starts = (index.starts[first:last] - base).tolist()
    ends = (index.ends[first:last] - base).tolist()
    return [block[start:end] for start, end in zip(starts, ends, strict=True)]


def read_records(file: BinaryIO, index: LineIndex, rows: Sequence[int]) -> list[bytes]:
    """The bytes of single records, in the order asked for."""
    return [read_span(file, index, row, row + 1)[0] for row in rows]


def line_number(file: BinaryIO, offset: int) -> int:
    """The line (from 1) of a byte offset; reads the file up to there."""
    number = 1
    for position in range(0, offset, _BLOCK_BYTES):
        wanted = min(_BLOCK_BYTES, offset - position)
        number += os.pread(file.fileno(), wanted, position).count(b"\n")
    return number


def _scan(file: BinaryIO, path: Path, *, quoted: bool) -> tuple[_Offsets, _Offsets, int]:
    """Offsets just behind each record's line end, those where a record begins with white space, and
    the number of bytes in the file."""
    found: list[_Offsets] = [np.empty(0, dtype=np.int64)]
    indented: list[_Offsets] = [np.empty(0, dtype=np.int64)]
    begins = np.zeros(1, dtype=np.int64)
    position = 0
    num_quotes = 0
    while block := os.pread(file.fileno(), _BLOCK_BYTES, position):
        octets = np.frombuffer(block, dtype=np.uint8)
        breaks = np.flatnonzero(octets == ord("\n"))
        if quoted:
            quotes = np.flatnonzero(octets == ord('"'))
            before = np.searchsorted(quotes, breaks) + num_quotes
            breaks = breaks[before % 2 == 0]
            num_quotes += len(quotes)
        found.append(breaks.astype(np.int64) + position + 1)
        begins = np.concatenate([begins, found[-1]])
        inside = begins[begins < position + len(block)]
        indented.append(inside[_MAY_BEGIN_BLANK[octets[inside - position]]])
        begins = begins[len(inside) :]
        position += len(block)
    if num_quotes % 2:
        raise DataError(f"{path}: a quoted field is never closed (an odd number of quotes)")
    return np.concatenate(found), np.concatenate(indented), position


def _bom_bytes(file: BinaryIO) -> int:
    return len(_BOM) if os.pread(file.fileno(), len(_BOM), 0) == _BOM else 0


def _without_blank(file: BinaryIO, index: LineIndex, indented: _Offsets) -> LineIndex:
    """Drops the records of white space only: each of those at `indented` is looked at, and the
    first, which a byte order mark may hide."""
    rows = np.searchsorted(index.starts, indented).tolist()
    blank = [row for row in {0, *rows} if _holds_nothing(file, index, row)]
    if not blank:
        return index
    kept = np.ones(len(index), dtype=bool)
    kept[blank] = False
    return LineIndex(index.starts[kept], index.ends[kept])


def _holds_nothing(file: BinaryIO, index: LineIndex, row: int) -> bool:
    """Whether a record is blank; reads no more of it than tells."""
    start, end = int(index.starts[row]), int(index.ends[row])
    return all(
        is_blank(os.pread(file.fileno(), min(_PEEK_BYTES, end - position), position))
        for position in range(start, end, _PEEK_BYTES)
    )
