"""What every input file offers, whatever its format: Arrow batches, native rows, random access.

Native values are those that templates and JSON writers see.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchrun.errors import DataError

Row = dict[str, object]
"""Column -> native Python value."""

ROW_LIMIT_BYTES = 64 << 20
"""Largest row; a longer one is refused with its place."""

BOM = b"\xef\xbb\xbf"
"""A byte order mark, which a file of rows may begin with."""

BATCH_BYTES = 8 << 20
"""About how much decoded data a reader holds at a time."""

CACHE_BYTES = 64 << 20
"""How much of what was read last stays in memory for random access."""


_BLOCK_BYTES = 256 << 10
_IS_SOLID = np.array([octet not in b" \t\r\n" for octet in range(256)])
"""What makes a line of a text file a row: anything but what JSON calls white space."""

Numbers = npt.NDArray[np.int64]


class Lines(NamedTuple):
    """Some lines of a file: their numbers from 1, and where each begins and ends in it."""

    numbers: Numbers
    starts: Numbers
    ends: Numbers


def find_lines(file_no: int, start: int = 0, *, is_quoted: bool = False) -> Iterator[Lines]:
    """The lines that are not blank, from byte `start` on, a block of the file at a time: a blank
    line costs what its bytes cost.

    Where the file `is_quoted`, line ends inside "..." end no line. Raises OSError, and ValueError
    after the last line if that has a quote that is never closed.
    """
    position, number, num_quotes, is_open = start, 1, 0, False
    while block := os.pread(file_no, _BLOCK_BYTES, position):
        octets = np.frombuffer(block + b"\n", dtype=np.uint8)
        breaks = np.flatnonzero(octets[:-1] == ord("\n"))
        if is_quoted:
            quotes = np.flatnonzero(octets == ord('"'))
            breaks = breaks[(np.searchsorted(quotes, breaks) + num_quotes) % 2 == 0]
            num_quotes += len(quotes)
        begins = np.append(0, breaks + 1)
        is_solid = _IS_SOLID[octets[begins]]
        if not is_solid.all():
            is_solid = np.logical_or.reduceat(_IS_SOLID[octets], begins)
        is_solid[0] |= is_open
        bounds = begins + position
        bounds[0] = start
        kept = np.flatnonzero(is_solid[:-1])
        yield Lines(kept + number, bounds[kept], bounds[kept + 1])
        start, is_open = int(bounds[-1]), bool(is_solid[-1])
        position, number = position + len(block), number + len(breaks)
    if is_open:
        yield Lines(*(np.array([value]) for value in (number, start, position)))
    if num_quotes % 2:
        raise ValueError("a quoted field is never closed (an odd number of quotes)")


class FileState(NamedTuple):
    """A file as it looks from outside; one that was written to looks otherwise."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """As it is now. Raises OSError."""
        status = path.stat()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class InputFile(ABC):
    """One file of rows, numbered from 0. Used by one thread at a time.

    `opened_as` is how it looked before it was opened. Every method raises DataError, one line that
    names the file, when it cannot be read.
    """

    path: Path
    opened_as: FileState
    num_rows: int
    columns: tuple[str, ...]

    @abstractmethod
    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """The Arrow types of `columns`, the same for every batch; may read the whole file."""

    @abstractmethod
    def iter_batches(
        self, columns: Sequence[str], schema: pa.Schema, max_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) in file order; a batch holds about `max_bytes` decoded bytes."""

    def iter_rows(self, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, list[Row]]]:
        """Like `iter_batches`, as native values: what a template sees."""
        for first_row, batch in self.iter_batches(columns, self.schema(columns), max_bytes):
            yield first_row, native_rows(batch)

    @abstractmethod
    def read_rows(self, rows: Sequence[int], columns: Sequence[str]) -> list[Row]:
        """The given rows in the given order."""

    def place(self, row: int) -> str:
        """Where a row stands; of a text file `FILE:LINE`."""
        return f"{self.path}: row {row}"

    def chunk_sizes(self, columns: Sequence[str]) -> list[tuple[int, int]]:
        """(rows, about how many decoded bytes) of each chunk that `read_rows` decodes at once."""
        del columns
        return [(self.num_rows, 0)]

    def refuse_changed(self) -> None:
        """Raises DataError where the file was written to since it was opened. One whose place
        another has taken is as it was."""
        try:
            now = FileState.of(self.path)
        except OSError:
            return
        if now[:2] == self.opened_as[:2] and now != self.opened_as:
            raise DataError(
                f"{self.path}: was written to while it is read; with what it held, "
                "`batchrun resume JOB` goes on, with what it holds now, `--accept-input`"
            )

    @abstractmethod
    def close(self) -> None:
        """Gives the file back."""


_EMPTY_BATCH_ROWS = 8192


class UndecodableError(ValueError):
    """A value was looked at that Python cannot hold; `shown` is what can be told of it."""

    def __init__(self, reason: str, shown: str | None) -> None:
        super().__init__(reason)
        self.shown = shown


class Undecodable:
    """Stands for a value that Python cannot hold, such as text that is not UTF-8 or a date beyond
    the year 9999: whoever looks at it gets an UndecodableError. Templates see no attribute."""

    def __init__(self, reason: str, shown: str | None) -> None:
        self._told = reason, shown

    def __str__(self) -> str:
        raise UndecodableError(*self._told)

    def __bool__(self) -> bool:
        raise UndecodableError(*self._told)


_UNREADABLE = (ValueError, OverflowError, pa.ArrowException)


def native_rows(batch: pa.RecordBatch) -> list[Row]:
    """The rows of a batch as native Python values; sub-microsecond times are cut.

    What Python cannot hold becomes `Undecodable`.
    """
    if not batch.num_columns:
        return [{} for _ in range(batch.num_rows)]
    names, columns = batch.schema.names, [*map(_without_nanoseconds, batch.columns)]
    try:
        rows: list[Row] = pa.RecordBatch.from_arrays(columns, names=names).to_pylist()
    except _UNREADABLE:
        named = [*zip(names, columns, strict=True)]
        return [
            {name: _cell(name, column, index) for name, column in named}
            for index in range(batch.num_rows)
        ]
    return rows


def _without_nanoseconds(column: pa.Array) -> pa.Array:
    kind = with_leaves(column.type, _at_most_microseconds)
    return column if kind == column.type else column.cast(without_nulls(kind), safe=False)


def _cell(name: str, column: pa.Array, index: int) -> object:
    """One value. Arrow ends the process where it casts a part of a column with nested nulls."""
    try:
        return column[index].as_py()
    except UnicodeDecodeError:
        reason = f"column {name!r} is not valid UTF-8"
    except _UNREADABLE as error:
        reason = f"column {name!r} cannot be read: {error}"
    shown = None
    if not column.type.num_fields:
        cell = column.slice(index, 1)
        with suppress(*_UNREADABLE):
            if pa.types.is_timestamp(cell.type):
                cell = cell.cast(pa.timestamp(cell.type.unit), safe=False)  # UTC in any zone.
            octets = cell.cast(pa.string(), safe=False).cast(pa.binary())[0].as_py()
            shown = octets.decode("utf-8", "replace")
    return Undecodable(reason, shown)


def empty_batches(num_rows: int) -> Iterator[pa.RecordBatch]:
    """Batches without columns, `num_rows` rows in all."""
    for first in range(0, num_rows, _EMPTY_BATCH_ROWS):
        marks = pa.nulls(min(_EMPTY_BATCH_ROWS, num_rows - first))
        yield pa.RecordBatch.from_arrays([marks], names=["row"]).select([])


_TYPE_NAMES: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
}


def type_name(value: object) -> str:
    """What JSON calls a value of this type, with its article; null alone."""
    return _TYPE_NAMES.get(type(value), "null")


def plain_json(value: object) -> object:
    """`value` with only JSON's types in it: times as ISO text, bytes as base64, NaN as null; what
    Python cannot hold as text. Raises ValueError where that cannot be done."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, Undecodable):
        return _told_of(value)
    return value


def _told_of(value: Undecodable) -> str:
    try:
        return str(value)
    except UndecodableError as error:
        if error.shown is None:
            raise
        return error.shown


def with_leaves(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with those changed that stand within its structs and lists, or itself."""
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(with_leaves(each.type, change)) for each in kind.fields])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        field = kind.value_field.with_type(with_leaves(kind.value_type, change))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(field, kind.list_size)
        return pa.list_(field) if pa.types.is_list(kind) else pa.large_list(field)
    return change(kind)


def without_nulls(kind: pa.DataType) -> pa.DataType:
    """The type with text where all values are null: Arrow casts nulls within lists wrong."""
    return with_leaves(kind, lambda leaf: pa.string() if pa.types.is_null(leaf) else leaf)


def cast_changed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch in these types; columns that have theirs are not cast. Raises ArrowException."""
    if batch.schema == schema:
        return batch
    columns = [
        column if column.type == kind else column.cast(kind)
        for column, kind in zip(batch.columns, schema.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _at_most_microseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    return kind
