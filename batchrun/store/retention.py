"""Removing the results of jobs that ended long ago, copying a store, giving unused space back.

Jobs and their counts stay. A removal begins with a mark on the job: from then on its results can no
longer be read, and what is left of a removal that a kill broke off is found again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import delete, exists, func, or_, select, update

from batchrun.errors import StateError, StoreError, StoreFullError
from batchrun.store.database import Store
from batchrun.store.jobs import ENDED, OPEN, JobRecord, record_of
from batchrun.store.schema import attempts, batches, bodies, jobs, results, suspects
from batchrun.store.sqlite import open_cursor, read_pragma, run_to_end

ROWS_AT_ONCE = 5_000
"""Rows of one transaction: a daemon's own results wait for no more than that."""
PAGES_AT_ONCE = 2_000
"""Pages of one step of giving disk back: others may write in between."""
ROW_TABLES = (bodies, results, attempts, suspects)


def find_removable(store: Store, *, ended_before_s: float) -> list[JobRecord]:
    """Jobs that ended before this instant and still have their results, unless one that has not
    started continues them, and jobs whose removal was broken off; oldest first."""
    is_old = (
        jobs.c.state.in_(ENDED)
        & (jobs.c.finished_at < ended_before_s)
        & jobs.c.results_removed_at.is_(None)
    )
    has_rows = or_(*(exists().where(table.c.job_seq == jobs.c.seq) for table in ROW_TABLES))
    is_broken_off = jobs.c.results_removed_at.is_not(None) & has_rows
    query = select(jobs).where(is_old | is_broken_off).order_by(jobs.c.seq)
    waits = jobs.c.state.in_(OPEN) & jobs.c.started_at.is_(None)
    with store.read() as connection:
        specs = connection.execute(select(jobs.c.spec).where(waits)).scalars()
        promised = {json.loads(spec).get("continue_from") for spec in specs}
        found = map(record_of, connection.execute(query))
        return [each for each in found if each.results_removed_at or each.id not in promised]


def body_bytes(store: Store, job_seq: int) -> int:
    """What the replies of a job take in the store, compressed."""
    query = select(func.coalesce(func.sum(func.length(bodies.c.content)), 0))
    with store.read() as connection:
        return int(connection.execute(query.where(bodies.c.job_seq == job_seq)).scalar_one())


def remove_results(store: Store, record: JobRecord, *, now_s: float) -> Iterator[int]:
    """Remove a job's results, replies, attempts and suspects, the metadata and errors of a batch;
    yields how many results are gone.

    Many short transactions, so that a daemon can write in between. Raises StateError for a job
    that has not ended.
    """
    _mark(store, record, now_s)
    num_removed = 0
    for start in range(0, record.num_rows, ROWS_AT_ONCE):
        num_removed += _remove(store, record.seq, range(start, start + ROWS_AT_ONCE))
        yield num_removed
    yield num_removed + _remove(store, record.seq, None)


def _mark(store: Store, record: JobRecord, now_s: float) -> None:
    with store.write() as connection:
        state = connection.execute(select(jobs.c.state).where(jobs.c.seq == record.seq)).scalar()
        if state not in ENDED:
            raise StateError(f"{record.id} is {state}; only the results of ended jobs are removed")
        is_unmarked = jobs.c.results_removed_at.is_(None)
        connection.execute(
            update(jobs)
            .where(jobs.c.seq == record.seq, is_unmarked)
            .values(results_removed_at=now_s)
        )
        connection.execute(
            update(batches)
            .where(batches.c.job_seq == record.seq)
            .values(metadata=None, errors=None, record_bytes=None)
        )


def _remove(store: Store, job_seq: int, rows: range | None) -> int:
    """Remove these rows of a job, or whatever it has left; returns how many had a result."""
    num_removed = 0
    with store.write() as connection:
        for table in ROW_TABLES:
            statement = delete(table).where(table.c.job_seq == job_seq)
            if rows is not None:
                statement = statement.where(table.c.row.between(rows.start, rows.stop - 1))
            num_deleted = connection.execute(statement).rowcount
            num_removed += num_deleted if table is results else 0
    return num_removed


def write_snapshot(store: Store, path: Path) -> None:
    """Write all that is committed now into the empty file `path`; others may go on writing.

    Raises StoreError; StoreFullError when there is no room.
    """
    if not store.is_sqlite:
        raise StoreError(f"{store.name}: is a PostgreSQL database; copy it with `pg_dump`")
    try:
        with store.translated(), open_cursor(store.engine) as cursor:
            cursor.execute("VACUUM INTO ?", (str(path),))
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
    with store.translated(), open_cursor(store.engine) as cursor:
        return read_pragma(cursor, "freelist_count") * read_pragma(cursor, "page_size")


def give_disk_back(store: Store) -> Iterator[int]:
    """Shorten the store's file by the pages it does not use; yields how many are left.

    A daemon can write in between. Does nothing where that is not possible: see `is_shrinkable`.
    """
    if not store.is_sqlite:
        return
    with store.translated(), open_cursor(store.engine) as cursor:
        left = read_pragma(cursor, "freelist_count")
        while left:
            run_to_end(cursor, f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})")
            before, left = left, read_pragma(cursor, "freelist_count")
            if left >= before:
                break
            yield left
        run_to_end(cursor, "PRAGMA wal_checkpoint(TRUNCATE)")


def is_shrinkable(store: Store) -> bool:
    """Whether `give_disk_back` works: not for a store that the first schema began."""
    if not store.is_sqlite:
        return False
    with store.translated(), open_cursor(store.engine) as cursor:
        return read_pragma(cursor, "auto_vacuum") == 2


def rewrite(store: Store) -> None:
    """Write the store's file again without unused space; `is_shrinkable` from then on.

    The caller holds the store's lock. Raises StoreError; StoreFullError when the disk cannot hold
    the file twice.
    """
    if not store.is_sqlite:
        return
    with store.translated(), open_cursor(store.engine) as cursor:
        cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
        cursor.execute("VACUUM")
        run_to_end(cursor, "PRAGMA wal_checkpoint(TRUNCATE)")
