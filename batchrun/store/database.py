"""Opening the store, to use it or only to read it; many rows in few statements; SQL errors."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, Table, exc, insert, make_url, update
from sqlalchemy.dialects import postgresql as postgresql_dialect
from sqlalchemy.dialects import sqlite as sqlite_dialect

from batchrun.errors import StoreError, StoreLockedError, StoreUnreachableError
from batchrun.failpoints import failpoint
from batchrun.files import StoreLock
from batchrun.store import postgresql, sqlite
from batchrun.store.schema import find_revision, migrate

MIGRATION_WAIT_S = 10.0


SURE_S = 2.0
"""What a leader orders of a fleet lasts for 2.5 s, and 5 s after its lock was last seen another may
lead: the one has ended by then."""
clock_s = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Also goes on while the machine is suspended, where the platform has such a clock."""


class Store:
    """A handle on the store. Its methods of reading and writing live in `jobs` and `results`.

    Thread-safe: each transaction takes a pooled connection of its own. SQLAlchemy objects never
    leave `store/`. `led_at_s` is when its daemon was last seen to lead, on `clock_s`.
    `name` is what messages call the store: a path, or host and database. `term` is
    that in which its daemon leads, None for whoever is no daemon: on PostgreSQL no transaction of
    an earlier term can write, nor one on another `timeline`, where that is known.
    """

    def __init__(self, engine: Engine, url: URL) -> None:
        self.engine = engine
        self.name = _name_of(url)
        self.term: int | None = None
        self.timeline: str | None = None
        self.led_at_s = -math.inf
        self._url = url

    @property
    def is_sqlite(self) -> bool:
        """Whether the store is one file."""
        return _is_sqlite(self._url)

    def identity(self) -> str:
        """What tells it from others, by whatever name it goes, but not from those on a physical
        copy of its server; its name where that does not tell. Raises StoreUnreachableError."""
        if self.is_sqlite:
            return self.name
        try:
            with self.read() as connection:
                return str(connection.exec_driver_sql(postgresql.IDENTITY).scalar_one())
        except StoreUnreachableError:
            raise
        except StoreError:
            return self.name

    @property
    def leads_surely(self) -> bool:
        """Whether no other daemon can lead: one that was stopped for longer, or cut off, is to
        steer nothing before it has looked."""
        return self.is_sqlite or clock_s() - self.led_at_s < SURE_S

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read transaction: one consistent snapshot."""
        with self.translated(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A write transaction: committed on leaving, rolled back on any exception.

        Where the connection breaks during the commit, this waits until the database can tell
        whether it stands: an error always means that nothing was changed.
        """
        writer = self.engine.execution_options(
            batchrun_write=True, batchrun_term=self.term, batchrun_timeline=self.timeline
        )
        transaction: int | None = None
        with self.translated():
            try:
                with writer.begin() as connection:
                    yield connection
                    failpoint("store.commit.before")
                    transaction = postgresql.transaction_of(connection)
            except exc.DBAPIError as error:
                if transaction is None or not error.connection_invalidated:
                    raise
                if not postgresql.is_committed(self.engine, transaction, self.timeline):
                    raise
        failpoint("store.commit.after")

    def close(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Within, whatever the database says comes out as a StoreError of one line."""
        try:
            yield
        except exc.DBAPIError as error:
            raise self._as_store_error(error.orig) from error
        except exc.TimeoutError as error:
            raise StoreLockedError(f"{self.name}: too many accesses at once") from error
        except sqlite.DriverError as error:
            raise self._as_store_error(error) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise sqlite.as_store_error("disk is full", self.name) from error

    def _as_store_error(self, error: BaseException | None) -> StoreError:
        if self.is_sqlite:
            return sqlite.as_store_error(str(error), self.name)
        return postgresql.as_store_error(error, self._url)


def open_store(location: str | Path) -> Store:
    """Open (creating or migrating where needed) the store at a path or a PostgreSQL URL.

    A migration waits for the file's lock, unless this process holds it. Raises StoreLockedError
    when another keeps it, and StoreError: not a store, of a newer batchrun, on a network file
    system, not writable, not reachable, without its driver.
    """
    url = _url_of(location)
    if not _is_sqlite(url):
        return _checked(Store(postgresql.writing_engine(url), url), migrate)
    path = Path(url.database or "")
    sqlite.refuse_network_file_system(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    sqlite.make_private(path)
    lock = StoreLock(path.with_suffix(".lock"), wait_s=MIGRATION_WAIT_S)
    return _checked(Store(sqlite.writing_engine(url), url), partial(migrate, lock=lock))


def open_to_read(location: str | Path) -> Store:
    """Open a store without any means of changing it, beside a daemon too.

    Its schema stays what it is: `find_revision` says which. Raises StoreError when there is no
    store.
    """
    url = _url_of(location)
    path = Path(url.database or "")
    is_file = _is_sqlite(url)
    if is_file and not path.is_file():
        raise StoreError(f"{path}: no such store")
    engine = sqlite.reading_engine(path) if is_file else postgresql.reading_engine(url)
    return _checked(Store(engine, url), find_revision)


def name_of(location: str | Path) -> str:
    """What messages call the store at a path or a URL: never with a password."""
    return _name_of(_url_of(location))


def _checked(store: Store, check: Callable[[Engine, str], object]) -> Store:
    """The store, closed when `check` of its engine and name raises."""
    try:
        with store.translated():
            check(store.engine, store.name)
    except StoreError:
        store.close()
        raise
    except OSError as failure:
        store.close()
        raise StoreError(f"{store.name}: cannot be opened: {failure.strerror}") from failure
    return store


def _is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _name_of(url: URL) -> str:
    return str(url.database) if _is_sqlite(url) else postgresql.name_of(url)


def _url_of(location: str | Path) -> URL:
    if isinstance(location, str) and "://" in location:
        return make_url(location)
    return URL.create("sqlite", database=str(Path(location).absolute()))


STATEMENT_ROWS = (256, 32, 4, 1)
"""Rows of one statement. A statement for every row takes about one and a half times as long: the
driver gives the interpreter back for each and has to wait for it."""


def insert_new(connection: Connection, table: Table, rows: Sequence[Sequence[object]]) -> int:
    """Insert the rows (values in the order of the table's columns) whose key is not there yet.

    Returns how many that were. Of two rows with one key the first is inserted.
    """
    num_new = 0
    start = 0
    for size in STATEMENT_ROWS:
        while len(rows) - start >= size:
            num_new += _insert(connection, table, rows[start : start + size])
            start += size
    return num_new


def upsert(
    connection: Connection,
    table: Table,
    key: Mapping[str, object],
    values: Mapping[str, object],
    *,
    changes: Mapping[str, object] | None = None,
) -> None:
    """Set `values` (`changes`, where there are any) in the row with this key; add it if need be."""
    same_key = [table.c[name] == value for name, value in key.items()]
    changed = connection.execute(update(table).where(*same_key).values(**(changes or values)))
    if changed.rowcount == 0:
        connection.execute(insert(table).values(**key, **values))


def _insert(connection: Connection, table: Table, rows: Sequence[Sequence[object]]) -> int:
    text, names = _statement(connection.dialect.name, table, len(rows))
    values = tuple(chain.from_iterable(rows))
    parameters = values if names is None else dict(zip(names, values, strict=True))
    return connection.exec_driver_sql(text, parameters).rowcount


@cache
def _statement(name: str, table: Table, num_rows: int) -> tuple[str, tuple[str, ...] | None]:
    """The statement's text and, unless its parameters go by position, their names."""
    dialect = postgresql_dialect if name == "postgresql" else sqlite_dialect
    empty = [{column.name: None for column in table.columns}] * num_rows
    statement = dialect.insert(table).values(empty).on_conflict_do_nothing()
    compiled = statement.compile(dialect=dialect.dialect())
    return str(compiled), None if compiled.positiontup else tuple(compiled.params)
