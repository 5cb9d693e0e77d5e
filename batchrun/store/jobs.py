"""The life of a job: one function per transition, each one transaction, illegal moves refused.

    create ─> validating ─start─> running ─begin_finalizing─> finalizing ─finish─> completed
                  │ │ │            │  ^ │                        │  │ └────finish─> expired
                  │ │ └──pause───┐ │  │ │                        │  │
                  │ │            v v  │ │                        │  │
                  │ │           paused ─┴─resume (to validating  │  │
                  │ │             │       if never started)      │  │
                  │ │             │ ^──────────pause─────────────┘  │
                  │ └─request_cancel─> cancelling <─────────────────┘ ─finish─> cancelled
                  └─fail─> failed

A job finalizes `ends_as` completed, or expired when its deadline passes (also while it is
validating or paused). A terminal job never changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import insert, select, update

from batchrun.errors import StateError, UnknownJobError
from batchrun.store.database import Store
from batchrun.store.job_record import JobRecord, NewJob, record_of
from batchrun.store.job_rows import insert_job, move_job, read_job
from batchrun.store.schema import epochs, jobs, settings
from batchrun.types import TERMINAL_JOB_STATES, JobState


def create(store: Store, job: NewJob, *, now_s: float) -> JobRecord:
    """Add a job in state validating, unless it is there already.

    Once this returns, the job survives any crash.
    """
    with store.write() as connection:
        if connection.execute(select(jobs.c.seq).where(jobs.c.id == job.id)).first() is not None:
            return read_job(connection, job.id)
        return insert_job(connection, job, now_s=now_s)


def start(store: Store, job_id: str, *, now_s: float) -> JobRecord:
    """validating -> running: every row is known and planned."""
    return _move(store, job_id, (JobState.VALIDATING,), JobState.RUNNING, started_at=now_s)


def fail(store: Store, job_id: str, reason: str, *, now_s: float) -> JobRecord:
    """validating -> failed: the input cannot be used; nothing ran."""
    return _move(
        store, job_id, (JobState.VALIDATING,), JobState.FAILED, reason=reason, finished_at=now_s
    )


def pause(store: Store, job_id: str, reason: str) -> JobRecord:
    """validating, running or finalizing -> paused, for `reason` (one line)."""
    allowed = (JobState.VALIDATING, JobState.RUNNING, JobState.FINALIZING)
    return _move(store, job_id, allowed, JobState.PAUSED, reason=reason, ends_as=None)


def resume(store: Store, job_id: str, *, pin: str | None = None) -> JobRecord:
    """paused -> running, or back to validating when the job never started.

    `pin` replaces the job's, where its input changed and is accepted as it is now.
    """
    with store.write() as connection:
        started = read_job(connection, job_id).started_at is not None
        target = JobState.RUNNING if started else JobState.VALIDATING
        accepted = {} if pin is None else {"pin": pin}
        return move_job(connection, job_id, (JobState.PAUSED,), target, reason=None, **accepted)


def begin_finalizing(store: Store, job_id: str, ends_as: JobState, *, now_s: float) -> JobRecord:
    """running -> finalizing as completed: no row is pending. Or as expired, paused jobs too."""
    if ends_as is JobState.EXPIRED:
        allowed = (JobState.RUNNING, JobState.VALIDATING, JobState.PAUSED)
        return _move(store, job_id, allowed, JobState.FINALIZING, ends_as=ends_as)
    to = JobState.FINALIZING
    return _move(store, job_id, (JobState.RUNNING,), to, ends_as=ends_as, finalizing_at=now_s)


def request_cancel(store: Store, job_id: str, *, now_s: float) -> JobRecord:
    """validating, running, paused or finalizing -> cancelling."""
    allowed = (JobState.VALIDATING, JobState.RUNNING, JobState.PAUSED, JobState.FINALIZING)
    to, ends_as = JobState.CANCELLING, JobState.CANCELLED
    return _move(store, job_id, allowed, to, ends_as=ends_as, cancelling_at=now_s)


def finish(store: Store, job_id: str, *, now_s: float, reason: str | None = None) -> JobRecord:
    """finalizing -> completed or expired, cancelling -> cancelled: the output file is in place.

    `reason` says why it is not, where a cancelled job's input is gone.
    """
    with store.write() as connection:
        ends_as = read_job(connection, job_id).ends_as
        allowed = (JobState.FINALIZING, JobState.CANCELLING)
        if ends_as is None:
            raise StateError(f"{job_id}: not finalizing")
        return move_job(connection, job_id, allowed, ends_as, finished_at=now_s, reason=reason)


def get(store: Store, job_id: str) -> JobRecord:
    """The job with this id, or with this unique prefix of its id, or the newest of this name.

    Raises UnknownJobError: no such job, or a prefix that several jobs share.
    """
    with store.read() as connection:
        found = connection.execute(select(jobs).where(jobs.c.id == job_id)).all()
        if not found and len(job_id) >= len("job_") + 2:
            found = connection.execute(
                select(jobs).where(jobs.c.id.startswith(job_id, autoescape=True)).limit(2)
            ).all()
        if not found:
            by_name = select(jobs).where(jobs.c.name == job_id).order_by(jobs.c.seq.desc())
            found = connection.execute(by_name.limit(1)).all()
    if len(found) != 1:
        what = "several jobs begin so" if found else "no such job"
        raise UnknownJobError(f"{job_id}: {what}; `batchrun status` lists the jobs")
    return record_of(found[0])


def list_jobs(store: Store, *, only: Sequence[JobState] | None = None) -> list[JobRecord]:
    """Every job (of these states), oldest first."""
    query = select(jobs).order_by(jobs.c.seq)
    if only is not None:
        query = query.where(jobs.c.state.in_([str(state) for state in only]))
    with store.read() as connection:
        return [record_of(row) for row in connection.execute(query)]


def find_unfinished(store: Store, content_hash: str) -> JobRecord | None:
    """The newest job of this content that has not ended, or None."""
    query = (
        select(jobs)
        .where(jobs.c.content_hash == content_hash)
        .where(jobs.c.state.not_in([str(state) for state in TERMINAL_JOB_STATES]))
        .order_by(jobs.c.seq.desc())
        .limit(1)
    )
    with store.read() as connection:
        row = connection.execute(query).first()
    return None if row is None else record_of(row)


def begin_epoch(store: Store, *, pid: int, now_s: float) -> int:
    """Record a daemon's start; returns its epoch, larger than every earlier one."""
    with store.write() as connection:
        added = connection.execute(insert(epochs).values(started_at=now_s, pid=pid))
        key = added.inserted_primary_key
        assert key is not None
        return int(key[0])


def read_setting(store: Store, key: str, default: object) -> object:
    """A durable setting's JSON value, or `default`."""
    with store.read() as connection:
        found = connection.execute(select(settings.c.value).where(settings.c.key == key)).scalar()
    return default if found is None else json.loads(found)


def write_setting(store: Store, key: str, value: object) -> None:
    """Set a durable setting to a JSON value."""
    with store.write() as connection:
        changed = connection.execute(
            update(settings).where(settings.c.key == key).values(value=json.dumps(value))
        )
        if changed.rowcount == 0:
            connection.execute(insert(settings).values(key=key, value=json.dumps(value)))


def _move(
    store: Store, job_id: str, allowed: Sequence[JobState], to: JobState, **values: object
) -> JobRecord:
    with store.write() as connection:
        return move_job(connection, job_id, allowed, to, **values)
