"""All files of a job's input as one numbered sequence of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from batchrun.errors import DataError
from batchrun.inputs.base import BATCH_BYTES, InputFile, Row
from batchrun.inputs.parquet import ParquetInput
from batchrun.inputs.pin import InputPin, PinnedFile
from batchrun.inputs.pin_blocks import hash_blocks
from batchrun.types import ProgressSink


class InputData:
    """Rows 0 to `num_rows` - 1 over several files. Used by one thread at a time.

    `id_column` is None when the row number is the id. Every method raises DataError, one line
    that names the file (and the line of a text file), when an input cannot be read.
    """

    def __init__(self, files: Sequence[InputFile], *, id_column: str | None) -> None:
        self._files = tuple(files)
        self.id_column = id_column
        self.columns = tuple(dict.fromkeys(name for file in files for name in file.columns))
        self._starts = np.concatenate([[0], np.cumsum([file.num_rows for file in files])])
        self.num_rows = int(self._starts[-1])

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """The Arrow types of `columns` in every batch; reads the rows of JSONL files once."""
        schemas = [file.schema(columns) for file in self._files]
        return pa.schema([_common_field(name, schemas) for name in columns])

    def iter_batches(
        self, columns: Sequence[str] | None = None, *, max_bytes: int = BATCH_BYTES
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) over all rows in order; a batch decodes to about `max_bytes`.

        None means all columns. Memory does not grow with the size of the input.
        """
        names = self.columns if columns is None else tuple(columns)
        schema = self.schema(names)
        for start, file in zip(self._starts.tolist(), self._files, strict=False):
            for first_row, batch in file.iter_batches(names, schema, max_bytes):
                yield start + first_row, batch

    def iter_rows(
        self, columns: Sequence[str] | None = None, *, max_bytes: int = BATCH_BYTES
    ) -> Iterator[tuple[int, list[Row]]]:
        """Like `iter_batches`, as the native values that a template sees."""
        names = self.columns if columns is None else tuple(columns)
        for start, file in zip(self._starts.tolist(), self._files, strict=False):
            for first_row, rows in file.iter_rows(names, max_bytes):
                yield start + first_row, rows

    def read_rows(self, rows: Sequence[int], columns: Sequence[str] | None = None) -> list[Row]:
        """The given rows, in any order, in the order given. Raises IndexError out of range."""
        names = self.columns if columns is None else tuple(columns)
        wanted = np.asarray(rows, dtype=np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < self.num_rows:
            raise IndexError(f"rows must lie within 0 and {self.num_rows - 1}")
        owners = np.searchsorted(self._starts, wanted, side="right") - 1
        found: dict[int, Row] = {}
        for owner in np.unique(owners).tolist():
            positions = np.flatnonzero(owners == owner).tolist()
            local = (wanted[positions] - self._starts[owner]).tolist()
            values = self._files[owner].read_rows(local, names)
            found.update(zip(positions, values, strict=True))
        return [found[position] for position in range(len(rows))]

    def row_id(self, row: Mapping[str, object], row_number: int) -> str:
        """The id of a row that was read with `id_column` among its columns."""
        return str(row_number if self.id_column is None else row[self.id_column])

    def pin(self, progress: ProgressSink | None = None) -> InputPin:
        """Reads every byte once and says what the files are now."""
        total = sum(file.path.stat().st_size for file in self._files)
        pinned: list[PinnedFile] = []
        done = 0
        for file in self._files:
            pinned.append(_pin_file(file, done, total, progress))
            done += pinned[-1].size_bytes
        return InputPin(files=tuple(pinned), num_rows=self.num_rows)

    def places(self) -> list[tuple[Path, int, int]]:
        """(file, first row, row after the last) of each file."""
        bounds = pairwise(self._starts.tolist())
        return [(file.path, *pair) for file, pair in zip(self._files, bounds, strict=True)]

    def chunked_files(self) -> list[tuple[int, ParquetInput]]:
        """(first row, file) of the files that `read_rows` decodes in chunks of many rows."""
        files = zip(self._starts.tolist(), self._files, strict=False)
        return [(start, file) for start, file in files if isinstance(file, ParquetInput)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files."""
        for file in self._files:
            file.close()


def _common_field(name: str, schemas: Sequence[pa.Schema]) -> pa.Field:
    """The field in a type that holds the values of all files; text when nothing else does."""
    single = [pa.schema([schema.field(name)]) for schema in schemas]
    try:
        return pa.unify_schemas(single, promote_options="permissive").field(name)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.field(name, pa.string())


def _pin_file(file: InputFile, done: int, total: int, progress: ProgressSink | None) -> PinnedFile:
    def report(position: int) -> None:
        if progress is not None:
            progress("pinning the input", done + position, total)

    path = file.path.absolute()
    try:
        before = path.stat()
        ends = file.block_ends()
        hashes = hash_blocks(path, ends, on_bytes=report)
        after = path.stat()
    except OSError as failure:
        raise DataError(f"{path}: cannot be read: {failure.strerror}") from None
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"{path}: is being written to while it is read; submit it when complete")
    return PinnedFile(
        path=str(path),
        size_bytes=after.st_size,
        mtime_ns=after.st_mtime_ns,
        block_ends=tuple(ends),
        block_hashes=tuple(hashes),
    )
