"""Files that are either wholly there or not there at all, and how many may be open at once.

A file that appears whole or not at all.

Bytes on their way to a file, counted and hashed.

Folders for copies that nobody needs once their maker has ended, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import resource
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from batchrun.errors import BatchrunError, InputError, OverloadedError, StoreError, StoreFullError
from batchrun.failpoints import failpoint


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write `content` to `path` through a temporary file beside it: fsync, rename, fsync.

    Raises OSError, leaving the old content (or no file) in place.
    """
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        failpoint("file.rename.before")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def allow_many_open_files() -> None:
    """Raise this process's limit of open files, connections among them, to the most that it may
    have. Children inherit it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def max_open_files() -> int:
    """How many files, connections among them, this process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_leftovers(path: Path) -> None:
    """Temporary files of writers of `path` that were killed."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = left.name.split(".")[-2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            left.unlink(missing_ok=True)


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


class HashedFile:
    """Writes to `file`, and knows how much that was and its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, content: bytes) -> None:
        """Append. Raises OSError."""
        self._file.write(content)
        self._digest.update(content)
        self.size_bytes += len(content)

    @property
    def sha256(self) -> str:
        """Hex digest of all that was written."""
        return self._digest.hexdigest()


PREFIX = ".scratch-"


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, gone with all that is in it afterwards. Raises StoreError.

    What a kill leaves goes when the next one is made, or by `remove_left_scratch`.
    """
    remove_left_scratch(parent)
    try:
        folder, lock = _locked_folder(parent)
    except OSError as failure:
        raise StoreError(f"{parent}: cannot be written to: {failure.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left_scratch(parent: Path) -> None:
    """Remove the folders whose makers are dead: the kernel has freed their locks."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """A new folder, and the open file that holds its lock."""
    while True:
        folder = parent / f"{PREFIX}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)
