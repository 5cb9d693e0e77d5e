"""A copy of the store as one moment has it, and unused space given back to the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from batchrun.errors import StoreError, StoreFullError
from batchrun.store import sqlite
from batchrun.store.database import Store


def write_snapshot(store: Store, path: Path) -> None:
    """Write all that is committed now into the empty file `path`; others may go on writing.

    Raises StoreError; StoreFullError when there is no room.
    """
    if not store.is_sqlite:
        raise StoreError(f"{store.name}: is a PostgreSQL database; copy it with `pg_dump`")
    try:
        with store.translated():
            sqlite.write_snapshot(store.engine, path)
    except StoreFullError as error:
        raise StoreFullError(f"{path.parent}: no room for a copy of the store") from error
    finally:
        # SQLite leaves it when it could not go on.
        journal_of(path).unlink(missing_ok=True)


def journal_of(path: Path) -> Path:
    """What SQLite writes beside a snapshot under way; a kill leaves it."""
    return path.with_name(f"{path.name}-journal")


def unused_bytes(store: Store) -> int:
    """Room inside the store's file that holds nothing."""
    if not store.is_sqlite:
        return 0
    with store.translated():
        return sqlite.unused_bytes(store.engine)


def give_disk_back(store: Store) -> Iterator[int]:
    """Shorten the store's file by what it does not use; yields how many pages are left.

    A daemon can write in between. Does nothing where that is not possible: see `is_shrinkable`.
    """
    if store.is_sqlite:
        with store.translated():
            yield from sqlite.give_disk_back(store.engine)


def is_shrinkable(store: Store) -> bool:
    """Whether `give_disk_back` works: not for a store that the first schema began."""
    with store.translated():
        return store.is_sqlite and sqlite.gives_disk_back(store.engine)


def rewrite(store: Store) -> None:
    """Write the store's file anew without unused space; `is_shrinkable` from then on.

    The caller holds the store's lock. Raises StoreError; StoreFullError when the disk cannot hold
    the file twice.
    """
    if store.is_sqlite:
        with store.translated():
            sqlite.rewrite(store.engine)
