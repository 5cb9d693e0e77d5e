"""Files that are either wholly there or not there at all, and how many may be open at once."""

from __future__ import annotations

import glob
import os
import resource
import secrets
import sys
from pathlib import Path

import psutil

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
