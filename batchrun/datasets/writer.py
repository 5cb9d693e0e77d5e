"""Write rows of text to one Parquet file: bounded memory, and whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import InputError
from batchrun.types import ProgressSink

ROW_GROUP_BYTES = 8 * 2**20

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WrittenDataset:
    """What was written: where, how many rows, and the size of the file."""

    path: Path
    num_rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """Whom to tell of written rows, and how many there will be (0 when unknown)."""

    sink: ProgressSink | None = None
    total_rows: int = 0

    def tell(self, num_rows: int) -> None:
        """Report that `num_rows` rows are written."""
        if self.sink is not None:
            self.sink("writing rows", num_rows, self.total_rows)


def write_rows(
    path: Path, schema: pa.Schema, rows: Iterator[Row], *, report: ProgressReport
) -> WrittenDataset:
    """Write `rows`, in the order of the schema's columns, to the Parquet file `path`.

    Holds one row group (8 MiB of text) in memory. The file gets its name when it is complete;
    what was there before is replaced then. Raises InputError when it cannot be written.
    """
    if path.suffix != ".parquet":
        raise InputError(f"{path}: the name of the file to write must end in .parquet")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            num_rows = _write_file(unfinished, schema, rows, report)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{path}: cannot be written: {path.parent} is not a folder") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return WrittenDataset(path, num_rows, path.stat().st_size)


def _write_file(path: Path, schema: pa.Schema, rows: Iterator[Row], report: ProgressReport) -> int:
    num_rows = 0
    # Texts that many rows share are stored once per row group, hence the large dictionary.
    options = {"compression": "zstd", "dictionary_pagesize_limit": ROW_GROUP_BYTES}
    with pq.ParquetWriter(path, schema, store_schema=False, **options) as writer:
        while group := list(_take_group(rows)):
            columns = [
                pa.array(texts, field.type)
                for texts, field in zip(zip(*group, strict=True), schema, strict=True)
            ]
            writer.write_table(pa.table(columns, schema=schema))
            num_rows += len(group)
            report.tell(num_rows)
    return num_rows


def _take_group(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows up to one row group's bytes; none when there are no more."""
    size_bytes = 0
    for row in rows:
        size_bytes += sum(map(len, row))
        yield row
        if size_bytes >= ROW_GROUP_BYTES:
            return
