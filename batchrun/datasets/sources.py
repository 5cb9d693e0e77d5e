"""Read files of other projects, plain or gzip-compressed, with errors that name file and line."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from batchrun.errors import DataError

MAX_LINE_CHARACTERS = 64 * 2**20
MAX_JSON_CHARACTERS = 512 * 2**20

Record = dict[str, object]


def find_file(source: Path, folders: Sequence[str], name: str) -> Path | None:
    """`name` or `name`.gz in the first of `folders` below `source` that has it."""
    for folder in folders:
        for candidate in (source / folder / name, source / folder / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    return None


def require_file(source: Path, folders: Sequence[str], name: str) -> Path:
    """Like `find_file`; a DataError that tells where it was looked for when it is nowhere."""
    if not source.is_dir():
        raise DataError(f"{source}: is not a folder; name the one that holds the data set's files")
    found = find_file(source, folders, name)
    if found is None:
        places = " or ".join(str(Path(folder) / name) for folder in folders)
        raise DataError(f"{source}: has no {places} (nor with .gz); is it the right folder?")
    return found


def json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Line number (from 1) and object of every line of a JSON Lines file."""
    with _opened(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_CHARACTERS):
            number += 1
            if line.strip():
                yield number, as_record(_parsed(line, path, number), f"{path}:{number}")


def json_document(path: Path) -> object:
    """The one JSON value of a file."""
    with _opened(path) as file:
        text = file.read(MAX_JSON_CHARACTERS + 1)
    if len(text) > MAX_JSON_CHARACTERS:
        raise DataError(f"{path}: is larger than {MAX_JSON_CHARACTERS} characters")
    return _parsed(text, path, 1)


def csv_records(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and record of every row of a CSV file that must have `columns`."""
    with _opened(path) as file:
        reader = csv.DictReader(file, strict=True)
        try:
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"{path}:1: has no column {missing[0]!r}; is it the right file?")
            for record in reader:
                if None in record or None in record.values():
                    raise DataError(
                        f"{path}:{reader.line_num}: has not as many fields as the header"
                    )
                yield reader.line_num, record
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: is not CSV: {error}") from error


def text_field(record: Record, key: str, where: str) -> str:
    """The string at `key`; a DataError that begins with `where` when it is not there."""
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: has no text {key!r}")
    return value


def as_record(value: object, where: str) -> Record:
    """`value` as a JSON object; a DataError that begins with `where` when it is none."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: is not a JSON object")
    return value


def _parsed(text: str, path: Path, first_line: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{path}:{line}: is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{path}:{first_line}: is nested too deeply") from error


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """The text of a file; whatever is wrong with its bytes is a DataError."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        # utf-8-sig: some of the CSV files begin with a byte order mark.
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error.reason}") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path}: is not a whole gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
