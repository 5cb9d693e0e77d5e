"""Input paths -> `InputData`: all files of a job's input as one numbered sequence of rows.

Handles globs, formats, and every way a path can disappoint. Ids must be unique: checked over all
rows by their hashes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import xxhash

from batchrun.errors import BatchrunError, DataError, JobSpecError, shortened, suggestion
from batchrun.files import allow_many_open_files, is_url
from batchrun.jobs.inputs.parquet import ParquetInput, told_apart
from batchrun.jobs.inputs.rows import (
    BATCH_BYTES,
    FileState,
    InputFile,
    Row,
    Undecodable,
    without_nulls,
)
from batchrun.jobs.inputs.text_files import (
    CsvInput,
    JsonArrayInput,
    JsonlInput,
    TextFile,
    TsvInput,
)
from batchrun.jobs.job_file import input_files
from batchrun.jobs.pin import InputPin, PinnedFile, even_block_ends, hash_blocks, pinned_path
from batchrun.jobs.spec import InputSpec, JobSpec
from batchrun.types import ProgressSink

_FIRST_BYTES = 64 << 10
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")


class InputData:
    """Rows 0 to `num_rows` - 1 over several files. Used by one thread at a time.

    `id_column` is None when the row number is the id; `folders` are where the files were
    submitted, None of objects. Every method raises DataError, one line that names the file (and the
    line of a text file), when an input cannot be read.
    """

    def __init__(
        self, files: Sequence[InputFile], *, id_column: str | None, folders: Sequence[Path | None]
    ) -> None:
        self._files = tuple(files)
        self._folders = tuple(folders)
        self._parquet_files = [file for file in files if isinstance(file, ParquetInput)]
        self.id_column = id_column
        self.columns = tuple(dict.fromkeys(name for file in files for name in file.columns))
        self._starts = np.concatenate([[0], np.cumsum([file.num_rows for file in files])])
        self.num_rows = int(self._starts[-1])
        self._field = cache(self._common_field)
        self._lacking = {
            name: file.path
            for file in files
            if not isinstance(file, JsonlInput)
            for name in set(self.columns) - set(file.columns)
        }

    def _named(self, columns: Sequence[str] | None) -> tuple[str, ...]:
        """These columns, or all. Raises DataError where a file that must have one does not."""
        names = self.columns if columns is None else tuple(columns)
        for name in names:
            if name in self._lacking:
                path = self._lacking[name]
                raise DataError(f"{path}: has no column {name!r}, which another file has")
        return names

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """The Arrow types of `columns` in every batch; reads once the rows of JSONL files, and of
        Parquet files the columns that have other types there."""
        self._named(columns)
        for file in self._files:
            file.schema(columns)
        return pa.schema([self._field(name) for name in columns])

    def _common_field(self, name: str) -> pa.Field:
        """The field in a type that holds the values of all files; text when nothing else does."""
        schemas = [file.schema([name]) for file in self._files]
        jsonl_files = [file for file in self._files if isinstance(file, JsonlInput)]
        is_exact = any(name in file.large for file in jsonl_files)
        try:
            pa.unify_schemas([*map(told_apart, schemas)], promote_options="permissive")
            common = pa.unify_schemas(schemas, promote_options="permissive")
            if any(schema.field(name).type != common.field(name).type for schema in schemas):
                common = pa.schema([f.with_type(without_nulls(f.type)) for f in common])
            for file in self._parquet_files:
                file.check_fits(common)
        except (pa.ArrowInvalid, pa.ArrowTypeError, DataError):
            return pa.field(name, pa.string())
        field = common.field(name)
        is_rounded = is_exact and pa.types.is_floating(field.type)
        is_untold = bool(jsonl_files) and pa.types.is_null(field.type)
        return field.with_type(pa.string()) if is_rounded or is_untold else field

    def check_types(self, columns: Sequence[str], *, is_one_table: bool) -> None:
        """Raises DataError where a Parquet file has one of `columns` in a type that cannot be read,
        or, for one table, values that do not go with those of the others."""
        for file in self._parquet_files:
            file.schema(self._named(columns))
        if is_one_table and self._parquet_files:
            schema = self.schema(columns)
            for file in self._parquet_files:
                file.check_fits(schema)

    def check_first_rows(self, columns: Sequence[str], *, is_one_table: bool) -> None:
        """Raises DataError where the first rows of a Parquet file cannot be read, for one table or
        as native values."""
        for file in self._parquet_files:
            if is_one_table:
                next(file.iter_batches(columns, self.schema(columns), _FIRST_BYTES), None)
            else:
                next(file.iter_rows(columns, _FIRST_BYTES), None)

    def check_lines(self, progress: ProgressSink | None = None) -> None:
        """Reads all of the text files. Raises DataError for the first record that is no row."""
        for start, file in zip(self._starts.tolist(), self._files, strict=False):
            if isinstance(file, TextFile):
                for first_row, _ in file.iter_rows((), BATCH_BYTES):
                    if progress is not None:
                        progress("checking lines", start + first_row, self.num_rows)

    def iter_batches(
        self, columns: Sequence[str] | None = None, *, max_bytes: int = BATCH_BYTES
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(first row, batch) over all rows in order; a batch decodes to about `max_bytes`.

        None means all columns. Memory does not grow with the size of the input.
        """
        names = self._named(columns)
        schema = self.schema(names)
        for start, file in zip(self._starts.tolist(), self._files, strict=False):
            for first_row, batch in file.iter_batches(names, schema, max_bytes):
                yield start + first_row, batch
            file.refuse_changed()

    def iter_rows(
        self, columns: Sequence[str] | None = None, *, max_bytes: int = BATCH_BYTES
    ) -> Iterator[tuple[int, list[Row]]]:
        """Like `iter_batches`, as the native values that a template sees."""
        names = self._named(columns)
        for start, file in zip(self._starts.tolist(), self._files, strict=False):
            for first_row, rows in file.iter_rows(names, max_bytes):
                yield start + first_row, rows
            file.refuse_changed()

    def read_rows(self, rows: Sequence[int], columns: Sequence[str] | None = None) -> list[Row]:
        """The given rows, in any order, in the order given. Raises IndexError out of range."""
        names = self._named(columns)
        wanted = np.asarray(rows, dtype=np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < self.num_rows:
            raise IndexError(f"rows must lie within 0 and {self.num_rows - 1}")
        owners = np.searchsorted(self._starts, wanted, side="right") - 1
        found: dict[int, Row] = {}
        for owner in np.unique(owners).tolist():
            positions = np.flatnonzero(owners == owner).tolist()
            local = (wanted[positions] - self._starts[owner]).tolist()
            values = self._files[owner].read_rows(local, names)
            self._files[owner].refuse_changed()
            found.update(zip(positions, values, strict=True))
        return [found[position] for position in range(len(rows))]

    def refuse_changed(self, rows: Sequence[int]) -> None:
        """Raises DataError where a file of these rows was written to since it was opened."""
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        for owner in np.unique(owners).tolist():
            self._files[owner].refuse_changed()

    def row_id(self, row: Mapping[str, object], row_number: int) -> str:
        """The id of a row that was read with `id_column` among its columns."""
        return str(row_number if self.id_column is None else row[self.id_column])

    def id_type(self) -> pa.DataType:
        """The Arrow type of the ids, as whoever reads the input has them: that of their column,
        and of row numbers int64. CSV has whole numbers where all are written so; reads them all."""
        if self.id_column is None:
            return pa.int64()
        if all(isinstance(file, CsvInput) for file in self._files):
            ids = (row_id for _, row_id in _iter_ids(self, self.id_column))
            return pa.int64() if all(map(_WHOLE_NUMBER.fullmatch, ids)) else pa.string()
        return self.schema([self.id_column]).field(0).type

    def pin(self, progress: ProgressSink | None = None) -> InputPin:
        """Reads every byte once and says what the files are now."""
        total = sum(file.path.stat().st_size for file in self._files)
        pinned: list[PinnedFile] = []
        done = 0
        for file in self._files:
            pinned.append(_pin_file(file, done, total, progress))
            done += pinned[-1].size_bytes
        return InputPin(files=tuple(pinned), num_rows=self.num_rows)

    def place(self, row: int) -> str:
        """Where a row stands: its file, and its line or its number there."""
        owner = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._files[owner].place(row - int(self._starts[owner]))

    def folder(self, row: int) -> Path | None:
        """The folder from which paths in a row are meant; there is none for an object's."""
        return self._folders[int(np.searchsorted(self._starts, row, side="right")) - 1]

    def places(self) -> list[tuple[Path, int, int]]:
        """(file, first row, row after the last) of each file."""
        bounds = pairwise(self._starts.tolist())
        return [(file.path, *pair) for file, pair in zip(self._files, bounds, strict=True)]

    def chunk_sizes(self, columns: Sequence[str]) -> list[list[tuple[int, int]]]:
        """(rows, about how many bytes) of what `read_rows` decodes at once, for each file."""
        return [file.chunk_sizes(columns) for file in self._files]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files."""
        for file in self._files:
            file.close()


def _pin_file(file: InputFile, done: int, total: int, progress: ProgressSink | None) -> PinnedFile:
    def report(position: int) -> None:
        if progress is not None:
            progress("pinning the input", done + position, total)

    path = file.path.absolute()
    try:
        ends = even_block_ends(file.opened_as.size_bytes)
        hashes = hash_blocks(path, ends, on_bytes=report)
        now = FileState.of(path)
    except OSError as failure:
        raise DataError(f"{path}: cannot be read: {failure.strerror}") from failure
    if now != file.opened_as:
        raise DataError(f"{path}: is being written to while it is read; submit it when complete")
    return PinnedFile(
        path=str(path),
        size_bytes=now.size_bytes,
        mtime_ns=now.mtime_ns,
        block_ends=tuple(ends),
        block_hashes=tuple(hashes),
    )


def check_ids(data: InputData, *, progress: ProgressSink | None = None) -> None:
    """Raises DataError for a null id, an id that is not text or a whole number, or one that two
    rows share (naming the id and both rows). Row numbers as ids are always unique."""
    column = data.id_column
    if column is None:
        return
    hashes = np.empty(data.num_rows, dtype=np.uint64)
    for row, row_id in _iter_ids(data, column):
        hashes[row] = xxhash.xxh3_64_intdigest(row_id.encode("utf-8", "surrogatepass"))
        if progress is not None and row % 100_000 == 0:
            progress("checking ids", row, data.num_rows)
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(np.diff(hashes[order]) == 0)
    # Equal hashes are likely, not surely, equal ids: the ids themselves decide.
    for place in same[np.argsort(order[same + 1])]:
        first, second = order[place : place + 2].tolist()
        values = [str(row[column]) for row in data.read_rows([first, second], [column])]
        if values[0] == values[1]:
            raise DataError(
                f"{data.place(second)}: id {shortened(values[0])!r} (column {column!r}) is also "
                f"the id of {data.place(first)}; ids must be unique"
            )


def _iter_ids(data: InputData, column: str) -> Iterator[tuple[int, str]]:
    for first_row, rows in data.iter_rows([column]):
        for index, values in enumerate(rows):
            value = values[column]
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise DataError(
                    f"{data.place(first_row + index)}: the id (column {column!r}) is "
                    f"{_describe(value)}; it must be text or a whole number"
                )
            yield first_row + index, str(value)


def _describe(value: object) -> str:
    if isinstance(value, Undecodable):
        return "not valid UTF-8, or out of range"
    return "null" if value is None else f"a {type(value).__name__}"


_FORMATS: dict[str, Callable[[Path], InputFile]] = {
    "parquet": ParquetInput,
    "jsonl": JsonlInput,
    "openai-batch": JsonlInput,
    "csv": CsvInput,
    "tsv": TsvInput,
    "json": JsonArrayInput,
}
_SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
}
_SPREADSHEETS = frozenset({".xlsx", ".xls", ".xlsm", ".ods"})
MANY_FILES = 100
"""An input of more files may need more at once than a process is given."""
BATCH_COLUMNS = ("custom_id", "method", "url", "body")


def open_input(spec: InputSpec) -> InputData:
    """Opens all files of an input.

    Raises DataError, one line, when a path is missing or not a readable file of its format,
    when there are no rows, or when `spec.id` is not a column; StoreError where no scratch copy
    can be made of one.
    """
    files = input_files(spec.path)
    return _open_all(spec, files, [file.parent for file in files])


def open_pinned(spec: InputSpec, pin: InputPin, *, links: Path | None = None) -> InputData:
    """Opens exactly the pinned files, through their links in `links` where the path changed."""
    folders = [None if is_url(file.path) else Path(file.path).parent for file in pin.files]
    return _open_all(spec, [pinned_path(file, links) for file in pin.files], folders)


def check_columns(spec: JobSpec, data: InputData) -> None:
    """Raises JobSpecError when `output.keep` names a column that the input does not have."""
    for index, column in enumerate(spec.output.keep):
        if column not in data.columns:
            place = spec.where(f"output.keep[{index}]")
            raise JobSpecError(f"{place}: {no_column(column, data.columns)}")


def check_kept(spec: JobSpec, data: InputData) -> None:
    """Raises JobSpecError when the output could not hold a column that `output.keep` names, and
    DataError when one cannot be read."""
    check_columns(spec, data)
    is_one_table = spec.output.path.endswith(".parquet")
    for index, column in enumerate(spec.output.keep):
        try:
            data.check_types([column], is_one_table=is_one_table)
        except DataError as error:
            place = spec.where(f"output.keep[{index}]")
            raise JobSpecError(f"{place}: {column!r} cannot be kept: {error}") from None
    data.check_first_rows(spec.output.keep, is_one_table=is_one_table)


def no_column(column: str, columns: Sequence[str]) -> str:
    """`the input has no column 'x' ...; its columns are a, b`."""
    if not columns:
        return f"the input has no column {column!r}; it has none at all"
    shown = ", ".join(columns[:40]) + (", ..." if len(columns) > 40 else "")
    hint = suggestion(column, columns)
    return f"the input has no column {column!r}{hint}; its columns are {shown}"


def _open_all(spec: InputSpec, paths: Sequence[Path], folders: Sequence[Path | None]) -> InputData:
    opened: list[InputFile] = []
    if len(paths) > MANY_FILES:
        allow_many_open_files()
    try:
        for path in paths:
            opened.append(_open_one(spec, path))
            _check_same_columns(opened[0], opened[-1])
        id_column = "custom_id" if spec.format == "openai-batch" else spec.id
        data = InputData(opened, id_column=id_column, folders=folders)
        _check_rows(spec, data)
    except (BatchrunError, OSError):
        for file in opened:
            file.close()
        raise
    return data


def _open_one(spec: InputSpec, path: Path) -> InputFile:
    try:
        if path.is_dir():
            raise DataError(f"{path}: is a folder; name a file, or a glob such as {path}/*.parquet")
        if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises on a name too long
            path.stat()
            raise DataError(f"{path}: is not a regular file")
        opened_as = FileState.of(path)
        file = _FORMATS[_format_of(spec, path)](path)
        file.opened_as = opened_as
        return file
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as failure:
        raise DataError(f"{path}: cannot be read: {failure.strerror or failure}") from failure


def _format_of(spec: InputSpec, path: Path) -> str:
    if spec.format != "auto":
        return spec.format
    suffixes = path.suffixes[:-1] if path.suffix in {".gz", ".zst"} else path.suffixes
    if suffixes and suffixes[-1].lower() in _SUFFIXES:
        return _SUFFIXES[suffixes[-1].lower()]
    if path.suffix.lower() in _SPREADSHEETS:
        raise DataError(
            f"{path}: a spreadsheet; save it as CSV, or in Python: "
            "batchrun.map(pandas.read_excel(...), ...)"
        )
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
    raise DataError(f"{path}: unknown format; set input.format to parquet, jsonl, json, csv or tsv")


def _check_same_columns(first: InputFile, other: InputFile) -> None:
    doubled = [name for name, count in Counter(other.columns).items() if count > 1]
    if doubled:
        raise DataError(f"{other.path}: two columns are named {doubled[0]!r}")
    if isinstance(first, JsonlInput) or set(first.columns) == set(other.columns):
        return
    odd = sorted(set(first.columns) ^ set(other.columns))[0]
    raise DataError(f"{other.path}: column {odd!r} is not in both this file and {first.path}")


def _check_rows(spec: InputSpec, data: InputData) -> None:
    paths = ", ".join(spec.path)
    if data.num_rows == 0:
        raise DataError(f"{paths}: the input has no rows")
    if data.id_column is not None and data.id_column not in data.columns:
        raise DataError(f"{paths}: input.id: {no_column(data.id_column, data.columns)}")
    if spec.format == "openai-batch":
        missing = [name for name in BATCH_COLUMNS if name not in data.columns]
        if missing:
            raise DataError(f"{paths}: not an OpenAI batch file: {missing[0]!r} is missing")
