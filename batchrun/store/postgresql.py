"""What only PostgreSQL has: its driver and settings, its locks, the fate of a cut-off commit."""

from __future__ import annotations

import logging
import time
from typing import Any

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, exc
from sqlalchemy.pool import ConnectionPoolEntry

from batchrun.errors import (
    NotLeadingError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    StoreUnreachableError,
)

log = logging.getLogger(__name__)

DRIVER = "postgresql+psycopg"
CONNECT_DEFAULTS = {
    "application_name": "batchrun",
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
"""libpq's settings, in s and (the last) ms; the URL may set others."""
SESSION_SETTINGS = (
    "SET synchronous_commit TO on;"
    "SET lock_timeout TO '10s';"
    "SET tcp_keepalives_idle TO 10;"
    "SET tcp_keepalives_interval TO 5;"
    "SET tcp_keepalives_count TO 3"
)
"""The keepalives are the server's: it gives up a client whose machine vanished after 25 s."""
WRITE_LOCK = "1651340404, 1"
DAEMON_LOCK = "1651340404, 2"
"""Advisory locks of a store's database: of each write transaction, and of its daemon."""
WRITE_IDLE = "5s"
"""The server breaks off a write whose process says nothing for so long, since others wait for it:
one that was stopped in the middle, say."""
NEWEST_TERM = "SELECT coalesce(max(epoch), 0) FROM epochs"
TIMELINE = (
    "SELECT CASE WHEN NOT pg_is_in_recovery()"
    " THEN substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END"
)
"""Another one once a replica was promoted, or a backup restored, which may lack the last commits;
nothing while it is a replica."""
IDENTITY = (
    "SELECT concat_ws('/', system_identifier, oid) FROM pg_control_system(), pg_database"
    " WHERE datname = current_database()"
)
"""It stays when a replica is promoted, and a physical copy of the server has it too; any other
server or database has another one, though it began as a dump of this."""
LOST_STATES = ("08", "57P", "53300", "25P03")
"""SQLSTATEs (their beginnings) of a connection that was lost, ended, or refused for the moment."""
OTHER_SERVER = "a replica has taken its place, which may lack commits; nothing was changed"
OUTCOME_INTERVAL_S = 0.5


def writing_engine(url: URL) -> Engine:
    """An engine with durable commits and one writer at a time. Raises StoreError: no driver."""
    engine = _engine(url, SESSION_SETTINGS, pool_pre_ping=True, pool_use_lifo=True)
    event.listen(engine, "begin", _begin)
    return engine


def reading_engine(url: URL) -> Engine:
    """An engine whose sessions cannot change anything. Raises StoreError: no driver."""
    engine = _engine(url, f"{SESSION_SETTINGS}; SET default_transaction_read_only TO on")
    event.listen(engine, "begin", _begin)
    return engine


def session_engine(url: URL) -> Engine:
    """An engine for a connection that outlives transactions and belongs to no pool."""
    return _engine(url, SESSION_SETTINGS, poolclass=NullPool, isolation_level="AUTOCOMMIT")


def name_of(url: URL) -> str:
    """What messages call a database: its host, its port where that is not 5432, its own name."""
    host, port = url.host or url.query.get("host", "localhost"), url.port or url.query.get("port")
    return f"{host}{'' if port in {None, 5432, '5432'} else f':{port}'}/{url.database}"


def as_store_error(error: BaseException | None, url: URL) -> StoreError:
    """A driver's error as one line of ours, without the password."""
    name, state = name_of(url), _state(error)
    text = " ".join(_text(error).split())
    if url.password:
        text = text.replace(str(url.password), "***")
    if _is_lost(error):
        return StoreUnreachableError(f"{name}: cannot be reached ({text})")
    if state == "53100":
        return StoreFullError(f"{name}: no space left on the disk; free some space")
    if state == "55P03":
        return StoreLockedError(f"{name}: locked by another process")
    return StoreError(f"{name}: {text}")


def refuse_while_daemon_runs(connection: Connection, name: str) -> None:
    """Keep every daemon off until the transaction ends; StoreLockedError when one is there."""
    taken = connection.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({DAEMON_LOCK})")
    if not taken.scalar():
        raise StoreLockedError(f"{name}: a daemon works on it; stop that one first")


def transaction_of(connection: Connection) -> int | None:
    """The number of a write transaction on PostgreSQL, by which `is_committed` asks; else None."""
    number: int | None = connection.info.get("batchrun_transaction")
    return number


def is_committed(engine: Engine, transaction: int, timeline: str | None) -> bool:
    """Whether a transaction was committed whose connection broke in the middle of its commit.

    Waits until the server can tell. On another timeline its number may be that of another one.
    """
    log.warning(
        "%s: the connection broke during a commit; waiting to learn whether it stands",
        name_of(engine.url),
    )
    query = f"SELECT txid_status({transaction})"
    while True:
        try:
            with engine.connect() as connection:
                status = connection.exec_driver_sql(query).scalar()
                now = None if timeline is None else connection.exec_driver_sql(TIMELINE).scalar()
                if now is not None and now != timeline:
                    return False
                if timeline is not None and now is None:
                    status = "in progress"  # It may be promoted any moment.
        except exc.DBAPIError as error:
            # After a failover to a server that never saw it, the number lies in the future.
            status = "in progress" if _is_lost(error.orig) else "unknown"
        if status != "in progress":
            return bool(status == "committed")
        time.sleep(OUTCOME_INTERVAL_S)


def _engine(url: URL, settings: str, **options: Any) -> Engine:
    defaults = {key: value for key, value in CONNECT_DEFAULTS.items() if key not in url.query}
    try:
        engine = create_engine(url.set(drivername=DRIVER), connect_args=defaults, **options)
    except ImportError as error:
        raise StoreError(
            "a PostgreSQL store needs its driver: pip install 'batchrun[postgres]'"
        ) from error

    def configure(connection: Any, _record: ConnectionPoolEntry) -> None:
        encoding = connection.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise StoreError(f"{name_of(url)}: is in {encoding}; make it with ENCODING 'UTF8'")
        connection.execute(settings)
        connection.commit()

    event.listen(engine, "connect", configure)
    return engine


def _begin(connection: Connection) -> None:
    # One writer at a time, as SQLite has it: a transaction that reads first sees what it changes.
    # READ COMMITTED, since a snapshot would be of the time before the wait for the lock.
    options = connection.get_execution_options()
    if not options.get("batchrun_write", False):
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        return
    query = (
        f"SELECT txid_current(), set_config('idle_in_transaction_session_timeout', '{WRITE_IDLE}',"
        f" true) FROM pg_advisory_xact_lock({WRITE_LOCK})"
    )
    connection.info["batchrun_transaction"] = connection.exec_driver_sql(query).scalar()
    # Whoever leads next writes its term under the same lock: from then on this sees it.
    term = options.get("batchrun_term")
    if term is not None and connection.exec_driver_sql(NEWEST_TERM).scalar() != term:
        name = name_of(connection.engine.url)
        raise NotLeadingError(f"{name}: another daemon leads by now; nothing was changed")
    timeline = options.get("batchrun_timeline")
    if timeline is not None and connection.exec_driver_sql(TIMELINE).scalar() != timeline:
        raise NotLeadingError(f"{name_of(connection.engine.url)}: {OTHER_SERVER}")


def _is_lost(error: BaseException | None) -> bool:
    state = _state(error)
    return (state is None and type(error).__name__ == "OperationalError") or (
        state is not None and state.startswith(LOST_STATES)
    )


def _state(error: BaseException | None) -> str | None:
    state: str | None = getattr(error, "sqlstate", None)
    return state


def _text(error: BaseException | None) -> str:
    primary: str | None = getattr(getattr(error, "diag", None), "message_primary", None)
    return primary or str(error)
