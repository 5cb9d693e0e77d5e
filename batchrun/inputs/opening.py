"""Input paths -> `InputData`: globs, formats, and every way a path can disappoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from batchrun.errors import DataError, JobSpecError
from batchrun.inputs.base import InputFile
from batchrun.inputs.csv_text import CsvInput
from batchrun.inputs.data import InputData
from batchrun.inputs.jsonl import JsonlInput
from batchrun.inputs.parquet import ParquetInput
from batchrun.inputs.pin import InputPin, pinned_path
from batchrun.jobspec import InputSpec, JobSpec, input_files
from batchrun.yaml_lines import suggestion

_FORMATS: dict[str, Callable[..., InputFile]] = {
    "parquet": ParquetInput,
    "jsonl": JsonlInput,
    "openai-batch": JsonlInput,
    "csv": CsvInput,
}
_SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
}
BATCH_COLUMNS = ("custom_id", "method", "url", "body")


def open_input(spec: InputSpec, *, scratch: Path | None = None) -> InputData:
    """Opens all files of an input. `scratch`: a folder for unpacked copies, for example the
    store's (default: the system's temporary folder).

    Raises DataError, one line, when a path is missing or not a readable file of its format,
    when there are no rows, or when `spec.id` is not a column.
    """
    return _open_all(spec, input_files(spec.path), scratch)


def open_pinned(
    spec: InputSpec, pin: InputPin, *, links: Path | None = None, scratch: Path | None = None
) -> InputData:
    """Opens exactly the pinned files, through their links in `links` where the path changed."""
    return _open_all(spec, [pinned_path(file, links) for file in pin.files], scratch)


def check_columns(spec: JobSpec, data: InputData) -> None:
    """Raises JobSpecError when `output.keep` names a column that the input does not have."""
    for index, column in enumerate(spec.output.keep):
        if column not in data.columns:
            place = spec.where(f"output.keep[{index}]")
            raise JobSpecError(f"{place}: {no_column(column, data.columns)}")


def no_column(column: str, columns: Sequence[str]) -> str:
    """`the input has no column 'x' ...; its columns are a, b`."""
    shown = ", ".join(columns[:40]) + (", ..." if len(columns) > 40 else "")
    hint = suggestion(column, columns)
    return f"the input has no column {column!r}{hint}; its columns are {shown}"


def _open_all(spec: InputSpec, paths: Sequence[Path], scratch: Path | None) -> InputData:
    opened: list[InputFile] = []
    try:
        for path in paths:
            opened.append(_open_one(spec, path, scratch))
            _check_same_columns(opened[0], opened[-1])
        id_column = "custom_id" if spec.format == "openai-batch" else spec.id
        data = InputData(opened, id_column=id_column)
        _check_rows(spec, data)
    except (DataError, OSError):
        for file in opened:
            file.close()
        raise
    return data


def _open_one(spec: InputSpec, path: Path, scratch: Path | None) -> InputFile:
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file, or a glob such as {path}/*.parquet")
    try:
        if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises on a name too long
            path.stat()
            raise DataError(f"{path}: is not a regular file")
        return _FORMATS[_format_of(spec, path)](path, scratch=scratch)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as failure:
        raise DataError(f"{path}: cannot be read: {failure.strerror or failure}") from None


def _format_of(spec: InputSpec, path: Path) -> str:
    if spec.format != "auto":
        return spec.format
    suffixes = path.suffixes[:-1] if path.suffix in {".gz", ".zst"} else path.suffixes
    if suffixes and suffixes[-1].lower() in _SUFFIXES:
        return _SUFFIXES[suffixes[-1].lower()]
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
    raise DataError(f"{path}: unknown format; set input.format to parquet, jsonl or csv")


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
