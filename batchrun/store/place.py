"""Which store a home has, a SQLite file or a database, and the lock that keeps two daemons off."""

from __future__ import annotations

import logging
import time
from contextlib import closing, suppress
from typing import Any

from sqlalchemy import Connection

from batchrun.errors import ConfigError, NotLeadingError, StoreError, StoreUnreachableError
from batchrun.files import HeldLock, write_atomically
from batchrun.home import Home
from batchrun.store import api_keys, files
from batchrun.store.database import Store, clock_s, name_of, open_store, open_to_read
from batchrun.store.jobs import list_jobs, read_leader
from batchrun.store.postgresql import (
    DAEMON_LOCK,
    NEWEST_TERM,
    OTHER_SERVER,
    TIMELINE,
    session_engine,
)
from batchrun.store.schema import HEAD, find_revision

log = logging.getLogger(__name__)

LOCK_POLL_S = 0.1
SILENT_S = 5
"""A daemon looks after its lock every second. One that has not for so long is stopped or cut off,
though the server may count its connection as alive; whoever wants the lock ends that."""
NOBODY = 0
"""The session that gave the lock back between two questions."""
TAKE = f"SELECT pg_try_advisory_lock({DAEMON_LOCK}), pg_backend_pid()"
HOLDER = (
    "SELECT max(pid) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database"
    " WHERE locktype = 'advisory' AND datname = current_database()"
    f" AND (classid, objid) = ({DAEMON_LOCK}) AND granted"
)
WITH_FILES, WITH_KEYS = "0003", "0004"
"""The first revisions of a store that have them."""
REVISION = "SELECT max(version_num) FROM alembic_version"
END_SILENT = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid = {pid} AND"
    f" state = 'idle' AND state_change < clock_timestamp() - interval '{SILENT_S} s'"
)


class DaemonLock(HeldLock):
    """Makes one of the daemons of a database the leader: an advisory lock on a connection of its
    own, so that it goes when its holder dies.

    Does nothing for a SQLite store: `StoreLock` guards that.
    """

    def __init__(self, store: Store, *, wait_s: float = 0.0) -> None:
        self._store = store
        self._wait_s = wait_s
        self._connection: Connection | None = None
        self._session: int | None = None
        self._is_held = False
        self._has_timelines = True

    def acquire(self) -> None:
        """Take the lock, waiting up to `wait_s`. Raises NotLeadingError, StoreError."""
        deadline_s = time.monotonic() + self._wait_s
        while not self.take():
            if time.monotonic() >= deadline_s:
                self.release()
                raise self._taken()
            time.sleep(LOCK_POLL_S)

    def take(self) -> bool:
        """Take the lock unless another has it: the store may write then, until somebody else has
        led. Raises StoreError, also where a newer batchrun has upgraded the store meanwhile."""
        if self._store.is_sqlite:
            return True
        timeline = self._timeline()
        if self._take() is not None:
            return False
        if self._ask(REVISION) != (HEAD,):
            self.release()
            raise StoreError(
                f"{self._store.name}: a newer batchrun has upgraded it; end this daemon, and start "
                "it with the newer one"
            )
        # Asked on the lock's own connection: while it lives, nobody else can begin to lead.
        (self._store.term,), self._store.timeline = self._ask(NEWEST_TERM), timeline
        self._store.led_at_s = clock_s()
        return True

    def check(self) -> None:
        """See that the lock is still held, and take it again where its connection was lost.

        Raises NotLeadingError when another daemon has it or has led since, or the server is another
        one that may lack commits, StoreUnreachableError while the database does not answer or still
        counts the lost connection as alive.
        """
        if self._store.is_sqlite:
            return
        asked_at_s = clock_s()
        if self._is_held:
            with suppress(StoreError):
                self._ask("SELECT 1")
                self._store.led_at_s = asked_at_s
                return
        holder = self._take()
        if holder is None and self._ask(NEWEST_TERM) == (self._store.term,):
            if self._store.timeline in {None, self._timeline()}:
                self._store.led_at_s = asked_at_s
                return
            self.release()
            raise NotLeadingError(f"{self._store.name}: {OTHER_SERVER}")
        self.release()
        if holder is not None and holder in {NOBODY, self._session}:
            raise StoreUnreachableError(f"{self._store.name}: still holds a lost connection's lock")
        raise self._taken()

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._is_held = False

    def _take(self) -> int | None:
        """Take the lock and return None; or, where another session has it, return that one."""
        self._is_held, session = self._ask(TAKE)
        if self._is_held:
            self._session = session
            return None
        holder = self._ask(HOLDER)[0] or NOBODY
        (num_ended,) = self._ask(END_SILENT.format(pid=holder))
        if num_ended:
            log.warning("%s: the leader has been silent for %d s", self._store.name, SILENT_S)
        return holder

    def _timeline(self) -> str | None:
        """Asked before the lock is taken: where the server cannot tell, the connection is given up.
        Raises StoreError where it could tell before."""
        if not self._has_timelines:
            return None
        try:
            timeline: str | None = self._ask(TIMELINE)[0]
        except StoreUnreachableError:
            raise
        except StoreError as error:
            if self._store.timeline is not None:
                raise
            log.warning("%s: does not tell its timeline: %s", self._store.name, error)
            self._has_timelines = False
            return None
        if timeline is None:
            self.release()
            raise StoreUnreachableError(f"{self._store.name}: is a replica, which takes no writes")
        return timeline

    def _ask(self, query: str) -> tuple[Any, ...]:
        """One row from the lock's own connection, which is given up when it breaks."""
        try:
            with self._store.translated():
                if self._connection is None:
                    self._connection = session_engine(self._store.engine.url).connect()
                return tuple(self._connection.exec_driver_sql(query).one())
        except StoreError:
            self.release()
            raise

    def _taken(self) -> NotLeadingError:
        where = ""
        with suppress(StoreError):
            where = f", {read_leader(self._store).name}"
        return NotLeadingError(
            f"{self._store.name}: another daemon works on it{where}; give the command there, or "
            "each deployment a database of its own"
        )


def open_for(home: Home, url: str | None) -> Store:
    """Open the home's store as batchrun.yaml has it, and record a database's URL in the home.

    `url` is None for the SQLite file. Raises ConfigError, and changes nothing, when jobs, keys or
    files of the home are in another store; StoreError.
    """
    _refuse_other(home, url)
    store = open_store(url or home.store)
    if url is not None and url != home.store_location:
        write_atomically(home.store_url_file, f"{url}\n".encode(), mode=0o600)
    return store


def _refuse_other(home: Home, url: str | None) -> None:
    wanted = "no `store`" if url is None else f"`store` {name_of(url)}"
    if home.store_url_file.exists():
        now = name_of(home.store_location)
        if url is None or name_of(url) != now:
            raise ConfigError(
                f"the jobs of {home.path} are in {now}, and batchrun.yaml has {wanted}; name that "
                "database there, or use another --home"
            )
    elif url is not None and home.store.exists() and (kept := _find_kept(home)) is not None:
        raise ConfigError(
            f"the {kept} of {home.path} are in {home.store}, and batchrun.yaml has {wanted}; leave "
            "it out, or use another --home"
        )


def _find_kept(home: Home) -> str | None:
    """What the SQLite store of a home holds, in a word; None where it holds nothing."""
    with closing(open_to_read(home.store)) as store:
        revision = find_revision(store.engine, store.name) or ""
        if revision and list_jobs(store):
            return "jobs"
        if revision >= WITH_KEYS and api_keys.is_any(store):
            return "keys"
        return "files" if revision >= WITH_FILES and files.list_all(store) else None
