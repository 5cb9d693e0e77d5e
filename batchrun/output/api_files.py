"""The bytes of the files of OpenAI's API: where a home has them, whether the store says the same,
and which may go."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial

from batchrun.errors import BatchrunError, ConfigError
from batchrun.files import write_atomically
from batchrun.home import Home
from batchrun.output.file_bytes import FileBytes, FolderBytes, ObjectBytes, pieces_of
from batchrun.remote import objects
from batchrun.store import Store, Violation, files
from batchrun.store.files import FileRecord


def file_bytes_of(home: Home) -> FileBytes:
    """Where a home's files are, as its daemon recorded it."""
    url = home.files_url
    return FolderBytes(home.files) if url is None else ObjectBytes(home.files, url)


def open_file_bytes(home: Home, url: str | None, store: Store) -> FileBytes:
    """Where a home's files are as batchrun.yaml has it; a URL is recorded in the home.

    Files in the home folder move to object storage by and by. Raises ConfigError, and changes
    nothing, when there are files at another URL, or when the URL's library is not installed.
    """
    if url is not None:
        objects.check_library(url)
    recorded = home.files_url
    is_in_use = bool(files.list_all(store)) or any(home.files.glob(f"*{ObjectBytes.MARK}"))
    if recorded not in {None, url} and is_in_use:
        wanted = "no `files`" if url is None else f"`files` {url}"
        raise ConfigError(
            f"the files of {home.path} are in {recorded}, and batchrun.yaml has {wanted}; name "
            "that place there, or delete the files first, and wait a minute"
        )
    if url is None:
        home.files_url_file.unlink(missing_ok=True)
    elif url != recorded:
        write_atomically(home.files_url_file, f"{url}\n".encode(), mode=0o600)
    return file_bytes_of(home)


def check_contents(store: Store, place: FileBytes) -> Iterator[Violation]:
    """What is wrong with the bytes of the files. Reads all of them.

    A file that is deleted meanwhile is none that is missing.
    """
    for record in files.list_all(store):
        where = place.place_of(record.id)
        digest = hashlib.sha256()
        size_bytes = 0
        try:
            for piece in pieces_of(place, record.id):
                digest.update(piece)
                size_bytes += len(piece)
        except (BatchrunError, OSError) as failure:
            if files.find(store, record.id, now_s=record.created_at) is not None:
                reason = getattr(failure, "strerror", None) or str(failure)
                yield Violation(f"file {record.id}: {where} cannot be read: {reason}")
            continue
        if size_bytes != record.size_bytes:
            yield Violation(
                f"file {record.id}: had {record.size_bytes} bytes, and {where} has {size_bytes}"
            )
        elif digest.hexdigest() != record.sha256:
            yield Violation(
                f"file {record.id}: the bytes of {where} are not those that were stored"
            )


def remove_file(store: Store, place: FileBytes, file_id: str) -> None:
    """Forget a file, then remove its bytes; a kill in between leaves a mark to go on from.

    Raises StoreError, and then the file is as it was.
    """
    place.mark(file_id)
    files.remove(store, file_id)
    place.remove(file_id)


def remove_expired(store: Store, place: FileBytes, *, now_s: float) -> list[FileRecord]:
    """Remove the files whose time is over; returns which."""
    expired = files.find_expired(store, now_s=now_s)
    for record in expired:
        remove_file(store, place, record.id)
    return expired


def recover_files(store: Store, place: FileBytes) -> int:
    """Set right what a kill left of files on their way in or out; how many are to go.

    The caller holds the store's lock, and nobody reads or writes files meanwhile.
    """
    return place.recover(partial(_is_known, store))


def sweep_files(store: Store, place: FileBytes) -> None:
    """Finish what was put off while object storage did not answer. Raises StorageError."""
    place.sweep(partial(_is_known, store))


def _is_known(store: Store, file_id: str) -> bool:
    return files.find(store, file_id, now_s=0.0) is not None
