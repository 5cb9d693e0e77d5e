"""DataFrames in and out: polars, pandas and Arrow, by the rows that a template reads.

pandas is never imported here: a caller who hands over one of its frames has it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from batchrun.errors import DataError, InputError
from batchrun.files import make_folder, sync_file, sync_folder
from batchrun.jobs.pin import even_block_ends, hash_blocks

ROW_GROUP_ROWS = 8_192
NAME_CHARS = 16
"""Of the 128 bits of a hash, so many hexadecimal digits name a file."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A caller's rows: the names of their columns, some of them as polars, more columns added.

    `joined(table)` is the caller's own kind of frame, with the columns of `table` on its right.
    """

    num_rows: int
    columns: tuple[str, ...]
    select: Callable[[Sequence[str]], pl.DataFrame]
    joined: Callable[[pl.DataFrame], Any]


def frame_of(given: Any) -> Frame:
    """What was handed over, as one of the four kinds. Raises InputError for anything else."""
    kinds = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(given).mro()}
    if isinstance(given, pl.LazyFrame):
        return _polars(_collected(given), lambda table: table.lazy())
    if isinstance(given, pl.DataFrame):
        return _polars(given, lambda table: table)
    if ("pyarrow", "Table") in kinds:
        return _arrow(given)
    if ("pandas", "DataFrame") in kinds:
        return _pandas(given)
    raise InputError(
        f"a {type(given).__name__} is no table: give a polars, pandas or Arrow one; for rows in "
        "plain Python there is batchrun.stream"
    )


def _collected(frame: pl.LazyFrame) -> pl.DataFrame:
    try:
        return frame.collect()
    except (pl.exceptions.PolarsError, OSError) as failure:
        reason = " ".join(str(failure).split())[:300]
        raise DataError(f"the LazyFrame cannot be collected: {reason}") from failure


def frame_of_rows(rows: Sequence[Mapping[str, object]]) -> Frame:
    """Rows in plain Python; a key that a row lacks is null. Raises DataError."""
    try:
        table = pl.DataFrame([dict(row) for row in rows], infer_schema_length=None)
    except (pl.exceptions.PolarsError, TypeError, ValueError) as failure:
        reason = " ".join(str(failure).split())[:300]
        raise DataError(f"the rows do not make a table: {reason}") from None
    return _polars(table, lambda joined: joined)


def _polars(table: pl.DataFrame, shape: Callable[[pl.DataFrame], Any]) -> Frame:
    return Frame(
        table.height,
        tuple(table.columns),
        lambda names: table.select(names),
        lambda added: shape(table.hstack(added)),
    )


def _arrow(table: Any) -> Frame:
    def select(names: Sequence[str]) -> pl.DataFrame:
        made = pl.from_arrow(table.select(list(names)))
        assert isinstance(made, pl.DataFrame)
        return made

    def joined(added: pl.DataFrame) -> Any:
        whole = table
        for name, column in zip(added.columns, added.to_arrow().columns, strict=True):
            whole = whole.append_column(name, column)
        return whole

    return Frame(table.num_rows, tuple(table.column_names), select, joined)


def _pandas(frame: Any) -> Frame:
    names = {str(name): name for name in frame.columns}

    def select(wanted: Sequence[str]) -> pl.DataFrame:
        series = (_of_pandas(name, frame[names[name]]) for name in wanted)
        return pl.DataFrame(list(series))

    def joined(added: pl.DataFrame) -> Any:
        columns = {name: _to_pandas(added[name], frame.index) for name in added.columns}
        return frame.assign(**columns)

    return Frame(len(frame), tuple(map(str, frame.columns)), select, joined)


def _of_pandas(name: str, series: Any) -> pl.Series:
    try:
        return pl.Series(name, pl.from_pandas(series))
    except (
        pl.exceptions.PolarsError,
        TypeError,
        ValueError,
        ImportError,
        NotImplementedError,
    ) as failure:
        reason = " ".join(str(failure).split())[:300]
        raise DataError(f"column {name!r} of the frame cannot be read: {reason}") from None


def _to_pandas(column: pl.Series, index: Any) -> Any:
    """A pandas Series over `index`. Whole numbers and booleans keep their type beside nulls."""
    nullable = column.dtype.is_integer() or column.dtype == pl.Boolean
    made = column.to_pandas(use_pyarrow_extension_array=False)
    if nullable and column.null_count():
        kind = "boolean" if column.dtype == pl.Boolean else "Int64"
        made = column.to_pandas(use_pyarrow_extension_array=True).astype(kind)
    return made.set_axis(index)


def kept_rows(table: pl.DataFrame, folder: Path) -> Path:
    """The rows as a Parquet file in `folder`, named by its content: equal rows are one file, which
    stays as it was. Raises DataError for a column of a type that Parquet does not have."""
    make_folder(folder, mode=0o700)
    scratch = folder / f".{secrets.token_hex(8)}.parquet"
    try:
        try:
            text = table.cast({pl.Categorical: pl.String, pl.Enum: pl.String}).rechunk()
            text.write_parquet(scratch, row_group_size=ROW_GROUP_ROWS)
        except pl.exceptions.PolarsError as failure:
            reason = " ".join(str(failure).split())[:300]
            raise DataError(f"the rows cannot be written as Parquet: {reason}") from None
        digests = hash_blocks(scratch, even_block_ends(scratch.stat().st_size)[-1:])
        path = folder / f"{digests[0][:NAME_CHARS]}.parquet"
        if not path.exists():
            sync_file(scratch)
            scratch.replace(path)
            sync_folder(folder)
        return path
    finally:
        scratch.unlink(missing_ok=True)
