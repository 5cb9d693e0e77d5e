"""DataFrames in and out: polars, pandas and Arrow, by the rows that a template reads.

pandas is never imported here: a caller who hands over one of its frames has it.
"""

from __future__ import annotations

import datetime
import decimal
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl

from batchrun.errors import BatchrunError, DataError, InputError
from batchrun.files import make_folder, sync_file, sync_folder
from batchrun.jobs.inputs.parquet import JSON_COLUMNS
from batchrun.jobs.pin import even_block_ends, hash_blocks

ROW_GROUP_ROWS = 8_192
NAME_CHARS = 16
"""Of the 128 bits of a hash, so many hexadecimal digits name a file."""


FOREIGN = (
    *(pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ImportError),
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)
"""What libraries raise on data that they cannot take."""


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
    """What was handed over, as one of the four kinds. Raises InputError for anything else, and in
    a process that was forked after a call."""
    _refuse_fork()
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


@cache
def _first_pid() -> int:
    """The process that began polars' threads, as far as is known; a forked one inherits the answer
    and has no such threads."""
    return os.getpid()


def _refuse_fork() -> None:
    if _first_pid() != os.getpid():
        raise InputError(
            "this process was forked after a call of batchrun, and polars would hang in it; use "
            'multiprocessing\'s start method "spawn", or threads'
        )


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Raises DataError for whatever a library raises on data that it cannot take."""
    try:
        yield
    except BatchrunError:
        raise
    except FOREIGN as failure:
        reason = " ".join(str(failure).split())[:300] or type(failure).__name__
        raise DataError(f"{what}: {reason}") from None


def _collected(frame: pl.LazyFrame) -> pl.DataFrame:
    with _told("the LazyFrame cannot be collected"):
        return frame.collect()


def frame_of_rows(rows: Sequence[Mapping[str, object]]) -> Frame:
    """Rows in plain Python; a key that a row lacks is null. Raises DataError, and InputError as
    `frame_of` does."""
    _refuse_fork()
    names = dict.fromkeys(name for row in rows for name in row)
    with _told("the rows do not make a table"):
        table = pl.DataFrame({
            name: _of_values(name, [row.get(name) for row in rows]) for name in names
        })
    return _polars(table, lambda joined: joined)


def _of_values(name: str, values: Sequence[object]) -> pl.Series:
    def made() -> pl.Series:
        cells = [{name: value} for value in values]
        return pl.DataFrame(cells, infer_schema_length=None).to_series()

    return _unchanged(name, values, made)


_TIMES = {datetime.date, datetime.datetime, datetime.time, datetime.timedelta}
_PLAIN = {str, int, float, bool, bytes, decimal.Decimal, *_TIMES}


def _unchanged(name: str, values: Sequence[object], make: Callable[[], pl.Series]) -> pl.Series:
    """The column that is made of these values, or where that would change one of them, as structs
    of all their keys do, a column of the values themselves."""
    kinds = {type(value) for value in values if value is not None}
    has_large = kinds == {int} and any(map(_is_large, values))
    if len(kinds) <= 1 and kinds <= _PLAIN and not has_large:
        return make()
    # Raises ValueError and RecursionError for values that hold themselves, or are nested so deeply
    # that polars would crash the process.
    json.dumps(list(values), skipkeys=True, default=id)
    with suppress(*FOREIGN):
        made = make()
        is_same = all(map(_is_same, made.to_list(), values))
        if is_same or (len(kinds) == 1 and not _is_json(values)):
            return made
    return pl.Series(name, values, dtype=pl.Object)


def _is_json(values: Sequence[object]) -> bool:
    """Whether JSON has them as they are; of bytes and times it has not."""

    def plain(value: object) -> object:
        if isinstance(value, datetime.date | datetime.time):
            raise TypeError
        return _plain(value)

    with suppress(TypeError, ValueError, RecursionError):
        json.dumps(list(values), default=plain)
        return True
    return False


def _is_large(value: object) -> bool:
    """Whether it is a whole number that no file of columns holds."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def _is_same(made: object, given: object) -> bool:
    """Whether what polars made of a value is still that value, keys and their order included."""
    if isinstance(given, np.generic | np.ndarray):
        given = given.tolist()
    if isinstance(given, Mapping):
        return (
            isinstance(made, dict)
            and list(made) == list(given)
            and all(map(_is_same, made.values(), given.values()))
        )
    if isinstance(given, list | tuple):
        is_list = isinstance(made, list) and len(made) == len(given)
        return is_list and all(map(_is_same, cast("list[object]", made), given))
    is_odd = isinstance(made, bool) != isinstance(given, bool) or _is_large(made)
    if is_odd or not isinstance(given, type(made)):
        return False
    return bool(made == given) or (made != made and given != given)


def _polars(table: pl.DataFrame, shape: Callable[[pl.DataFrame], Any]) -> Frame:
    return Frame(
        table.height,
        tuple(table.columns),
        lambda names: table.select(names),
        lambda added: shape(table.hstack(added)),
    )


def _arrow(table: Any) -> Frame:
    def select(names: Sequence[str]) -> pl.DataFrame:
        with _told("the columns of the table cannot be read"):
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
    def made() -> pl.Series:
        return pl.Series(name, pl.from_pandas(series))

    with _told(f"column {name!r} of the frame cannot be read"):
        if series.dtype != object:
            return made()
        given = zip(series, series.isna(), strict=True)
        return _unchanged(name, [None if is_null else value for value, is_null in given], made)


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
    stays as it was, and is told by its ctime to be in use. A column of objects is JSON text, marked
    as such for who reads it. Raises DataError for a column of a type that Parquet does not have."""
    make_folder(folder, mode=0o700)
    scratch = folder / f".{secrets.token_hex(8)}.parquet"
    try:
        with _told("the rows cannot be written as Parquet"):
            names = [name for name in table.columns if table[name].dtype == pl.Object]
            text = table.with_columns(_as_json(table[name]) for name in names)
            text = text.cast({pl.Categorical: pl.String, pl.Enum: pl.String}).rechunk()
            marks = {JSON_COLUMNS: json.dumps(names)} if names else None
            text.write_parquet(scratch, row_group_size=ROW_GROUP_ROWS, metadata=marks)
        digests = hash_blocks(scratch, even_block_ends(scratch.stat().st_size)[-1:])
        path = folder / f"{digests[0][:NAME_CHARS]}.parquet"
        try:
            path.chmod(path.stat().st_mode)
        except FileNotFoundError:
            sync_file(scratch)
            scratch.replace(path)
            sync_folder(folder)
        return path
    finally:
        scratch.unlink(missing_ok=True)


def _as_json(column: pl.Series) -> pl.Series:
    texts = [
        None if value is None else json.dumps(value, ensure_ascii=False, default=_plain)
        for value in column.to_list()
    ]
    return pl.Series(column.name, texts, dtype=pl.String)


def _plain(value: object) -> object:
    """What JSON has in place of a value. Raises TypeError for bytes, among others."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    raise TypeError(f"a {type(value).__name__} within or beside other values: {value!r:.80}")
