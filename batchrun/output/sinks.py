"""The two output formats, each written as a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.inputs import Row, plain_json

_GROUP_BYTES = 32 << 20
_GROUP_ROWS = 65_536

RESULT_TYPES: Mapping[str, pa.DataType] = {
    "id": pa.string(),
    "response": pa.string(),
    "finish_reason": pa.string(),
    "prompt_tokens": pa.int64(),
    "output_tokens": pa.int64(),
    "cached_tokens": pa.int64(),
    "attempts": pa.int64(),
    "error": pa.string(),
    "body": pa.string(),
}


class Sink(Protocol):
    """Takes the output's rows in order."""

    def write(self, results: Sequence[Row], kept: pa.RecordBatch | Sequence[Row]) -> None:
        """Adds rows; `kept` holds the kept input columns of the same rows."""
        ...

    def close(self) -> None:
        """Writes what is left and the format's own ending; the file stays open."""
        ...


class JsonlSink:
    """One JSON object per line; `error` and `body` are objects, times ISO text, bytes base64."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, results: Sequence[Row], kept: pa.RecordBatch | Sequence[Row]) -> None:
        """Adds rows; `kept` are native rows."""
        lines: list[str] = []
        for result, row in zip(results, kept, strict=True):
            first, *rest = result.items()
            values = dict([first, *row.items(), *map(_as_object, rest)])
            lines.append(json.dumps(plain_json(values), ensure_ascii=False) + "\n")
        self._file.write("".join(lines).encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Nothing is left over."""


def _as_object(item: tuple[str, object]) -> tuple[str, object]:
    name, value = item
    if name in {"error", "body"} and isinstance(value, str):
        return name, json.loads(value)
    return item


class ParquetSink:
    """zstd Parquet in row groups of about 32 MiB; kept columns have their input types."""

    def __init__(self, file: BinaryIO, *, kept: pa.Schema, result_columns: Sequence[str]) -> None:
        results = [pa.field(name, RESULT_TYPES[name]) for name in result_columns]
        self._schema = pa.schema([results[0], *kept, *results[1:]])
        self._kept = kept.names
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._waiting_rows = 0

    def write(self, results: Sequence[Row], kept: pa.RecordBatch | Sequence[Row]) -> None:
        """Adds rows; `kept` is a batch of the kept columns."""
        assert isinstance(kept, pa.RecordBatch)
        kept_columns = {name: kept.column(name) for name in self._kept}
        arrays = [
            kept_columns[field.name]
            if field.name in kept_columns
            else pa.array([row[field.name] for row in results], type=field.type)
            for field in self._schema
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        self._waiting_rows += batch.num_rows
        if self._waiting_bytes >= _GROUP_BYTES or self._waiting_rows >= _GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Writes the last row group and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, schema=self._schema))
            self._waiting.clear()
            self._waiting_bytes = self._waiting_rows = 0
