"""Builders of stores: of every released schema, and of jobs in every state."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from batchrun.errors import QuotaError
from batchrun.store import batches, jobs
from batchrun.store.batches import BatchRecord, NewBatch, WantedBatch
from batchrun.store.database import Store
from batchrun.store.jobs import JobRecord, NewJob
from batchrun.types import JobState, Outcome, OutcomeKind, RowError, Usage

DUMPS = Path(__file__).parent / "stores"
"""One SQL dump for each schema that a batchrun wrote, named by its revision."""

TABLES = ("jobs", "results", "bodies", "attempts", "suspects", "epochs", "settings")
API_TABLES = ("files", "batches")
"""Not in stores of the first two schemas."""
KEY_TABLES = ("api_keys",)
"""Not in stores of the first three."""

Dump = dict[str, list[dict[str, object]]]


def load_dump(path: Path, revision: str) -> Path:
    """A store file at `path` as a batchrun of this schema left it."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((DUMPS / f"{revision}.sql").read_text())
    return path


def read_tables(location: str | Path) -> Dump:
    """Every row of every table, by the names of its columns."""
    with _connected(location) as connection:
        found = {}
        version = connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]
        later = (API_TABLES if version > "0002" else ()) + (KEY_TABLES if version > "0003" else ())
        for table in TABLES + later:
            cursor = connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2")
            names = [column[0] for column in cursor.description]
            found[table] = [dict(zip(names, row, strict=True)) for row in cursor]
        return found


def execute(location: str | Path, *statements: str) -> None:
    """Change a store behind its back."""
    with _connected(location) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def select(location: str | Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    """What a query finds in a store; its parameters are question marks."""
    with _connected(location, is_reader=True) as connection:
        mark = "?" if isinstance(location, Path) else "%s"
        rows: list[tuple[Any, ...]] = connection.execute(
            query.replace("?", mark), values
        ).fetchall()
        return rows


def _connected(location: str | Path, *, is_reader: bool = False) -> closing[Any]:
    """The store at a path or a PostgreSQL URL, without batchrun in between."""
    if isinstance(location, Path):
        mode = "ro" if is_reader else "rwc"
        return closing(sqlite3.connect(f"file:{location}?mode={mode}", uri=True))
    import psycopg

    return closing(psycopg.connect(location))


def answered(row: int, text: str = "yes") -> Outcome:
    """A row's answer."""
    return Outcome(
        job_id="any",
        row=row,
        attempt=1,
        kind=OutcomeKind.OK,
        body=text.encode(),
        finish_reason="stop",
        usage=Usage(10, 2, 5),
    )


def refused(row: int) -> Outcome:
    """A row's error."""
    error = RowError("bad_request", "too long", 400)
    return Outcome(job_id="any", row=row, attempt=2, kind=OutcomeKind.ROW_ERROR, error=error)


def grow_dump(path: Path, *, num_rows: int) -> None:
    """Give the completed job of a dump many rows."""
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 3 UNION ALL SELECT i + 1 FROM n LIMIT {num_rows})"
    index = "1, i, ok, attempts, finish_reason, 1, 1, 0, duration_s, committed_at"
    one = "WHERE job_seq = 1 AND row = 1"
    execute(
        path,
        f"INSERT INTO results {numbers} SELECT {index} FROM n, results {one}",
        f"INSERT INTO bodies {numbers} SELECT 1, i, content FROM n, bodies {one}",
        f"UPDATE jobs SET num_rows = {num_rows + 3} WHERE seq = 1",
    )


def add_batch(
    store: Store, batch: NewBatch, job: NewJob, *, now_s: float, max_open: int | None = None
) -> BatchRecord:
    """One batch. Raises QuotaError."""
    (found,) = batches.create_all(store, [WantedBatch(batch, job, max_open)], now_s=now_s)
    if isinstance(found, QuotaError):
        raise found
    return found


def fail_job(store: Store, job_id: str, reason: str, *, now_s: float) -> JobRecord:
    """All rows of a job have failed."""
    jobs.start(store, job_id, now_s=now_s)
    jobs.begin_finalizing(store, job_id, JobState.FAILED, now_s=now_s)
    return jobs.finish(store, job_id, now_s=now_s, reason=reason)
