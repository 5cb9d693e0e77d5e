"""JSON Lines and CSV (RFC 4180, UTF-8, comma, a header line), with random access to their rows.

Where each record begins and ends is found without parsing the records. All columns of CSV are text.
"""

from __future__ import annotations

import contextlib
import csv as stdlib_csv
import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard
from pyarrow import csv
from pydantic_core import from_json

from batchrun.errors import DataError
from batchrun.jobs.inputs.rows import BATCH_BYTES, ROW_LIMIT_BYTES, Row, is_blank, native_rows
from batchrun.jobs.pin import even_block_ends

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


_SAMPLE_ROWS = 1000
_MAX_BATCH_ROWS = 8192
_INT64 = range(-(2**63), 2**63)


class JsonlInput:
    """One JSONL file. Its columns are the keys of its first 1,000 rows; a missing key is null.

    In Arrow batches a column whose values are all text, all whole numbers, all numbers or all
    booleans has that type; any other column is JSON text. Templates see the values as they are.
    """

    def __init__(self, path: Path, *, scratch: Path | None) -> None:
        self.path = path
        with readable(path), contextlib.ExitStack() as on_failure:
            self._file = on_failure.enter_context(open_plain(path, scratch=scratch))
            self._index = build_index(self._file, path, quoted=False)
            self.num_rows = len(self._index)
            self.columns: tuple[str, ...] = tuple(self._sample_keys())
            on_failure.pop_all()
        self._kinds: dict[str, pa.DataType] = {}

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """The Arrow types of `columns`; the first call for a column reads the whole file."""
        missing = [name for name in columns if name not in self._kinds]
        if missing:
            seen: dict[str, set[str]] = {name: set() for name in missing}
            for _, rows in self.iter_rows(missing, BATCH_BYTES):
                for name in missing:
                    seen[name].update(_kind_of(row[name]) for row in rows)
            self._kinds |= {name: _arrow_type(kinds) for name, kinds in seen.items()}
        return pa.schema([pa.field(name, self._kinds[name]) for name in columns])

    def iter_batches(
        self, columns: Sequence[str], schema: pa.Schema, max_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) in file order."""
        for first_row, rows in self.iter_rows(columns, max_bytes):
            yield first_row, arrow_batch(rows, schema)

    def iter_rows(self, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, list[Row]]]:
        """Like `iter_batches`, as native values."""
        for first, last in self._index.spans(max_bytes, _MAX_BATCH_ROWS):
            yield first, [_pick(row, columns) for row in self._parse(first, last)]

    def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """The given rows in the given order."""
        with readable(self.path):
            records = read_records(self._file, self._index, rows)
        parsed = (self._object(record, row) for record, row in zip(records, rows, strict=True))
        return [_pick(row, columns) for row in parsed]

    def block_ends(self) -> list[int]:
        """Blocks of 64 MiB of the file as it lies on disk."""
        return even_block_ends(self.path.stat().st_size)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _sample_keys(self) -> dict[str, None]:
        """The keys of the first rows, in the order of their appearance."""
        keys: dict[str, None] = {}
        for first, last in self._index.spans(BATCH_BYTES, _SAMPLE_ROWS):
            if first >= _SAMPLE_ROWS:
                break
            for row in self._parse(first, min(last, _SAMPLE_ROWS)):
                keys |= dict.fromkeys(row)
        return keys

    def _parse(self, first: int, last: int) -> list[Row]:
        with readable(self.path):
            records = read_span(self._file, self._index, first, last)
        return [self._object(record, first + index) for index, record in enumerate(records)]

    def _object(self, record: bytes, row: int) -> Row:
        try:
            value = from_json(record, allow_inf_nan=False, cache_strings="keys")
        except ValueError as failure:
            reason = str(failure).replace("line 1 column", "column")
            raise DataError(f"{self._place(row)}: not valid JSON: {reason}") from None
        if not isinstance(value, dict):
            raise DataError(f"{self._place(row)}: must be a JSON object, not {_json_name(value)}")
        return value

    def _place(self, row: int) -> str:
        return f"{self.path}:{line_number(self._file, int(self._index.starts[row]))}"


def arrow_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Native rows as an Arrow batch of the given types."""
    arrays = [
        pa.array((_fit(row.get(field.name), field.type) for row in rows), type=field.type)
        for field in schema
    ]
    if not arrays:
        return pa.RecordBatch.from_arrays([pa.nulls(len(rows))], names=["row"]).select([])
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _pick(row: Row, columns: Iterable[str]) -> Row:
    return {name: row.get(name) for name in columns}


def _fit(value: object, kind: pa.DataType) -> object:
    if value is None or isinstance(value, str) or not pa.types.is_string(kind):
        return float(value) if isinstance(value, int) and pa.types.is_floating(kind) else value
    return json.dumps(value, ensure_ascii=False)


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in _INT64 else "json"
    return {str: "str", float: "float", type(None): "null"}.get(type(value), "json")


def _arrow_type(kinds: set[str]) -> pa.DataType:
    kinds = kinds - {"null"}
    if kinds == {"int"}:
        return pa.int64()
    if kinds == {"bool"}:
        return pa.bool_()
    if kinds and kinds <= {"int", "float"}:
        return pa.float64()
    return pa.string()


def _json_name(value: object) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(
        type(value), "a number"
    )


class CsvInput:
    """One CSV file. A line end inside quotes belongs to its field; blank lines are skipped."""

    def __init__(self, path: Path, *, scratch: Path | None) -> None:
        self.path = path
        with readable(path), contextlib.ExitStack() as on_failure:
            self._file = on_failure.enter_context(open_plain(path, scratch=scratch))
            index = build_index(self._file, path, quoted=True)
            header = read_span(self._file, index, 0, 1)[0] if len(index) else b""
            self.columns = tuple(self._header(header)) if header else ()
            on_failure.pop_all()
        self._index = index.without_first()
        self.num_rows = len(self._index)

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """Text for every column."""
        return pa.schema([pa.field(name, pa.string()) for name in columns])

    def iter_batches(
        self, columns: Sequence[str], schema: pa.Schema, max_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) in file order."""
        del schema
        for first, last in self._index.spans(max_bytes, _MAX_BATCH_ROWS):
            with readable(self.path):
                records = read_span(self._file, self._index, first, last)
            yield first, self._parse(records, range(first, last)).select(list(columns))

    def iter_rows(self, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, list[Row]]]:
        """Like `iter_batches`, as native values."""
        for first, batch in self.iter_batches(columns, self.schema(columns), max_bytes):
            yield first, native_rows(batch)

    def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """The given rows in the given order."""
        if not rows:
            return []
        with readable(self.path):
            records = read_records(self._file, self._index, rows)
        return native_rows(self._parse(records, rows).select(list(columns)))

    def block_ends(self) -> list[int]:
        """Blocks of 64 MiB of the file as it lies on disk."""
        return even_block_ends(self.path.stat().st_size)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _header(self, header: bytes) -> list[str]:
        try:
            return next(stdlib_csv.reader([header.decode("utf-8").rstrip("\r\n")], strict=True))
        except (UnicodeDecodeError, stdlib_csv.Error) as failure:
            raise DataError(f"{self.path}:1: the header line is not UTF-8 CSV: {failure}") from None

    def _parse(self, records: Sequence[bytes], rows: Sequence[int]) -> pa.RecordBatch:
        ragged: list[csv.InvalidRow] = []

        def note(row: csv.InvalidRow) -> str:
            ragged.append(row)
            return "error"

        data = b"\n".join(record.rstrip(b"\r\n") for record in records) + b"\n"
        try:
            table = _parse_text(data, self.columns, note)
        except pa.ArrowInvalid as failure:
            if ragged:
                raise DataError(self._ragged(ragged[0], rows)) from None
            raise DataError(self._invalid(failure, records, rows)) from None
        if table.num_rows != len(records):
            raise DataError(f"{self._place(rows[0])}: a quote stands inside an unquoted field")
        batches: list[pa.RecordBatch] = table.combine_chunks().to_batches()
        return batches[0]

    def _ragged(self, ragged: csv.InvalidRow, rows: Sequence[int]) -> str:
        place = self._place(rows[(ragged.number or 1) - 1])
        return (
            f"{place}: {ragged.actual_columns} fields where the header has "
            f"{ragged.expected_columns}"
        )

    def _invalid(self, failure: Exception, records: Sequence[bytes], rows: Sequence[int]) -> str:
        for record, row in zip(records, rows, strict=True):
            try:
                record.decode("utf-8")
            except UnicodeDecodeError:
                return f"{self._place(row)}: not UTF-8 text"
        return f"{self._place(rows[0])}: not valid CSV: {' '.join(str(failure).split())[:200]}"

    def _place(self, row: int) -> str:
        return f"{self.path}:{line_number(self._file, int(self._index.starts[row]))}"


def _parse_text(data: bytes, names: Sequence[str], handler: object) -> pa.Table:
    return csv.read_csv(
        io.BytesIO(data),
        read_options=csv.ReadOptions(
            column_names=list(names), block_size=len(data) + 1, use_threads=False
        ),
        parse_options=csv.ParseOptions(newlines_in_values=True, invalid_row_handler=handler),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        ),
    )
