"""An output of many files: a folder that has the output's name, with a file for so many rows.

It appears whole or not at all, and an older one is replaced as a whole. Below a key of object
storage its first part comes last, and goes first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import BinaryIO, Protocol, Self

import pyarrow as pa

from batchrun.errors import InputError
from batchrun.failpoints import failpoint
from batchrun.files import is_url, make_folder, scratch_folder, sync_folder, write_refusal
from batchrun.jobs import objects
from batchrun.jobs.inputs.rows import Row

_PART = re.compile(r"part-\d{6,}\.(parquet|jsonl)")
_LIBC = ctypes.CDLL(None, use_errno=True)
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""


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


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder, for files that the caller syncs, that takes the name `path` on success; on any
    failure what was there stays. Raises what `atomic_file` raises, InputError also where there is
    what is no part of an output, and StoreError."""
    try:
        _refuse_foreign(path)
        make_folder(path.parent)
        with scratch_folder(path.parent) as scratch:
            made = scratch / "new"
            made.mkdir()
            yield made
            sync_folder(made)
            _refuse_foreign(path)
            failpoint("output.rename.before")
            _give_name(made, path)
            sync_folder(path.parent)
        failpoint("output.rename.after")
    except OSError as failure:
        raise write_refusal(path, failure) from None


def _refuse_foreign(path: Path) -> None:
    if (foreign := foreign_file(path)) is not None:
        raise InputError(f"{path}: {foreign} there is no output of a job; it would be lost")


def _give_name(made: Path, path: Path) -> None:
    """Rename the folder `made`; it becomes what was at `path` before, at no moment is nothing
    there. Raises OSError."""
    try:
        made.rename(path)
    except OSError as failure:
        if failure.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise
        names = os.fsencode(made), os.fsencode(path)
        if _LIBC.renameat2(_HERE, names[0], _HERE, names[1], _EXCHANGE):
            # Network file systems cannot exchange names.
            _give_name_in_two_steps(made, path)


def _give_name_in_two_steps(made: Path, path: Path) -> None:
    before = made.with_name("before")
    path.rename(before)
    try:
        made.rename(path)
    except OSError:
        before.rename(path)
        raise


def part_name(number: int, suffix: str) -> str:
    """What a part of that number, from 0, is called."""
    return f"part-{number:06}{suffix}"


def foreign_file(folder: Path) -> str | None:
    """The name of something in a folder that is no part of an output; None where there is none."""
    if not folder.is_dir():
        return None
    return next((name for name in _names_in(folder) if not _PART.fullmatch(name)), None)


def _names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def holds_input(output: str, inputs: Iterable[str]) -> bool:
    """Whether an input, a file or an object, is the output or lies among its parts."""
    there = _resolved(output)
    files = (_resolved(place) for place in inputs)
    return any(there in {place, place.rpartition("/")[0]} for place in files)


def _resolved(place: str) -> str:
    return place if is_url(place) else os.path.realpath(place)


def upload(output: Path, place: str) -> None:
    """Make an output the object `place`, or its parts objects below it, in the place of an older
    one. Blocking."""
    if not output.is_dir():
        objects.put(output, place)
        return
    first, *others = _names_in(output)
    for old in (place, f"{place}/{first}"):
        if objects.exists(old):
            objects.remove(old)
    for name in others:
        objects.put(output / name, f"{place}/{name}")
    for name in objects.names_below(place):
        if _PART.fullmatch(name) and name not in others:
            objects.remove(f"{place}/{name}")
    objects.put(output / first, f"{place}/{first}")


def files_of(place: str, rows_per_file: int | None) -> list[str]:
    """The files or objects of an output that is there. Raises OSError and StorageError."""
    if rows_per_file is None:
        return [place]
    names = objects.names_below(place) if is_url(place) else _names_in(Path(place))
    return [f"{place}/{name}" for name in names if _PART.fullmatch(name)]


def is_written(place: str, rows_per_file: int | None) -> bool:
    """Whether an output is there: with its first part, all are."""
    first = place
    if rows_per_file is not None:
        first = f"{place}/{part_name(0, PurePath(place).suffix)}"
    return objects.exists(first) if is_url(place) else Path(first).exists()
