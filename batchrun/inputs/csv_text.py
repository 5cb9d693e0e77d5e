"""CSV (RFC 4180, UTF-8, comma, a header line): all columns are text."""

from __future__ import annotations

import contextlib
import csv as stdlib_csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import csv

from batchrun.errors import DataError
from batchrun.inputs.base import Row
from batchrun.inputs.line_index import (
    build_index,
    line_number,
    open_plain,
    read_records,
    read_span,
    readable,
)
from batchrun.inputs.native import native_rows
from batchrun.inputs.pin_blocks import even_block_ends

_MAX_BATCH_ROWS = 8192


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
