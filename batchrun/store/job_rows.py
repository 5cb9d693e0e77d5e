"""One row of `jobs` within a transaction: added, read, moved to another state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import Connection, insert, select, update

from batchrun.errors import StateError, UnknownJobError
from batchrun.store.counts import count_results
from batchrun.store.job_record import JobRecord, NewJob, record_of
from batchrun.store.schema import jobs
from batchrun.types import JobState


def insert_job(connection: Connection, job: NewJob, *, now_s: float) -> JobRecord:
    """Add a job in state validating."""
    connection.execute(
        insert(jobs).values(
            id=job.id,
            name=job.name,
            state=JobState.VALIDATING,
            spec=job.spec,
            pin=job.pin,
            content_hash=job.content_hash,
            num_rows=job.num_rows,
            created_at=now_s,
            expires_at=None if job.deadline_s is None else now_s + job.deadline_s,
        )
    )
    return read_job(connection, job.id)


def move_job(
    connection: Connection,
    job_id: str,
    allowed: Sequence[JobState],
    to: JobState,
    **values: object,
) -> JobRecord:
    """Move a job that is in one of the states `allowed`, and set columns with it.

    A job that ends keeps its counts from then on. Raises UnknownJobError and StateError.
    """
    if to.is_terminal:
        values |= asdict(count_results(connection, read_job(connection, job_id).seq))
    changed = connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.state.in_([str(state) for state in allowed]))
        .values(
            state=str(to),
            **{name: _plain(value) for name, value in values.items()},
        )
    )
    record = read_job(connection, job_id)
    if changed.rowcount != 1:
        needed = ", ".join(allowed)
        raise StateError(
            f"{job_id} is {record.state} and cannot become {to} (possible while: {needed})"
        )
    return record


def _plain(value: object) -> object:
    """A value as the columns take it; PostgreSQL has no text with NUL in it."""
    return str(value).replace("\0", "") if isinstance(value, str) else value


def read_job(connection: Connection, job_id: str) -> JobRecord:
    """The job with exactly this id. Raises UnknownJobError."""
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).first()
    if row is None:
        raise UnknownJobError(f"{job_id}: no such job; `batchrun status` lists the jobs")
    return record_of(row)
