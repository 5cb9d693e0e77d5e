"""A file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from batchrun.errors import BatchrunError, InputError, OverloadedError, StoreFullError
from batchrun.failpoints import failpoint
from batchrun.files import sync_folder

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TOO_MANY = frozenset({errno.EMFILE, errno.ENFILE})


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A writable file that takes the name `path` on success, fsynced, its folder too.

    Missing parent folders are made. Several may write the same `path` at once: each writes a whole
    file, and the last to end stays. On any failure the temporary file is removed and an older
    file at `path` stays. Raises StoreFullError when there is no room, InputError when the
    folder cannot be written to, OverloadedError when too many files are open.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        _prepare(path)
        with _locked(temporary) as file:
            yield file
            failpoint("output.sync.before")
            file.flush()
            os.fsync(file.fileno())
        failpoint("output.rename.before")
        temporary.replace(path)
        failpoint("output.rename.after")
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
        with contextlib.suppress(BlockingIOError, FileNotFoundError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _locked(path: Path) -> BinaryIO:
    """A new file, locked for as long as it is open: whoever gets the lock knows that its writer is
    dead, whatever became of the writer's pid."""
    while True:
        file = path.open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            file.close()
            raise
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _explained(path: Path, failure: OSError) -> BatchrunError:
    if failure.errno in _FULL:
        return StoreFullError(
            f"{path}: no room to write the results ({failure.strerror}); free some space and try "
            "again, nothing is lost"
        )
    if failure.errno in _TOO_MANY:
        return OverloadedError(f"{path}: cannot be written now: {failure.strerror}; try again")
    return InputError(f"{path}: cannot be written: {failure.strerror or failure}")
