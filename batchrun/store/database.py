"""Opening the store: connection settings, migrations, and SQL errors turned into our own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event, exc, make_url
from sqlalchemy.pool import ConnectionPoolEntry

from batchrun.errors import StoreError, StoreFullError, StoreLockedError
from batchrun.store.migrate import migrate

BUSY_TIMEOUT_MS = 10_000
NETWORK_FILE_SYSTEMS = frozenset({
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "afs",
    "ceph",
    "lustre",
    "glusterfs",
    "fuse.sshfs",
})


class Store:
    """A handle on the store. Its methods of reading and writing live in `jobs` and `results`.

    Thread-safe: each transaction takes a pooled connection of its own. SQLAlchemy objects never
    leave `store/`.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        self._engine = engine
        self.url = url

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read transaction: one consistent snapshot."""
        with self._translated(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A write transaction: committed on leaving, rolled back on any exception."""
        writer = self._engine.execution_options(batchrun_write=True)
        with self._translated(), writer.begin() as connection:
            yield connection

    def close(self) -> None:
        """Close every pooled connection."""
        self._engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            raise _as_store_error(error, self.url) from error
        except exc.TimeoutError as error:
            raise StoreLockedError(f"{self.url}: too many accesses at once") from error


def open_store(url_or_path: str | Path) -> Store:
    """Open (creating or migrating where needed) the store at a path or a SQLAlchemy URL.

    Raises StoreError: not a store, of a newer batchrun, on a network file system, not writable.
    """
    url = _store_url(url_or_path)
    if url.startswith("sqlite"):
        path = Path(make_url(url).database or "")
        _refuse_network_file_system(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    store = Store(engine, url)
    with store._translated():
        migrate(engine, url)
    return store


def _store_url(url_or_path: str | Path) -> str:
    text = str(url_or_path)
    return text if "://" in text else f"sqlite:///{Path(text).absolute()}"


def _configure_sqlite(connection: sqlite3.Connection, _record: ConnectionPoolEntry) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE takes the write lock at once: a transaction that reads first can then never fail
    # half way for want of it.
    writes = connection.get_execution_options().get("batchrun_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _refuse_network_file_system(folder: Path) -> None:
    """Raise StoreError when `folder` lies on a network file system (its locks are not reliable)."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return
    target = folder.absolute()
    best_point, best_type = "", ""
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        point, kind = line.split()[1:3]
        if target.is_relative_to(point) and len(point) >= len(best_point):
            best_point, best_type = point, kind
    if best_type in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{target}: on a network file system ({best_type}), where SQLite's locks are not safe; "
            "choose a local --home, or a PostgreSQL store URL"
        )


def _as_store_error(error: exc.DBAPIError, url: str) -> StoreError:
    where = make_url(url).database or url
    text = str(error.orig)
    if "disk is full" in text:
        return StoreFullError(f"{where}: no space left on the disk; free some space")
    if "locked" in text:
        return StoreLockedError(f"{where}: locked by another process")
    if "not a database" in text or "malformed" in text:
        return StoreError(f"{where}: not a batchrun store, or damaged ({text})")
    if "unable to open" in text or "readonly" in text or "read-only" in text:
        return StoreError(f"{where}: cannot be opened for writing ({text})")
    return StoreError(f"{where}: {text}")
