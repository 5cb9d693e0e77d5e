"""An output of many files: a folder that has the output's name, with a file for so many rows.

As with one file, it appears whole or not at all, and an older one is replaced as a whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import BinaryIO, Protocol, Self

import pyarrow as pa

from batchrun.files import is_url
from batchrun.jobs import objects
from batchrun.jobs.inputs.rows import Row

_PART = re.compile(r"part-\d{6}\.(parquet|jsonl)")


class Sink(Protocol):
    """Takes the rows of an output: what came of them, and the input columns that are kept."""

    def write(self, results: Sequence[Row], kept: pa.RecordBatch | Sequence[Row]) -> None:
        """Adds rows."""

    def close(self) -> None:
        """Writes what is left over."""


class PartSink:
    """Writes `part-000000` and so on into a folder, each `rows_per_file` rows but the last; `make`
    gives each its own sink. There is one part at least. Leaving it without an error ends the last.
    """

    def __init__(
        self, folder: Path, suffix: str, rows_per_file: int, make: Callable[[BinaryIO], Sink]
    ) -> None:
        self._folder, self._suffix, self._make = folder, suffix, make
        self._rows_per_file = rows_per_file
        self._num_parts = 0
        self._begin()

    def write(self, results: Sequence[Row], kept: pa.RecordBatch | Sequence[Row]) -> None:
        """Adds rows, to several parts where need be."""
        start = 0
        while start < len(results):
            if not self._left_rows:
                self.close()
                self._begin()
            end = min(start + self._left_rows, len(results))
            self._sink.write(results[start:end], kept[start:end])
            self._left_rows -= end - start
            start = end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        self._file.close()

    def close(self) -> None:
        """Ends a part."""
        self._sink.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _begin(self) -> None:
        path = self._folder / part_name(self._num_parts, self._suffix)
        self._file = path.open("wb")
        self._sink = self._make(self._file)
        self._num_parts += 1
        self._left_rows = self._rows_per_file


def part_name(number: int, suffix: str) -> str:
    """What a part of that number, from 0, is called."""
    return f"part-{number:06}{suffix}"


def first_file(place: str, rows_per_file: int | None) -> str:
    """The file or object that is there when an output is."""
    if rows_per_file is None:
        return place
    return f"{place}/{part_name(0, PurePath(place).suffix)}"


def foreign_file(folder: Path) -> str | None:
    """The name of something in a folder that is no part of an output; None where there is none."""
    if not folder.is_dir():
        return None
    return next((each.name for each in folder.iterdir() if not _PART.fullmatch(each.name)), None)


def holds_input(output: str, inputs: Sequence[str]) -> bool:
    """Whether an input is the output, or lies among its parts."""
    return any(output in {place, place.rpartition("/")[0]} for place in inputs)


def upload(output: Path, place: str) -> None:
    """Make an output the object `place`, or its parts objects below it; parts of an older output
    go. Blocking."""
    if not output.is_dir():
        objects.put(output, place)
        return
    names = sorted(each.name for each in output.iterdir())
    for name in names:
        objects.put(output / name, f"{place}/{name}")
    for name in objects.names_below(place):
        if _PART.fullmatch(name) and name not in names:
            objects.remove(f"{place}/{name}")


def is_written(place: str, rows_per_file: int | None) -> bool:
    """Whether an output is there."""
    first = first_file(place, rows_per_file)
    return objects.exists(first) if is_url(place) else Path(first).exists()
