"""Columns of text files, plain or gzip-compressed, with errors that name file and line."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from batchrun.errors import DataError
from batchrun.simulator.traces.trace import Floats, Ints

MAX_LINE_BYTES = 16 << 20
BLOCK_BYTES = 8 << 20
EPOCH_NS = 1_577_836_800 * 10**9
"""The beginning of 2020."""
GZIP_MAGIC = b"\x1f\x8b"

Column = TypeVar("Column", Floats, Ints)


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
class CsvLayout:
    """The columns that are read: `time` by `read_times`, both `lengths` as whole numbers."""

    time: str
    lengths: tuple[str, str]
    read_times: Callable[[pa.Array], Floats]


@dataclass(frozen=True, slots=True)
class Calls:
    """What a csv file says of its calls, in the file's order."""

    at_s: Floats
    num_prompt_tokens: Ints
    num_output_tokens: Ints


def read_calls(path: Path, layout: CsvLayout) -> Calls:
    """All calls of a csv file with a header; other columns are ignored. Raises DataError."""
    names = [layout.time, *layout.lengths]
    parts: list[tuple[Floats, Ints, Ints]] = []
    num_rows = 0
    with opened(path) as file:
        for batch in _batches(file, path, names):
            at_s = _converted(path, num_rows, batch.column(0), layout.read_times, "a time")
            prompts, outputs = (
                _converted(path, num_rows, batch.column(i), whole_numbers, "a token count")
                for i in (1, 2)
            )
            parts.append((at_s, prompts, outputs))
            num_rows += batch.num_rows
    if not num_rows:
        raise DataError(f"{path}: has no calls")
    return Calls(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def whole_numbers(texts: pa.Array) -> Ints:
    """Token counts. Raises ValueError or ArrowInvalid for anything else."""
    values: Ints = texts.cast(pa.int64()).to_numpy()
    if (values < 0).any():
        raise ValueError("below 0")
    return values


def seconds(texts: pa.Array) -> Floats:
    """Finite numbers. Raises ValueError or ArrowInvalid for anything else."""
    values: Floats = texts.cast(pa.float64()).to_numpy()
    if not np.isfinite(values).all():
        raise ValueError("not a number")
    return values


def instants(texts: pa.Array) -> Floats:
    """Seconds since `EPOCH_NS` from ISO 8601 texts; those without a zone count as UTC.

    Recent instants are exact to 0.03 us so, where seconds since 1970 would be to 0.24 us.
    """
    plain = pc.replace_substring_regex(texts, r"(Z|[+-]00:?00)$", "")
    nanoseconds: Ints = plain.cast(pa.timestamp("ns")).cast(pa.int64()).to_numpy()
    return (nanoseconds - EPOCH_NS) / 1e9


def _batches(file: BinaryIO, path: Path, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    bad: list[pa_csv.InvalidRow] = []

    def on_bad_row(row: pa_csv.InvalidRow) -> str:
        bad.append(row)
        return "error"

    try:
        yield from pa_csv.open_csv(
            file,
            pa_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
            pa_csv.ParseOptions(invalid_row_handler=on_bad_row),
            pa_csv.ConvertOptions(
                include_columns=list(names),
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=False,
                check_utf8=True,
            ),
        )
    except (pa.ArrowException, KeyError) as error:
        if bad:
            # The parser counts the rows of its own block: the place is sought in the file.
            raise DataError(_bad_row_line(path, bad[0])) from error
        raise DataError(_csv_problem(path, names, error)) from error


def _bad_row_line(path: Path, row: pa_csv.InvalidRow) -> str:
    wanted = row.text.encode()
    with opened(path) as file:
        for number, line in lines_of(file, path):
            if line.rstrip(b"\r\n") == wanted:
                return (
                    f"{path}: line {number}: {row.actual_columns} values where "
                    f"{row.expected_columns} belong"
                )
    return f"{path}: a line has {row.actual_columns} values where {row.expected_columns} belong"


def _csv_problem(path: Path, names: Sequence[str], error: Exception) -> str:
    with opened(path) as file:
        first = next((line for _, line in lines_of(file, path)), b"")
    header = first.decode(errors="replace").strip().split(",")
    for name in names:
        if name not in header:
            return f"{path}: line 1: no column {name}"
    reason = str(error).partition("\n")[0]
    return f"{path}: cannot read the trace: {reason}"


def _converted(
    path: Path, row: int, texts: pa.Array, convert: Callable[[pa.Array], Column], what: str
) -> Column:
    try:
        return convert(texts)
    except (pa.ArrowException, ValueError):
        pass
    for place in range(len(texts)):
        try:
            convert(texts.slice(place, 1))
        except (pa.ArrowException, ValueError) as error:
            text = texts[place].as_py()
            line = _line_of_row(path, row + place)
            raise DataError(f"{path}: line {line}: not {what}: {text!r:.60}") from error
    raise AssertionError("a column fails as a whole and not in any row")


def _line_of_row(path: Path, row: int) -> int:
    """The line of a row below the header; rows count from 0 and blank lines are none."""
    with opened(path) as file:
        for place, (number, _) in enumerate(lines_of(file, path)):
            if place == row + 1:
                return number
    raise AssertionError("the row was read before")
