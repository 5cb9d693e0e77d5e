"""Whether a store keeps every promise about itself, its batches and the rows of its jobs.

Reads only, and repairs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import zstandard
from sqlalchemy import Connection, Row, Table, func, select

from batchrun.store.database import Store
from batchrun.store.jobs import (
    BATCH_PREFIX,
    COUNT_NAMES,
    Counts,
    JobRecord,
    count_results,
    counts_of,
    record_of,
)
from batchrun.store.schema import (
    HEAD,
    SAME_ROW,
    api_keys,
    attempts,
    batches,
    bodies,
    epochs,
    files,
    find_revision,
    jobs,
    results,
    suspects,
)
from batchrun.store.sqlite import integrity_problems, last_given_key
from batchrun.types import TERMINAL_JOB_STATES, JobState, ProgressSink, RowError

ROWS_PER_READ = 5_000
MAX_BODY_BYTES = 1 << 30
ENDS_AS: dict[JobState, set[JobState | None]] = {
    JobState.FINALIZING: {JobState.COMPLETED, JobState.FAILED, JobState.EXPIRED},
    JobState.CANCELLING: {JobState.CANCELLED},
    JobState.COMPLETED: {JobState.COMPLETED},
    JobState.FAILED: {JobState.FAILED, None},
    JobState.CANCELLED: {JobState.CANCELLED},
    JobState.EXPIRED: {JobState.EXPIRED},
}
"""What `ends_as` holds in each state; null in every other."""
STARTED = {JobState.RUNNING, JobState.COMPLETED}
WITHOUT_FILES = {str(state) for state in JobState} - {
    str(state) for state in TERMINAL_JOB_STATES - {JobState.FAILED}
}


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


def _check_batches(connection: Connection) -> Iterator[Violation]:
    alone = select(batches.c.job_seq).where(batches.c.job_seq.not_in(select(jobs.c.seq)))
    for seq in connection.execute(alone).scalars():
        yield Violation(f"batches: one of job number {seq}, which does not exist")
    about_job = (jobs.c.id, jobs.c.state, jobs.c.started_at, jobs.c.results_removed_at)
    query = select(*about_job, batches)
    query = query.outerjoin(batches, batches.c.job_seq == jobs.c.seq).order_by(jobs.c.seq)
    for row in connection.execute(query).all():
        yield from (Violation(what, row.id) for what in _batch_faults(row))


def _batch_faults(row: Row[Any]) -> Iterator[str]:
    is_batch = row.job_seq is not None
    if row.id.startswith(BATCH_PREFIX) is not is_batch:
        yield "is a batch" if is_batch else "is called a batch, and is none"
    if not is_batch:
        return
    has_errors = row.state == JobState.FAILED and row.results_removed_at is None
    if (row.errors is not None) is not has_errors:
        yield f"{row.state}, and its input has {'errors' if row.errors else 'none'}"
    if (row.model is None) is not (row.started_at is None):
        yield f"its model is {row.model}, and it started at {row.started_at}"
    if row.state in WITHOUT_FILES and (row.output_file_id or row.error_file_id):
        yield f"{row.state}, and has files of results"
    for name in ("metadata", "errors"):
        try:
            json.loads(getattr(row, name) or "null")
        except ValueError:
            yield f"its {name} cannot be read"


def _check_rows(
    connection: Connection, job: Row[Any], progress: ProgressSink | None
) -> Iterator[tuple[int, str]]:
    """(row, what is wrong with it) for the rows of a job. Decompresses every reply."""
    decompressor = zstandard.ZstdDecompressor()
    num_needed = job.num_rows if job.state == JobState.COMPLETED else 0
    expected = 0
    for entry in _entries(connection, job.seq):
        yield from _missing(expected, min(entry.row, num_needed))
        expected = max(expected, entry.row + 1)
        yield from ((entry.row, what) for what in _faults(entry, job, decompressor))
        if progress is not None and entry.row % ROWS_PER_READ == 0:
            progress(f"checking {job.id}", entry.row, job.num_rows)
    yield from _missing(expected, num_needed)
    yield from _bodies_alone(connection, job.seq)
    yield from _odd_counters(connection, job, attempts, "num_attempts")
    yield from _odd_counters(connection, job, suspects, "num_engine_deaths")


def _entries(connection: Connection, job_seq: int) -> Iterator[Row[Any]]:
    """Every result with its reply, in row order, read in bounded pieces."""
    query = select(results, bodies.c.content).outerjoin(bodies, SAME_ROW)
    query = query.where(results.c.job_seq == job_seq).order_by(results.c.row).limit(ROWS_PER_READ)
    page = connection.execute(query).all()
    while page:
        yield from page
        page = connection.execute(query.where(results.c.row > page[-1].row)).all()


def _missing(start: int, end: int) -> Iterator[tuple[int, str]]:
    for row in range(start, end):
        yield row, "has no result, and the job is completed"


def _faults(
    entry: Row[Any], job: Row[Any], decompressor: zstandard.ZstdDecompressor
) -> Iterator[str]:
    if not 0 <= entry.row < job.num_rows:
        yield f"has a result, and the job has {job.num_rows} rows"
    if entry.ok not in {0, 1}:
        yield f"ok is {entry.ok}, neither 0 nor 1"
    numbers = ("attempts", "num_prompt_tokens", "num_output_tokens", "num_cached_tokens")
    for name in numbers:
        if getattr(entry, name) < 0:
            yield f"{name} is {getattr(entry, name)}"
    if entry.content is None:
        yield "has a result without a reply"
        return
    try:
        plain = decompressor.decompress(entry.content, max_output_size=MAX_BODY_BYTES)
        if not entry.ok:
            RowError(**json.loads(plain))
    except (zstandard.ZstdError, ValueError, TypeError) as error:
        yield f"its reply cannot be read: {error}"


def _bodies_alone(connection: Connection, job_seq: int) -> Iterator[tuple[int, str]]:
    query = select(bodies.c.row).outerjoin(results, SAME_ROW).order_by(bodies.c.row)
    query = query.where(bodies.c.job_seq == job_seq, results.c.row.is_(None))
    for row in connection.execute(query).scalars():
        yield row, "has a reply without a result"


def _odd_counters(
    connection: Connection, job: Row[Any], table: Table, name: str
) -> Iterator[tuple[int, str]]:
    query = select(table.c.row, table.c[name]).where(table.c.job_seq == job.seq)
    for row, number in connection.execute(query):
        if number < 1:
            yield row, f"{name} is {number}"
        if not 0 <= row < job.num_rows:
            yield row, f"has {name}, and the job has {job.num_rows} rows"


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
        yield from _check_batches(connection)
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
    for row, what in _check_rows(connection, job, progress):
        yield Violation(what, job.id, row)
    kept, counted = counts_of(job), count_results(connection, job.seq)
    if kept is not None and kept != counted:
        yield Violation(f"it kept {_listed(kept)}, and its results make {_listed(counted)}", job.id)
    if job.state == JobState.FAILED and job.ends_as is None and counted.num_done:
        yield Violation(f"failed before it ran, and has {counted.num_done} results", job.id)
    if job.state == JobState.FAILED and counted.num_completed:
        yield Violation(f"every row failed, and {counted.num_completed} have an answer", job.id)


def _listed(counts: Counts) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(counts).items())
