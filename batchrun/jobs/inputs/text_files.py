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
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import IO, BinaryIO, cast

import numpy as np
import pyarrow as pa
from pyarrow import csv

from batchrun.errors import DataError, StoreError, StoreFullError, shortened
from batchrun.files import DISK_FULL
from batchrun.jobs.inputs.rows import (
    BATCH_BYTES,
    BOM,
    ROW_LIMIT_BYTES,
    InputFile,
    Numbers,
    Row,
    empty_batches,
    find_lines,
    native_rows,
    type_name,
)
from batchrun.strict import parse_json

NOT_UTF_8 = "not UTF-8 text; save it as UTF-8 (spreadsheets call it `CSV UTF-8`)"
OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_BLOCK_BYTES = 4 << 20
_SAMPLE_ROWS = 1000
_MAX_BATCH_ROWS = 8192
_MOST_LONG_ROWS = (2**31 - 1) // ROW_LIMIT_BYTES
"""So many rows of any length Arrow parses at once."""
_INT64 = range(-(2**63), 2**63)
_FLOAT_EXACT = range(-(2**53), 2**53 + 1)


def unpacked(name: str, raw: IO[bytes]) -> IO[bytes]:
    """What a file or an object of this name holds: .gz and .zst are unpacked on the way."""
    if name.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(raw))
    if name.endswith(".zst"):
        # zstandard's own reader takes a file that was cut off for a whole one.
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"))
    return raw


class TextFile(InputFile):
    """A file of records, each with a place of its own in it: lines, or lines with line ends in
    quotes. `_starts` and `_ends` are the half-open byte ranges of those that are not blank."""

    is_quoted = False
    """Whether a line end inside "..." belongs to a field."""
    _starts: Numbers
    _ends: Numbers

    def __init__(self, path: Path) -> None:
        self.path = path
        with _readable(self.path), contextlib.ExitStack() as on_failure:
            self._file = on_failure.enter_context(self._opened())
            self._find_records()
            self.columns = tuple(self._find_columns())
            on_failure.pop_all()
        self.num_rows = len(self._starts)

    def _opened(self) -> BinaryIO:
        return _open_plain(self.path)

    @abstractmethod
    def _find_columns(self) -> Iterable[str]: ...

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _spans(self, max_bytes: int, max_rows: int = _MAX_BATCH_ROWS) -> Iterator[range]:
        """Runs of records that hold about `max_bytes`."""
        first = 0
        while first < len(self._starts):
            limit = self._starts[first] + max_bytes
            last = int(np.searchsorted(self._ends, limit, side="right"))
            last = min(max(last, first + 1), first + max_rows, len(self._starts))
            yield range(first, last)
            first = last

    def _records(self, rows: range) -> list[bytes]:
        """The bytes of these records, which follow one another."""
        base = int(self._starts[rows.start])
        num_bytes = int(self._ends[rows.stop - 1]) - base
        with _readable(self.path):
            block = os.pread(self._file.fileno(), num_bytes, base)
        starts = (self._starts[rows.start : rows.stop] - base).tolist()
        ends = (self._ends[rows.start : rows.stop] - base).tolist()
        return [block[start:end] for start, end in zip(starts, ends, strict=True)]

    def _scattered_records(self, rows: Sequence[int]) -> Iterator[bytes]:
        """The bytes of single records, in the order asked for."""
        wanted = np.asarray(rows, dtype=np.int64)
        spans = zip(self._starts[wanted].tolist(), self._ends[wanted].tolist(), strict=True)
        file = self._file.fileno()
        with _readable(self.path):
            yield from (os.pread(file, end - start, start) for start, end in spans)

    def place(self, row: int) -> str:
        """`FILE:LINE` of a record; reads the file up to there."""
        offset, line = int(self._starts[row]), 1
        for position in range(0, offset, _BLOCK_BYTES):
            wanted = min(_BLOCK_BYTES, offset - position)
            line += os.pread(self._file.fileno(), wanted, position).count(b"\n")
        return f"{self.path}:{line}"

    def _find_records(self) -> None:
        """Sets the ranges of the records, without a byte order mark and without those that hold
        nothing but white space; where there are none of these, 8 bytes of memory a record.

        Raises DataError for a record over 64 MiB and for a quote that is never closed; where that
        shows, a record before the last may be the one that is no row.
        """
        first = len(BOM) if os.pread(self._file.fileno(), len(BOM), 0) == BOM else 0
        starts = [np.empty(0, dtype=np.int64)]
        ends = starts.copy()
        unclosed = ""
        try:
            for lines in find_lines(self._file.fileno(), first, is_quoted=self.is_quoted):
                starts.append(lines.starts)
                ends.append(lines.ends)
        except ValueError as failure:
            unclosed = str(failure)
        self._starts, self._ends = np.concatenate(starts), np.concatenate(ends)
        if unclosed:
            unclosed = f"{self.place(-1)}: {unclosed}"
            self._starts, self._ends = self._starts[:-1], self._ends[:-1]
        lengths = self._ends - self._starts
        if len(lengths) and lengths.max() > ROW_LIMIT_BYTES:
            place = self.place(int(lengths.argmax()))
            raise DataError(f"{place}: this row holds over {ROW_LIMIT_BYTES >> 20} MiB")
        if unclosed:
            self.columns = tuple(self._find_columns())
            for _ in self.iter_rows((), BATCH_BYTES):
                pass
            raise DataError(unclosed)
        if np.array_equal(self._starts[1:], self._ends[:-1]):
            bounds = np.append(self._starts, self._ends[-1:])
            self._starts, self._ends = bounds[:-1], bounds[1:]


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what can go wrong while reading into DataError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise DataError(f"{path}: cannot be read: {reason}") from failure


def _open_plain(path: Path) -> BinaryIO:
    """The file, or for .gz and .zst an unpacked copy."""
    raw = path.open("rb")
    if path.suffix not in {".gz", ".zst"}:
        return raw
    with raw:
        return _scratch_copy(path, _pieces(path, raw))


def _pieces(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    with _readable(path), unpacked(path.name, raw) as packed:
        while piece := packed.read(_BLOCK_BYTES):
            yield piece


def _scratch_copy(path: Path, pieces: Iterable[bytes]) -> BinaryIO:
    """These pieces of what `path` holds in an unlinked file. Raises StoreFullError where there is
    no room for it, StoreError where there can be none, and what `pieces` raises."""
    try:
        with contextlib.ExitStack() as on_failure:
            plain: BinaryIO = on_failure.enter_context(tempfile.TemporaryFile())
            plain.writelines(pieces)
            plain.flush()
            on_failure.pop_all()
            return plain
    except OSError as failure:
        if failure.errno in DISK_FULL:
            raise StoreFullError(
                f"{tempfile.gettempdir()}: no room for a scratch copy of {path}; free some space "
                "there, or name another folder in TMPDIR, and try again"
            ) from None
        raise StoreError(
            f"{path}: a scratch copy cannot be made: {failure.strerror or failure}; "
            "name a folder for it in TMPDIR"
        ) from None


class JsonlInput(TextFile):
    """One JSONL file. Its columns are the keys of its first 1,000 rows; a missing key is null.

    In Arrow batches a column whose values are all text, all whole numbers, all numbers or all
    booleans has that type; any other column is JSON text. Templates see the values as they are.
    """

    def __init__(self, path: Path) -> None:
        self._types: dict[str, pa.DataType] = {}
        self.large: set[str] = set()
        """Of the columns whose types are known, those with whole numbers that a float rounds."""
        super().__init__(path)

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """The Arrow types of `columns`, null for one without a value; the first call for a column
        reads the whole file."""
        missing = [name for name in columns if name not in self._types]
        if missing:
            seen: dict[str, set[type]] = {name: set() for name in missing}
            for _, rows in self.iter_rows(missing, BATCH_BYTES):
                for name in missing:
                    seen[name].update(_kind_of(row[name]) for row in rows)
            self._types |= {name: _arrow_type(kinds) for name, kinds in seen.items()}
            self.large |= {name for name, kinds in seen.items() if _LargeInt in kinds}
        return pa.schema([pa.field(name, self._types[name]) for name in columns])

    def iter_batches(
        self, columns: Sequence[str], schema: pa.Schema, max_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) in file order."""
        for first_row, rows in self.iter_rows(columns, max_bytes):
            yield first_row, _arrow_batch(rows, schema)

    def iter_rows(self, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, list[Row]]]:
        """Like `iter_batches`, as native values."""
        for rows in self._spans(max_bytes):
            yield rows.start, [_pick(row, columns) for row in self._parse(rows)]

    def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """The given rows in the given order."""
        records = zip(self._scattered_records(rows), rows, strict=True)
        return [_pick(self._object(record, row), columns) for record, row in records]

    def _find_columns(self) -> Iterable[str]:
        """The keys of the first rows, in the order of their appearance."""
        keys: dict[str, None] = {}
        for rows in self._spans(BATCH_BYTES, _SAMPLE_ROWS):
            if rows.start >= _SAMPLE_ROWS:
                break
            for row in self._parse(range(rows.start, min(rows.stop, _SAMPLE_ROWS))):
                keys |= dict.fromkeys(row)
        return keys

    def _parse(self, rows: range) -> list[Row]:
        records = zip(self._records(rows), rows, strict=True)
        return [self._object(record, row) for record, row in records]

    def _object(self, record: bytes, row: int) -> Row:
        try:
            value = parse_json(record)
        except ValueError as failure:
            reason = str(failure).replace("line 1 column", "column")
            raise DataError(f"{self.place(row)}: not valid JSON: {reason}") from None
        if not isinstance(value, dict):
            raise DataError(f"{self.place(row)}: must be a JSON object, not {type_name(value)}")
        return value


ARRAY_LIMIT_BYTES = 256 << 20


class JsonArrayInput(JsonlInput):
    """A JSON file that is one array of objects, as a scratch file of one object a line."""

    def _opened(self) -> BinaryIO:
        with _open_plain(self.path) as file:
            text = file.read(ARRAY_LIMIT_BYTES + 1)
        if len(text) > ARRAY_LIMIT_BYTES:
            raise DataError(
                f"{self.path}: over 256 MiB of JSON; write one object a line, as .jsonl"
            )
        try:
            rows = parse_json(text.removeprefix(BOM))
        except ValueError as failure:
            raise DataError(f"{self.path}: not valid JSON: {failure}{_jsonl_hint(text)}") from None
        if not isinstance(rows, list):
            raise DataError(f"{self.path}: must be an array of objects, not {type_name(rows)}")
        return _scratch_copy(self.path, (json.dumps(row).encode() + b"\n" for row in rows))

    def place(self, row: int) -> str:
        """`FILE: element N`, from 0."""
        return f"{self.path}: element {row}"


def _jsonl_hint(text: bytes) -> str:
    """What to do where the file holds an object a line."""
    is_object = text.lstrip().startswith(b"{")
    hint = "for one object a line set input.format: jsonl"
    return f"; {hint}" if is_object else "; a long array goes as one object a line, in .jsonl"


def _arrow_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Native rows as an Arrow batch of the given types."""
    arrays = [
        pa.array((_fit(row.get(field.name), field.type) for row in rows), type=field.type)
        for field in schema
    ]
    if not arrays:
        return next(empty_batches(len(rows)))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _pick(row: Row, columns: Iterable[str]) -> Row:
    return {name: row.get(name) for name in columns}


_TEXT_IDS = {each.id for each in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())}
"""What text becomes beside the columns of Parquet files."""


def _fit(value: object, kind: pa.DataType) -> object:
    if value is None or isinstance(value, str) or kind.id not in _TEXT_IDS:
        return float(value) if isinstance(value, int) and pa.types.is_floating(kind) else value
    return json.dumps(value, ensure_ascii=False)


class _LargeInt:
    """Stands for the type of whole numbers that floating-point numbers cannot tell apart."""


def _kind_of(value: object) -> type:
    """Its type, but for a whole number that Arrow has none for, or that a float would round."""
    if type(value) is not int or value in _FLOAT_EXACT:
        return type(value)
    return _LargeInt if value in _INT64 else object


def _arrow_type(kinds: set[type]) -> pa.DataType:
    kinds = kinds - {NoneType}
    if not kinds:
        return pa.null()
    if kinds <= {int, _LargeInt}:
        return pa.int64()
    if kinds == {bool}:
        return pa.bool_()
    return pa.float64() if kinds <= {int, float} else pa.string()


class CsvInput(TextFile):
    """One CSV file. A line end inside quotes belongs to its field; blank lines are skipped."""

    is_quoted = True
    delimiter = ","

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """Text for every column."""
        return pa.schema([pa.field(name, pa.string()) for name in columns])

    def iter_batches(
        self, columns: Sequence[str], schema: pa.Schema, max_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) in file order."""
        del schema
        for rows in self._spans(max_bytes):
            yield rows.start, self._parse(self._records(rows), rows).select(list(columns))

    def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """The given rows in the given order."""
        found: list[Row] = []
        for start in range(0, len(rows), _MOST_LONG_ROWS):
            some = rows[start : start + _MOST_LONG_ROWS]
            records = self._parse(list(self._scattered_records(some)), some)
            found += native_rows(records.select(list(columns)))
        return found

    def _find_columns(self) -> Iterable[str]:
        """The names in the header, which is no row from then on."""
        if not len(self._starts):
            return ()
        header = self._records(range(1))[0]
        self._starts, self._ends = self._starts[1:], self._ends[1:]
        try:
            line = header.decode("utf-8").rstrip("\r\n")
            names = next(stdlib_csv.reader([line], strict=True, delimiter=self.delimiter))
        except UnicodeDecodeError:
            raise DataError(f"{self.path}:1: {NOT_UTF_8}") from None
        except stdlib_csv.Error as failure:
            raise DataError(f"{self.path}:1: the header line is not CSV: {failure}") from None
        other = next((mark for mark in OTHER_DELIMITERS if mark in line), None)
        if len(names) == 1 and other is not None:
            raise DataError(
                f"{self.path}:1: one column, {shortened(names[0])!r}: {OTHER_DELIMITERS[other]} "
                "seem to stand between its columns; save it with commas as .csv, "
                "or with tabs as .tsv"
            )
        return names

    def _parse(self, records: Sequence[bytes], rows: Sequence[int]) -> pa.RecordBatch:
        data = b"\n".join(record.rstrip(b"\r\n") for record in records)
        with contextlib.suppress(pa.ArrowInvalid):
            table = _parse_text(data, self.columns, None, self.delimiter)
            if table.num_rows == len(records):
                batches: list[pa.RecordBatch] = table.combine_chunks().to_batches()
                return batches[0]
        faults = ((row, self._fault(record)) for record, row in zip(records, rows, strict=True))
        row, fault = next((each for each in faults if each[1]), (rows[0], "not valid CSV"))
        raise DataError(f"{self.place(row)}: {fault}")

    def _fault(self, record: bytes) -> str | None:
        """Why a record is not one row, where it is not."""
        line = record.rstrip(b"\r\n")
        ragged: list[csv.InvalidRow] = []

        def skip(row: csv.InvalidRow) -> str:
            ragged.append(row)
            return "skip"

        try:
            record.decode("utf-8")
            # Twice: a quote that stays open shows only in what follows.
            table = _parse_text(line + b"\n" + line, self.columns, skip, self.delimiter)
        except UnicodeDecodeError:
            return NOT_UTF_8
        except pa.ArrowInvalid as failure:
            return f"not valid CSV: {' '.join(str(failure).split())[:200]}"
        if any(b"\r" in part for part in line.split(b'"')[::2]):
            return "a carriage return stands outside quotes"
        if table.num_rows + len(ragged) != 2:
            return "a quote stands inside an unquoted field"
        if ragged:
            return f"{ragged[0].actual_columns} fields where the header has {len(self.columns)}"
        return None


class TsvInput(CsvInput):
    """One file of columns between tabs; else as CSV. A line of tabs alone is no row."""

    delimiter = "\t"


def _parse_text(data: bytes, names: Sequence[str], handler: object, delimiter: str) -> pa.Table:
    return csv.read_csv(
        io.BytesIO(data + b"\n"),
        read_options=csv.ReadOptions(
            column_names=list(names), block_size=len(data) + 2, use_threads=False
        ),
        parse_options=csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=True, invalid_row_handler=handler
        ),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
        ),
    )
