"""Folders for copies that nobody needs once their maker has ended, however it ends."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchrun.errors import StoreError

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
