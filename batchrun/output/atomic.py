"""A file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

from batchrun.errors import BatchrunError, InputError, StoreFullError
from batchrun.files import sync_folder

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_COUNTER = itertools.count()
# In a container every start may get the same pid; this tells them apart.
_PROCESS = secrets.token_hex(4)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A writable file that takes the name `path` on success, fsynced, its folder too.

    Missing parent folders are made. Several may write the same `path` at once: each writes a whole
    file, and the last to end stays. On any failure the temporary file is removed and an older
    file at `path` stays. Raises StoreFullError when there is no room, InputError when the
    folder cannot be written to.
    """
    owner = f"{next(_COUNTER)}.{_PROCESS}.{os.getpid()}"
    temporary = path.with_name(f".{path.name}.{owner}.part")
    try:
        _prepare(path)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
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
        process, pid = left.name.split(".")[-3:-1]
        if pid.isdigit() and not _is_alive(process, int(pid)):
            left.unlink(missing_ok=True)


def _is_alive(process: str, pid: int) -> bool:
    return process == _PROCESS if pid == os.getpid() else psutil.pid_exists(pid)


def _explained(path: Path, failure: OSError) -> BatchrunError:
    if failure.errno in _FULL:
        return StoreFullError(
            f"{path}: no room to write the results ({failure.strerror}); free some space and try "
            "again, nothing is lost"
        )
    return InputError(f"{path}: cannot be written: {failure.strerror or failure}")
