"""Parquet: streaming in small batches, and random access whatever the size of the row groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import DataError
from batchrun.jobs.inputs.rows import (
    BATCH_BYTES,
    ROW_LIMIT_BYTES,
    ChunkReader,
    Row,
    empty_batches,
    native_rows,
    scratch_chunks,
)

_MAGIC = b"PAR1"
_BUFFER_BYTES = 1 << 20
_MAX_BATCH_ROWS = 8192
_SAMPLE_ROWS = 16
_SMALL_GROUP_BYTES = 4 * BATCH_BYTES
"""Row groups up to this size are read whole; files with larger ones get a scratch copy."""


class ParquetInput:
    """One Parquet file. Memory does not grow with the file or with its row groups."""

    def __init__(self, path: Path, *, scratch: Path | None) -> None:
        self.path = path
        self._scratch = scratch
        self._file = _open(path)
        schema: pa.Schema = self._file.schema_arrow
        self.columns: tuple[str, ...] = tuple(schema.names)
        self.num_rows: int = self._file.metadata.num_rows
        self._readers: dict[tuple[str, ...], ChunkReader] = {}
        self._known_row_bytes: dict[tuple[int, tuple[str, ...]], float] = {}

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """The file's own types of `columns`; DataError for a type that cannot be used."""
        fields = [self._file.schema_arrow.field(name) for name in columns]
        for field in fields:
            if not _is_usable(field.type):
                raise DataError(
                    f"{self.path}: column {field.name!r} has type {field.type}, which cannot be "
                    "used; convert it to text, numbers, lists or structs"
                )
        return pa.schema(fields)

    def iter_batches(
        self, columns: Sequence[str], schema: pa.Schema, max_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) in file order, row group after row group."""
        first_row = 0
        for group in range(self._file.num_row_groups):
            for batch in self._group_batches(group, columns, max_bytes):
                _refuse_huge_rows(self.path, first_row, batch)
                yield first_row, self._fitted(batch, schema)
                first_row += batch.num_rows

    def iter_rows(self, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, list[Row]]]:
        """Like `iter_batches`, as native values."""
        for first_row, batch in self.iter_batches(columns, self.schema(columns), max_bytes):
            yield first_row, native_rows(batch)

    def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """The given rows; the first call may copy a file of huge row groups to scratch."""
        if not columns:
            return [{} for _ in rows]
        key = tuple(columns)
        if key not in self._readers:
            self._readers[key] = self._chunk_reader(key)
        reader = self._readers[key]
        with _readable(self.path):
            return reader.read(rows)

    def chunk_sizes(self, columns: Sequence[str]) -> list[tuple[int, int]]:
        """(rows, about how many decoded bytes) of each chunk that `read_rows` decodes at once."""
        is_copied = self._has_large_group(columns)
        sizes: list[tuple[int, int]] = []
        for group in range(self._file.num_row_groups):
            num_rows = self._file.metadata.row_group(group).num_rows
            row_bytes = self._row_bytes(group, columns)
            step = self._batch_rows(group, columns, BATCH_BYTES) if is_copied else num_rows
            for first in range(0, num_rows, max(step, 1)):
                length = min(step, num_rows - first)
                sizes.append((length, int(length * row_bytes)))
        return sizes

    def block_ends(self) -> list[int]:
        """The end of each row group, then of the footer."""
        metadata = self._file.metadata
        ends = [_group_end(metadata.row_group(index)) for index in range(metadata.num_row_groups)]
        return [*sorted(ends), self.path.stat().st_size]

    def close(self) -> None:
        """Closes the file and drops scratch copies."""
        self._file.close()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _fitted(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        """The batch in the types that all files of the input have in common."""
        try:
            return batch if batch.schema == schema else batch.cast(schema)
        except pa.ArrowException as failure:
            reason = " ".join(str(failure).split())
            raise DataError(
                f"{self.path}: its column types differ from those of the other files: {reason}"
            ) from None

    def _group_batches(
        self, group: int, columns: Sequence[str], max_bytes: int
    ) -> Iterator[pa.RecordBatch]:
        if not columns:
            yield from empty_batches(self._file.metadata.row_group(group).num_rows)
            return
        batch_rows = self._batch_rows(group, columns, max_bytes)
        with _readable(self.path):
            yield from self._file.iter_batches(
                batch_size=batch_rows, row_groups=[group], columns=list(columns), use_threads=False
            )

    def _batch_rows(self, group: int, columns: Sequence[str], max_bytes: int) -> int:
        """Rows per batch so that one decodes to about `max_bytes`."""
        row_bytes = self._row_bytes(group, columns)
        return int(np.clip(max_bytes / max(row_bytes, 1), 1, _MAX_BATCH_ROWS))

    def _row_bytes(self, group: int, columns: Sequence[str]) -> float:
        """Decoded bytes of a row of the group, on the average."""
        key = (group, tuple(columns))
        if key not in self._known_row_bytes:
            self._known_row_bytes[key] = self._measured_row_bytes(group, columns)
        return self._known_row_bytes[key]

    def _measured_row_bytes(self, group: int, columns: Sequence[str]) -> float:
        """As the footer has it, or as a few decoded rows have it if that is more.

        The footer's size counts a repeated value once.
        """
        metadata = self._file.metadata.row_group(group)
        row_bytes = self._encoded_bytes(group, columns) / max(metadata.num_rows, 1)
        with _readable(self.path):
            sample = next(
                self._file.iter_batches(
                    batch_size=_SAMPLE_ROWS,
                    row_groups=[group],
                    columns=list(columns),
                    use_threads=False,
                ),
                None,
            )
        if sample is not None and sample.num_rows:
            row_bytes = max(row_bytes, sample.nbytes / sample.num_rows)
        return float(row_bytes)

    def _encoded_bytes(self, group: int, columns: Sequence[str]) -> int:
        metadata = self._file.metadata.row_group(group)
        wanted = set(columns)
        parts = (metadata.column(index) for index in range(metadata.num_columns))
        return sum(
            part.total_uncompressed_size
            for part in parts
            if part.path_in_schema.split(".")[0] in wanted
        )

    def _chunk_reader(self, columns: tuple[str, ...]) -> ChunkReader:
        schema = self.schema(columns)
        if self._has_large_group(columns):
            batches = (batch for _, batch in self.iter_batches(columns, schema, BATCH_BYTES))
            return scratch_chunks(batches, schema, folder=self._scratch, label=str(self.path))
        metadata = self._file.metadata
        sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]

        def read_group(group: int) -> pa.RecordBatch:
            table = self._file.read_row_group(group, columns=list(columns), use_threads=False)
            return table.combine_chunks().to_batches()[0]

        return ChunkReader(sizes, read_group, close=lambda: None)

    def _has_large_group(self, columns: Sequence[str]) -> bool:
        for group in range(self._file.num_row_groups):
            num_rows = self._file.metadata.row_group(group).num_rows
            if num_rows > self._batch_rows(group, columns, _SMALL_GROUP_BYTES):
                return True
        return False


def _open(path: Path) -> pq.ParquetFile:
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
        file.seek(max(path.stat().st_size - len(_MAGIC), 0))
        tail = file.read(len(_MAGIC))
    if head != _MAGIC:
        raise DataError(f"{path}: not a Parquet file (it does not start with PAR1)")
    if tail != _MAGIC:
        raise DataError(f"{path}: the Parquet file is cut short (its footer is missing)")
    with _readable(path):
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as failure:
        reason = " ".join(str(failure).split())[:300]
        raise DataError(f"{path}: damaged or not readable as Parquet: {reason}") from None


def _group_end(group: pq.RowGroupMetaData) -> int:
    ends = []
    for index in range(group.num_columns):
        column = group.column(index)
        starts = [column.data_page_offset]
        if column.has_dictionary_page and column.dictionary_page_offset is not None:
            starts.append(column.dictionary_page_offset)
        ends.append(min(starts) + column.total_compressed_size)
    return int(max(ends, default=0))


def _refuse_huge_rows(path: Path, first_row: int, batch: pa.RecordBatch) -> None:
    if batch.nbytes <= ROW_LIMIT_BYTES:
        return
    for index in range(batch.num_rows):
        if batch.slice(index, 1).nbytes > ROW_LIMIT_BYTES:
            raise DataError(
                f"{path}: row {first_row + index} holds over {ROW_LIMIT_BYTES >> 20} MiB"
            )


def _is_usable(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_usable(kind.value_type)
    if types.is_dictionary(kind):
        return _is_usable(kind.value_type)
    if types.is_struct(kind):
        return all(_is_usable(kind.field(index).type) for index in range(kind.num_fields))
    simple = (
        types.is_string,
        types.is_large_string,
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_null,
        types.is_binary,
        types.is_large_binary,
        types.is_decimal,
        types.is_date,
        types.is_timestamp,
        types.is_time,
        types.is_duration,
    )
    return any(check(kind) for check in simple)
