"""The tables, and the migrations that create them: an append-only list.

A row of a job is done if and only if it stands in `results`. Its reply stands apart in `bodies`, so
that counting and resuming read a narrow table. A job's counts and tokens are null until it ends;
then they stay, also when its results are removed. `attempts` and `suspects` hold only the few rows
that were retried or were in flight when an engine died. A batch of OpenAI's API is a job with a row
in `batches`; what `files` names lies in the home folder, each file under its id. Of an API key only
a hash is kept; `owner` is the id of the key that made a file or a batch, null where none was asked
for. `record_bytes` of a batch are those of its metadata and errors, null once these are forgotten.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    inspect,
    text,
)

from batchrun.errors import StoreError
from batchrun.failpoints import failpoint
from batchrun.files import StoreLock
from batchrun.store import postgresql

metadata = MetaData()


def _row_table(name: str, *columns: Column[Any], **options: Any) -> Table:
    """A table of the rows of jobs, by job and row."""
    keys = (
        Column(key, Integer, primary_key=True, autoincrement=False) for key in ("job_seq", "row")
    )
    return Table(name, metadata, *keys, *columns, **options)


jobs = Table(
    "jobs",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("name", String(256), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("spec", Text, nullable=False),
    Column("pin", Text, nullable=False),
    Column("content_hash", String(64), nullable=False, index=True),
    Column("num_rows", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("ends_as", String(16)),
    Column("reason", Text),
    Column("num_completed", BigInteger),
    Column("num_failed", BigInteger),
    Column("num_prompt_tokens", BigInteger),
    Column("num_output_tokens", BigInteger),
    Column("num_cached_tokens", BigInteger),
    Column("results_removed_at", Float),
    Column("finalizing_at", Float),
    Column("cancelling_at", Float),
    sqlite_autoincrement=True,
)

results = _row_table(
    "results",
    Column("ok", Integer, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("finish_reason", String(32)),
    Column("num_prompt_tokens", Integer, nullable=False),
    Column("num_output_tokens", Integer, nullable=False),
    Column("num_cached_tokens", Integer, nullable=False),
    Column("duration_s", Float, nullable=False),
    Column("committed_at", Float, nullable=False),
    sqlite_with_rowid=False,
)

bodies = _row_table("bodies", Column("content", LargeBinary, nullable=False))
SAME_ROW = (results.c.job_seq == bodies.c.job_seq) & (results.c.row == bodies.c.row)
attempts = _row_table("attempts", Column("num_attempts", Integer, nullable=False))
suspects = _row_table("suspects", Column("num_engine_deaths", Integer, nullable=False))
epochs = Table(
    "epochs",
    metadata,
    Column("epoch", Integer, primary_key=True, autoincrement=True),
    Column("started_at", Float, nullable=False),
    Column("pid", Integer, nullable=False),
    sqlite_autoincrement=True,
)

settings = Table(
    "settings",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

files = Table(
    "files",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("owner", String(64)),
    Column("filename", Text, nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Index("ix_files_owner", "owner", "seq", "expires_at", "size_bytes"),
    Index("ix_files_purpose", "owner", "purpose", "seq"),
    sqlite_autoincrement=True,
)

batches = Table(
    "batches",
    metadata,
    Column("job_seq", Integer, primary_key=True, autoincrement=False),
    Column("owner", String(64)),
    Column("input_file_id", Text, nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("completion_window", String(64), nullable=False),
    Column("metadata", Text),
    Column("output_expires_after_s", Integer),
    Column("model", Text),
    Column("errors", Text),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    Column("num_reasoning_tokens", BigInteger),
    Column("idempotency_hash", String(64), unique=True),
    Column("request_hash", String(64), nullable=False),
    Column("num_enqueued_tokens", BigInteger),
    Column("record_bytes", BigInteger),
    Index("ix_batches_owner", "owner", "job_seq", "record_bytes"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("name", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("slo_class", String(64)),
    Column("requests_per_minute", Integer),
    Column("enqueued_tokens", BigInteger),
    Column("concurrent_batches", Integer),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
    Column("stored_bytes", BigInteger),
    Column("concurrent_calls", Integer),
    Column("max_weight", Float),
    Column("min_deadline_s", Float),
    sqlite_autoincrement=True,
)


REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007")
"""Every schema that a released batchrun wrote, oldest first."""
HEAD = REVISIONS[-1]


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
    from batchrun.store.migrations import upgrade

    with engine.execution_options(batchrun_write=True).begin() as connection:
        revision = _revision(connection, name)
        if revision != HEAD:
            if engine.dialect.name == "postgresql":
                postgresql.refuse_while_daemon_runs(connection, name)
            upgrade(connection, revision)
        failpoint("store.migrate.before")
