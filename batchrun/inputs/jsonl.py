"""JSON Lines: one object per line, random access through an index of line offsets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pydantic_core import from_json

from batchrun.errors import DataError
from batchrun.inputs.base import BATCH_BYTES, Row
from batchrun.inputs.line_index import (
    build_index,
    line_number,
    open_plain,
    read_records,
    read_span,
    readable,
)
from batchrun.inputs.pin_blocks import even_block_ends

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
