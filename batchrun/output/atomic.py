"""A file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

from batchrun.errors import BatchrunError, InputError, StoreFullError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A writable file that takes the name `path` on success, fsynced, its folder too.

    Missing parent folders are made. On any failure the temporary file is removed and an older
    file at `path` stays. Raises StoreFullError when there is no room, InputError when the
    folder cannot be written to.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _prepare(path)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _fsync_folder(path.parent)
    except OSError as failure:
        raise _explained(path, failure) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _prepare(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file for the output")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        pid = left.name.removesuffix(".part").rpartition(".")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            left.unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(path: Path, failure: OSError) -> BatchrunError:
    if failure.errno in _FULL:
        return StoreFullError(
            f"{path}: no room to write the results ({failure.strerror}); free some space and try "
            "again, nothing is lost"
        )
    return InputError(f"{path}: cannot be written: {failure.strerror or failure}")
