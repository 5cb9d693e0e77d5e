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
from batchrun.jobs.inputs.parquet import JSON_COLUMNS, tag_of
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
    names = dict.fromkeys(name for row in rows for name in row if isinstance(name, str))

    def select(wanted: Sequence[str]) -> pl.DataFrame:
        return pl.DataFrame([_of_values(name, [row.get(name) for row in rows]) for name in wanted])

    return Frame(len(rows), tuple(names), select, lambda added: select([*names]).hstack(added))


def _of_values(name: str, values: Sequence[object]) -> pl.Series:
    def made() -> pl.Series:
        cells = [{name: value} for value in values]
        return pl.DataFrame(cells, infer_schema_length=None).to_series()

    with _told(f"column {name!r} of the rows cannot be read"):
        return _unchanged(name, values, made)


_TIMES = {datetime.date, datetime.datetime, datetime.time, datetime.timedelta}
_PLAIN = {str, int, float, bool, bytes, decimal.Decimal, *_TIMES}
_CHANGED = {int, decimal.Decimal, datetime.datetime, datetime.time}
"""Of these, columns of a type of their own do not hold all values."""


def _unchanged(name: str, values: Sequence[object], make: Callable[[], pl.Series]) -> pl.Series:
    """The column that is made of these values, or where that would change one of them, as structs
    of all their keys do, a column of the values themselves."""
    kinds = {type(value) for value in values if value is not None}
    is_odd = kinds <= _CHANGED and any(map(_is_odd, values))
    if len(kinds) <= 1 and kinds <= _PLAIN and not is_odd:
        return make()
    # Raises ValueError and RecursionError for values that hold themselves, or are nested so deeply
    # that polars would crash the process.
    json.dumps(list(values), skipkeys=True, default=id)
    if not _has_one_form(values):
        return pl.Series(name, values, dtype=pl.Object)
    with suppress(*FOREIGN):
        made = make()
        is_same = all(map(_is_same, made.to_list(), values))
        if is_same or (len(kinds) == 1 and not _is_json(values, _plain)):
            return made
    return pl.Series(name, values, dtype=pl.Object)


def _is_json(values: Sequence[object], default: Callable[[object], object]) -> bool:
    """Whether JSON has something for them; for bytes it has not."""
    with suppress(TypeError, ValueError, RecursionError):
        json.dumps(list(values), default=default)
        return True
    return False


def _has_one_form(values: Sequence[object]) -> bool:
    """Whether the decimals among these have one exponent and fit into 38 digits: polars changes
    others, or panics."""
    told = [value.as_tuple() for value in values if isinstance(value, decimal.Decimal)]
    is_short = all(each.exponent in range(-38, 1) and len(each.digits) <= 38 for each in told)
    return is_short and len({each.exponent for each in told}) <= 1


def _is_odd(value: object) -> bool:
    """Whether a column may change it: a large number, a decimal, or a time with a zone."""
    is_zoned = getattr(value, "tzinfo", None) is not None
    return is_zoned or isinstance(value, decimal.Decimal) or _is_large(value)


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
    if isinstance(given, decimal.Decimal | datetime.datetime | datetime.time):
        return str(made) == str(given)
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
        whole = frame.assign()
        for name in added.columns:
            whole[name] = _to_pandas(added[name], frame.index)
        return whole

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
    stays as it was, and is told by its ctime to be in use. A column of what Parquet lacks is JSON
    text, marked as such for who reads it. Raises DataError for what neither has."""
    make_folder(folder, mode=0o700)
    scratch = folder / f".{secrets.token_hex(8)}.parquet"
    try:
        with _told("the rows cannot be written as Parquet"):
            names = [name for name, kind in table.schema.items() if _is_foreign(kind)]
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


def _is_foreign(kind: pl.DataType) -> bool:
    """Whether no file holds a column of this type, but JSON text may."""
    if isinstance(kind, pl.List | pl.Array):
        return _is_foreign(cast("pl.DataType", kind.inner))
    if isinstance(kind, pl.Struct):
        return any(_is_foreign(cast("pl.DataType", field.dtype)) for field in kind.fields)
    return kind in {pl.Object, pl.Int128, pl.UInt128}


def _as_json(column: pl.Series) -> pl.Series:
    values = column.to_list()
    has_type = column.dtype != pl.Object or _has_type(values)
    texts = [
        None
        if value is None
        else json.dumps(value, ensure_ascii=False, default=_tagged if has_type else _plain)
        for value in values
    ]
    return pl.Series(column.name, texts, dtype=pl.String)


def _has_type(values: Sequence[object]) -> bool:
    """Whether columns have a type for these values but for the digits of decimals and zones of
    times: templates then read decimals and times, and otherwise JSON's own numbers and texts."""
    with suppress(*FOREIGN):
        alike = [_alike(value) for value in values]
        made = pl.DataFrame([{"": value} for value in alike], infer_schema_length=None).to_series()
        num_kinds = len({type(value) for value in values if value is not None})
        is_same = all(map(_is_same, made.to_list(), alike))
        return is_same or (num_kinds == 1 and not _is_json(alike, _timeless))
    return False


def _alike(value: object) -> object:
    """The value with one decimal in place of all, and without zones."""
    if isinstance(value, Mapping):
        return {key: _alike(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_alike(item) for item in value]
    if isinstance(value, decimal.Decimal):
        return decimal.Decimal(0)
    if isinstance(value, datetime.datetime):
        return datetime.datetime.min
    return value.replace(tzinfo=None) if isinstance(value, datetime.time) else value


def _timeless(value: object) -> object:
    if isinstance(value, datetime.date | datetime.time):
        raise TypeError
    return _plain(value)


def _plain(value: object) -> object:
    """What JSON has in place of a value, and of a decimal that its numbers cannot say, its tag.
    Raises TypeError for bytes, among others."""
    if isinstance(value, datetime.date | datetime.time) and value == value:
        return value.isoformat()
    if isinstance(value, decimal.Decimal) and value.is_finite():
        told = float(value)
        if decimal.Decimal(repr(told)) == value:
            return told
    return _tagged(value)


def _tagged(value: object) -> object:
    """What stands in JSON for a value. Raises TypeError as `_plain` does."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, decimal.Decimal):
        return {tag_of(decimal.Decimal): decimal.Decimal.__str__(value)}
    for kind in (datetime.datetime, datetime.date, datetime.time):
        if isinstance(value, kind):
            is_nothing = value != value  # pandas' NaT
            return None if is_nothing else {tag_of(kind): value.isoformat()}
    raise TypeError(f"a {type(value).__name__} within or beside other values: {value!r:.80}")
