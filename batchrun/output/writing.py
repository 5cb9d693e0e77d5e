"""Results and kept input columns -> one output file, in input order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from batchrun.inputs import InputData, Row, check_columns
from batchrun.jobspec import OUTPUT_COLUMNS, JobSpec
from batchrun.output.atomic import atomic_file
from batchrun.output.rows import ResultRow, error_text, response_text
from batchrun.output.sinks import JsonlSink, ParquetSink, Sink
from batchrun.types import ProgressSink, RowError

_SLICE_ROWS = 256
"""Rows whose replies are held at a time."""


def write_output(
    path: Path,
    results: Iterator[ResultRow],
    *,
    spec: JobSpec,
    data: InputData,
    missing: RowError | None,
    progress: ProgressSink | None = None,
) -> int:
    """Writes `path` (.parquet, or JSONL for any other name) and returns its number of rows.

    `results` come in row order, possibly with gaps. A row without a result gets the error
    `missing`, or is left out when that is None (a partial output). The file appears whole or
    not at all. Raises StoreFullError, InputError for an unwritable place, DataError for an
    input that cannot be read any more.
    """
    check_columns(spec, data)
    num_written = 0
    with atomic_file(path) as file:
        merged = _Merged(results, missing, spec)
        sink = _make_sink(file, path, spec, data)
        for first_row, kept, ids in _kept_slices(spec, data, native=isinstance(sink, JsonlSink)):
            rows, present = merged.take(first_row, ids)
            if len(present) < len(ids):
                kept = _selected(kept, present)
            if rows:
                sink.write(rows, kept)
            num_written += len(rows)
            if progress is not None:
                progress("writing the results", first_row + len(ids), data.num_rows)
        sink.close()
    return num_written


class _Merged:
    """Walks the results beside the rows of the input."""

    def __init__(
        self, results: Iterator[ResultRow], missing: RowError | None, spec: JobSpec
    ) -> None:
        self._results = results
        self._next = next(results, None)
        self._missing = missing
        self._spec = spec

    def take(self, first_row: int, ids: Sequence[str]) -> tuple[list[Row], list[int]]:
        """The output rows of the input rows from `first_row` on, and which of them they are."""
        rows: list[Row] = []
        present: list[int] = []
        for index, row_id in enumerate(ids):
            result = self._result_of(first_row + index)
            if result is not None:
                rows.append(_output_row(row_id, result, self._spec))
                present.append(index)
        return rows, present

    def _result_of(self, row: int) -> ResultRow | None:
        while self._next is not None and self._next.row < row:
            self._next = next(self._results, None)
        if self._next is not None and self._next.row == row:
            return self._next
        if self._missing is None:
            return None
        return ResultRow(row=row, error=self._missing, attempts=0)


def _output_row(row_id: str, result: ResultRow, spec: JobSpec) -> Row:
    reply = result.response_body
    row: Row = {
        "id": row_id,
        "response": None if reply is None else response_text(spec.endpoint, reply),
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.usage.num_prompt_tokens,
        "output_tokens": result.usage.num_output_tokens,
        "cached_tokens": result.usage.num_cached_tokens,
        "attempts": result.attempts,
        "error": error_text(result.error),
    }
    if spec.output.body:
        row["body"] = None if reply is None else reply.decode("utf-8", "replace")
    return row


def _make_sink(file: BinaryIO, path: Path, spec: JobSpec, data: InputData) -> Sink:
    if path.suffix != ".parquet":
        return JsonlSink(file)
    columns = OUTPUT_COLUMNS if spec.output.body else OUTPUT_COLUMNS[:-1]
    kept = data.schema(spec.output.keep)
    return ParquetSink(file, kept=kept, result_columns=columns)


def _kept_slices(
    spec: JobSpec, data: InputData, *, native: bool
) -> Iterator[tuple[int, pa.RecordBatch | list[Row], list[str]]]:
    """(first row, kept columns, ids) for a few rows at a time."""
    keep = list(spec.output.keep)
    id_columns = [data.id_column] if data.id_column and data.id_column not in keep else []
    if native:
        for first_row, rows in data.iter_rows([*keep, *id_columns]):
            for start in range(0, len(rows), _SLICE_ROWS):
                part = rows[start : start + _SLICE_ROWS]
                ids = _ids(data, part, first_row + start)
                yield first_row + start, [{name: row[name] for name in keep} for row in part], ids
        return
    for first_row, batch in data.iter_batches([*keep, *id_columns]):
        for start in range(0, batch.num_rows, _SLICE_ROWS):
            piece = batch.slice(start, _SLICE_ROWS)
            id_rows = piece.select([data.id_column] if data.id_column else []).to_pylist()
            ids = _ids(data, id_rows or [{}] * piece.num_rows, first_row + start)
            yield first_row + start, piece.select(keep), ids


def _ids(data: InputData, rows: Sequence[Row], first_row: int) -> list[str]:
    return [data.row_id(row, first_row + index) for index, row in enumerate(rows)]


def _selected(kept: pa.RecordBatch | list[Row], present: Sequence[int]) -> object:
    if isinstance(kept, list):
        return [kept[index] for index in present]
    return kept.take(pa.array(present, type=pa.int64()))
