"""The bytes of the files of OpenAI's API: whether the store says the same, and which may go."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from batchrun.store import Store, Violation, files
from batchrun.store.files import FileRecord


def check_contents(store: Store, folder: Path) -> Iterator[Violation]:
    """What is wrong with the bytes of the files in `folder`. Reads all of them.

    A file that is deleted meanwhile is none that is missing.
    """
    for record in files.list_all(store):
        path = folder / record.id
        try:
            size_bytes = path.stat().st_size
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as failure:
            if files.find(store, record.id, now_s=record.created_at) is not None:
                yield Violation(f"file {record.id}: {path} cannot be read: {failure.strerror}")
            continue
        if size_bytes != record.size_bytes:
            yield Violation(
                f"file {record.id}: had {record.size_bytes} bytes, and {path} has {size_bytes}"
            )
        elif digest != record.sha256:
            yield Violation(f"file {record.id}: the bytes of {path} are not those that were stored")


def remove_expired(store: Store, folder: Path, *, now_s: float) -> list[FileRecord]:
    """Forget the files whose time is over, then remove their bytes; returns which."""
    expired = files.find_expired(store, now_s=now_s)
    for record in expired:
        files.remove(store, record.id)
        (folder / record.id).unlink(missing_ok=True)
    return expired


def remove_strays(store: Store, folder: Path) -> int:
    """Remove what a kill left in `folder` on its way in or out; returns how many files.

    The caller holds the store's lock, and nobody writes files meanwhile.
    """
    known = {record.id for record in files.list_all(store)}
    strays = [path for path in folder.iterdir() if path.name not in known and path.is_file()]
    for path in strays:
        path.unlink(missing_ok=True)
    return len(strays)
