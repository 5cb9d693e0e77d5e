"""Columns of csv text, plain or gzip-compressed, with errors that name the file and the line."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path
from typing import BinaryIO

import polars as pl

from batchrun.errors import DataError

MAX_LINE_BYTES = 16 << 20
GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked when it is gzip-compressed. What cannot be read is a DataError."""
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            if is_packed:
                with GzipFile(fileobj=raw) as unpacked:
                    yield unpacked  # type: ignore[misc]  # typeshed: no BinaryIO
            else:
                yield raw
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{path}: cannot read the trace: {reason}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot read the trace: {error}") from error


def lines_of(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and text of each line that is not blank."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{path}: line {number}: longer than {MAX_LINE_BYTES} bytes")
        if line.strip():
            yield number, line


@dataclass(frozen=True, slots=True)
class Column:
    """What is read of a column: `value`, null where its text is not `what` it must be."""

    value: pl.Expr
    what: str

    @classmethod
    def number(
        cls, name: str, *, above: float | None = None, default: float | None = None
    ) -> Column:
        """A finite number, 0 or more, or more than `above`; `default` where the text is empty."""
        text = pl.col(name).str.strip_chars()
        number = text.cast(pl.Float64, strict=False)
        is_right = number.is_finite() & (number >= 0 if above is None else number > above)
        value: pl.Expr = pl.when(is_right).then(number)
        if default is not None:
            value = pl.when(text.is_null() | (text == "")).then(default).otherwise(value)
        return cls(value, "a number, " + ("0 or more" if above is None else f"above {above:g}"))


@dataclass(frozen=True, slots=True)
class CsvText:
    """Text of a csv file. `names` are its columns; rows begin after its first `num_skipped` lines.

    `path` stands in messages: the file, or a file in an archive.
    """

    path: Path
    content: bytes
    names: Sequence[str]
    num_skipped: int = 0

    @classmethod
    def with_header(cls, path: Path) -> CsvText:
        """The first line that is not blank names the columns. Raises DataError."""
        with opened(path) as file:
            content = file.read()
        lead = len(content) - len(content.lstrip())
        end = content.find(b"\n", lead) + 1 or len(content)
        header = content[lead:end].decode(errors="replace")
        names = [name.strip() for name in header.split(",")]
        return cls(path, content, names, content[:lead].count(b"\n") + 1)

    def read(self, columns: Mapping[str, Column]) -> pl.DataFrame:
        """The columns of all rows; blank lines are none. Raises DataError for the first bad one."""
        missing = [name for name in columns if name not in self.names]
        if missing:
            raise DataError(f"{self.path}: line {self.num_skipped}: no column {missing[0]}")
        # Only the first column of a name is read.
        unique = [n if n not in self.names[:i] else f"{i}" for i, n in enumerate(self.names)]
        try:
            found = (
                pl
                .scan_csv(
                    self.content,
                    has_header=False,
                    skip_lines=self.num_skipped,
                    schema=dict.fromkeys(unique, pl.String),
                    missing_columns="insert",
                    encoding="utf8-lossy",
                )
                .select(**{name: column.value for name, column in columns.items()})
                .collect()
            )
        except pl.exceptions.NoDataError:
            return pl.DataFrame(schema=dict.fromkeys(columns, pl.Float64))
        except pl.exceptions.PolarsError as error:
            raise DataError(self._too_long(str(error).partition("\n")[0])) from error
        is_wrong = pl.any_horizontal(pl.all().is_null())
        if wrong := found.select(is_wrong.arg_true()).to_series().to_list():
            self._refuse(wrong, found, columns)
            found = found.filter(~is_wrong)
        return found

    def _refuse(
        self, rows: Sequence[int], found: pl.DataFrame, columns: Mapping[str, Column]
    ) -> None:
        """Raise DataError for the first of the rows that is not a blank line."""
        lines = self.content.split(b"\n")
        for row in rows:
            number = self.num_skipped + row + 1
            line = lines[number - 1] if number <= len(lines) else b"?"
            if not line.strip():
                continue
            where = f"{self.path}: line {number}: "
            values = next(csv.reader([line.decode(errors="replace").rstrip("\r")]))
            if len(values) < len(self.names):
                raise DataError(f"{where}{len(values)} values where {len(self.names)} belong")
            name = next(name for name in columns if found[name][row] is None)
            text = values[self.names.index(name)]
            raise DataError(f"{where}{name} must be {columns[name].what}, not {text!r:.60}")

    def _too_long(self, reason: str) -> str:
        """Which line has more values than there are columns."""
        for number, line in enumerate(self.content.split(b"\n"), 1):
            if number > self.num_skipped and (num := line.count(b",") + 1) > len(self.names):
                return f"{self.path}: line {number}: {num} values where {len(self.names)} belong"
        return f"{self.path}: cannot read the trace: {reason}"
