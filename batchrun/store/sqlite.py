"""What only SQLite has: its settings, read-only access, its own check.

But for `retention`, which shortens and copies the file, no other module of the store holds a
statement that PostgreSQL would not take.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.pool import ConnectionPoolEntry

from batchrun.errors import StoreError, StoreFullError, StoreLockedError
from batchrun.files import PRIVATE_MODE

DriverError = sqlite3.Error
"""What comes out of the calls here that SQLAlchemy does not wrap."""

BUSY_TIMEOUT_MS = 10_000
CACHE_KIB = 49_152
"""Holds all pages that one batch of results changes, when its rows are strewn over a large job."""
CHECKPOINT_PAGES = 32_000
"""128 MiB of log. The pages that every batch changes are copied into the file once in so many, not
once a batch."""
MAX_PROBLEMS = 100
MOUNTS = Path("/proc/self/mounts")
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
    "fuse.glusterfs",
    "fuse.juicefs",
    "fuse.sshfs",
    "beegfs",
    "gpfs",
})


def writing_engine(url: URL) -> Engine:
    """An engine with durable commits: once one returns, it survives a loss of power."""
    # The connection that was used last, so that few of them fill their caches.
    engine = create_engine(url, pool_use_lifo=True)
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    return engine


def reading_engine(path: Path) -> Engine:
    """An engine that cannot change the store at `path`, and works beside a daemon that does."""
    # A store in WAL mode that nobody has open has no -shm file, and where none can be made SQLite
    # opens it only on the promise that nobody changes it.
    log = path.with_name(path.name + "-wal")
    is_still = not os.access(path.parent, os.W_OK) and not log.exists()
    mode = "mode=ro&immutable=1" if is_still else "mode=ro"
    address = f"file:{quote(str(path.absolute()))}?{mode}"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(address, uri=True, check_same_thread=False)

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)
    event.listen(engine, "connect", _configure_reader)
    event.listen(engine, "begin", _begin)
    return engine


def make_private(path: Path) -> None:
    """Make the file of a new store, for its owner alone: SQLite gives its log the same mode. What
    hinders that, SQLite itself will tell."""
    with suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_MODE))


def refuse_network_file_system(folder: Path, mounts: Path = MOUNTS) -> None:
    """Raise StoreError when `folder` lies on a network file system (its locks are not reliable)."""
    if not mounts.exists():
        return
    target = Path(os.path.realpath(folder))
    best_point, best_type = "", ""
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        point, kind = line.split()[1:3]
        point = point.replace("\\040", " ")
        if target.is_relative_to(point) and len(point) >= len(best_point):
            best_point, best_type = point, kind
    if best_type in NETWORK_FILE_SYSTEMS:
        raise StoreError(
            f"{target}: on a network file system ({best_type}), where SQLite's locks are not safe; "
            "choose a local --home, or a PostgreSQL store URL"
        )


def as_store_error(text: str, name: str) -> StoreError:
    """What SQLite says about the store, as one line of ours."""
    if "disk is full" in text:
        return StoreFullError(f"{name}: no space left on the disk; free some space")
    if "locked" in text:
        return StoreLockedError(f"{name}: locked by another process")
    if "not a database" in text or "malformed" in text:
        return StoreError(f"{name}: not a batchrun store, or damaged ({text})")
    if "unable to open" in text or "readonly" in text or "read-only" in text:
        return StoreError(f"{name}: cannot be opened for writing ({text})")
    return StoreError(f"{name}: {text}")


def integrity_problems(connection: Connection) -> list[str]:
    """What SQLite's own check finds wrong with the file; empty when it is sound."""
    found = connection.exec_driver_sql(f"PRAGMA integrity_check({MAX_PROBLEMS})").scalars().all()
    return [] if found == ["ok"] else [str(line) for line in found]


def last_given_key(connection: Connection, table: str) -> int:
    """The largest key that an automatically numbered table ever gave out."""
    query = "SELECT seq FROM sqlite_sequence WHERE name = ?"
    return connection.exec_driver_sql(query, (table,)).scalar() or 0


@contextmanager
def open_cursor(engine: Engine) -> Iterator[DBAPICursor]:
    """A cursor outside any transaction, for what SQLite does to its whole file."""
    connection = engine.raw_connection()
    try:
        yield connection.cursor()
    finally:
        connection.close()


def read_pragma(cursor: DBAPICursor, name: str) -> int:
    """The present value of a setting or a count."""
    cursor.execute(f"PRAGMA {name}")
    ((value,),) = cursor.fetchall()
    return int(value)


def run_to_end(cursor: DBAPICursor, statement: str) -> None:
    """Execute to the end: SQLite does a part of the work with every row that is asked for."""
    cursor.execute(statement)
    cursor.fetchall()


def _configure(connection: sqlite3.Connection, _record: ConnectionPoolEntry) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
    cursor.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
    cursor.close()


def _configure_reader(connection: sqlite3.Connection, _record: ConnectionPoolEntry) -> None:
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")


def _begin(connection: Connection) -> None:
    # IMMEDIATE takes the write lock at once: a transaction that reads first can then never fail
    # half way for want of it.
    writes = connection.get_execution_options().get("batchrun_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
