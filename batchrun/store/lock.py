"""The lock that keeps two daemons off one store. The kernel frees it when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from batchrun.errors import StoreLockedError

POLL_INTERVAL_S = 0.05


class HeldLock(ABC):
    """A lock that is held while its `with` block runs. Not reentrant."""

    @abstractmethod
    def acquire(self) -> None:
        """Take the lock."""

    @abstractmethod
    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class StoreLock(HeldLock):
    """An exclusive `flock` on `path`; the holder's pid is written into the file for messages."""

    def __init__(self, path: Path, *, wait_s: float = 0.0) -> None:
        self._path = path
        self._wait_s = wait_s
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock, waiting up to `wait_s`; raises StoreLockedError naming the holder."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline_s = time.monotonic() + self._wait_s
        while not _try_lock(fd):
            if time.monotonic() >= deadline_s:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
                os.close(fd)
                raise StoreLockedError(
                    f"{self._path.parent}: in use by process {holder or 'unknown'}; "
                    "use another --home, or stop it with `batchrun down`"
                )
            time.sleep(POLL_INTERVAL_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd

    def find_holder(self) -> int | None:
        """The process that holds the lock: None for nobody, 0 when its pid is not written yet.

        Writes nothing, so it answers on a full or read-only disk too.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if _try_lock(fd):
                return None
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            return int(holder) if holder.isdecimal() else 0
        finally:
            os.close(fd)

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
