"""Bring a store's schema to this version of batchrun. Migrations are an append-only list."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from batchrun.errors import StoreError
from batchrun.failpoints import failpoint
from batchrun.store import postgresql
from batchrun.store.lock import StoreLock

REVISIONS = ("0001", "0002", "0003", "0004")
"""Every schema that a released batchrun wrote, oldest first."""
HEAD = REVISIONS[-1]
SCRIPTS = Path(__file__).parent / "migrations"


def migrate(engine: Engine, name: str, *, lock: StoreLock | None = None) -> None:
    """Run the migrations that `engine`'s store lacks; nothing when it is current.

    All of them in one transaction, under `lock` or PostgreSQL's own: a kill in the middle leaves
    the old schema. Raises StoreError when the store was written by a newer batchrun, or is another
    database, and StoreLockedError while another process holds the lock.
    """
    if find_revision(engine, name) == HEAD:
        return
    is_ours = lock is None or lock.find_holder() == os.getpid()
    with nullcontext() if is_ours or lock is None else lock:
        _upgrade(engine, name)


def find_revision(engine: Engine, name: str) -> str | None:
    """The revision of the store's schema, or None for an empty database.

    Raises StoreError when it is not a store, or one that this batchrun does not know.
    """
    with engine.connect() as connection:
        return _revision(connection, name)


def _revision(connection: Connection, name: str) -> str | None:
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" not in tables:
        if tables:
            raise StoreError(f"{name}: holds other tables; not a batchrun store")
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    if found is not None and found not in REVISIONS:
        raise StoreError(
            f"{name}: written by a newer batchrun (schema {found}, this one knows {HEAD}); upgrade"
        )
    return found


def _upgrade(engine: Engine, name: str) -> None:
    # Imported late: alembic takes longer to import than most commands run, and few need it.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.set_main_option("path_separator", "os")
    with engine.execution_options(batchrun_write=True).begin() as connection:
        if _revision(connection, name) != HEAD:
            if engine.dialect.name == "postgresql":
                postgresql.refuse_beside_daemon(connection, name)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        failpoint("store.migrate.before")
