"""Whether a store keeps every promise about itself. Reads only, and repairs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from batchrun.store.check_batches import check_batches
from batchrun.store.check_rows import check_rows
from batchrun.store.counts import COUNT_NAMES, Counts, count_results, counts_of
from batchrun.store.database import Store
from batchrun.store.job_record import BATCH_PREFIX, JobRecord, record_of
from batchrun.store.migrate import HEAD, find_revision
from batchrun.store.schema import (
    api_keys,
    attempts,
    batches,
    bodies,
    epochs,
    files,
    jobs,
    results,
    suspects,
)
from batchrun.store.sqlite import integrity_problems, last_given_key
from batchrun.types import TERMINAL_JOB_STATES, JobState, ProgressSink

ENDS_AS = {
    JobState.FINALIZING: {JobState.COMPLETED, JobState.EXPIRED},
    JobState.CANCELLING: {JobState.CANCELLED},
    JobState.COMPLETED: {JobState.COMPLETED},
    JobState.CANCELLED: {JobState.CANCELLED},
    JobState.EXPIRED: {JobState.EXPIRED},
}
"""What `ends_as` holds in each state; null in every other."""
STARTED = {JobState.RUNNING, JobState.COMPLETED}


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be; `job_id` and `row` say where, so far as it has a place.

    After one that `hides_more` nothing else was looked at.
    """

    what: str
    job_id: str | None = None
    row: int | None = None
    hides_more: bool = False

    def __str__(self) -> str:
        place = [] if self.job_id is None else [self.job_id]
        place += [] if self.row is None else [f"row {self.row}"]
        return f"{', '.join(place)}: {self.what}" if place else self.what


def check_store(store: Store, *, progress: ProgressSink | None = None) -> Iterator[Violation]:
    """Every violation in the store as one moment has it; a daemon may go on writing meanwhile.

    Nothing but SQLite's own findings for a damaged file, nothing but the revision for a schema that
    is not this batchrun's.
    """
    with store.read() as connection:
        damage = integrity_problems(connection) if store.is_sqlite else []
        for problem in damage:
            yield Violation(f"the file is damaged: {problem}", hides_more=True)
        revision = find_revision(store.engine, store.name)
        if revision != HEAD:
            yield Violation(
                f"schema {revision or 'missing'}, and this batchrun has {HEAD}; it is upgraded "
                "when a command such as `batchrun status` opens the store",
                hides_more=True,
            )
        if damage or revision != HEAD:
            return
        yield from _check_keys(connection, is_sqlite=store.is_sqlite)
        yield from _check_owners(connection)
        yield from (Violation(what, job_id) for job_id, what in check_batches(connection))
        for job in connection.execute(select(jobs).order_by(jobs.c.seq)).all():
            yield from (Violation(what, job.id) for what in _check_job(job))
            if job.results_removed_at is None:
                yield from _check_results(connection, job, progress)


def readable_jobs(store: Store) -> list[JobRecord]:
    """The jobs whose states are known, oldest first; `check_store` names the others."""
    states = [str(state) for state in JobState]
    is_known = jobs.c.ends_as.is_(None) | jobs.c.ends_as.in_(states)
    query = select(jobs).where(jobs.c.state.in_(states), is_known).order_by(jobs.c.seq)
    with store.read() as connection:
        return [record_of(job) for job in connection.execute(query)]


def _check_keys(connection: Connection, *, is_sqlite: bool) -> Iterator[Violation]:
    """Numbers of jobs, files, keys and daemon starts only grow: none is given out twice."""
    numbered = (epochs.c.epoch, jobs.c.seq, files.c.seq, api_keys.c.seq)
    for table, key in ((key.table, key) for key in numbered):
        low, high = connection.execute(select(func.min(key), func.max(key))).one()
        if low is not None and low < 1:
            yield Violation(f"{table.name}: number {low} is not above 0")
        if is_sqlite and high is not None and high > last_given_key(connection, table.name):
            yield Violation(f"{table.name}: number {high} was never given out")


def _check_owners(connection: Connection) -> Iterator[Violation]:
    known = select(jobs.c.seq)
    for table in (results, bodies, attempts, suspects):
        strays = select(table.c.job_seq, func.count(), func.min(table.c.row))
        strays = strays.where(table.c.job_seq.not_in(known)).group_by(table.c.job_seq)
        for seq, num_rows, row in connection.execute(strays):
            what = f"{table.name}: {num_rows} rows of job number {seq}, which does not exist"
            yield Violation(what, row=row)
    keys = select(api_keys.c.id)
    for table in (files, batches):
        is_stray = table.c.owner.is_not(None) & table.c.owner.not_in(keys)
        strays = select(table.c.owner, func.count()).where(is_stray)
        for owner, num in connection.execute(strays.group_by(table.c.owner)):
            yield Violation(f"{table.name}: {num} of key {owner}, which does not exist")


def _check_job(job: Row[Any]) -> Iterator[str]:
    if job.state not in set(JobState):
        yield f"state {job.state!r} is none"
        return
    state = JobState(job.state)
    if job.ends_as not in ENDS_AS.get(state, {None}):
        yield f"{state}, and to end as {job.ends_as}"
    is_unvalidated = job.id.startswith(BATCH_PREFIX) and job.started_at is None
    if job.num_rows < 1 and not is_unvalidated:
        yield f"{job.num_rows} rows"
    if state in STARTED and job.started_at is None:
        yield f"{state}, and never started"
    if state is JobState.PAUSED and not job.reason:
        yield "paused for no reason"
    has_ended = state in TERMINAL_JOB_STATES
    if (job.finished_at is not None) is not has_ended:
        yield f"{state}, and finished at {job.finished_at}"
    if job.results_removed_at is not None and not has_ended:
        yield f"{state}, and its results are removed"
    if {getattr(job, name) is not None for name in COUNT_NAMES} != {has_ended}:
        yield f"{state}, and its counts are {'incomplete' if has_ended else 'there already'}"


def _check_results(
    connection: Connection, job: Row[Any], progress: ProgressSink | None
) -> Iterator[Violation]:
    is_complete = job.state == JobState.COMPLETED
    for finding in check_rows(connection, job, is_complete=is_complete, progress=progress):
        yield Violation(finding.what, job.id, finding.row)
    kept, counted = counts_of(job), count_results(connection, job.seq)
    if kept is not None and kept != counted:
        yield Violation(f"it kept {_listed(kept)}, and its results make {_listed(counted)}", job.id)
    if job.state == JobState.FAILED and counted.num_done:
        yield Violation(f"failed before it ran, and has {counted.num_done} results", job.id)


def _listed(counts: Counts) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(counts).items())
