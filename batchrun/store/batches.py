"""Batches of OpenAI's API: each is a job, with what only the API knows beside it.

The life of the job is that of `store/jobs.py`. Here are its transitions that change a batch too,
each one transaction: `create_all`, `start`, `fail` and `finish`. `scope` is as in `store/files.py`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, func, insert, select, update

from batchrun.errors import QuotaError, StateError
from batchrun.store.database import Store
from batchrun.store.files import (
    RECORD_BYTES,
    NewFile,
    insert_file,
    refuse_too_much,
    sum_stored_bytes,
)
from batchrun.store.jobs import (
    BATCH_PREFIX,
    OPEN,
    JobRecord,
    NewJob,
    count_all,
    insert_job,
    move_job,
    read_job,
    record_of,
)
from batchrun.store.schema import batches, jobs
from batchrun.types import JobState


def new_batch_id() -> str:
    """An id that no other job has."""
    return BATCH_PREFIX + secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a caller asked for. `request_hash` is equal for equal requests; `idempotency_hash`
    stands for the caller and his key, where he gave one."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str] | None
    output_expires_after_s: int | None
    request_hash: str
    idempotency_hash: str | None = None
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why an input was refused; `line` counts from 1 and is None for the file as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class ValidInput:
    """What validation found out about a batch: all texts as in `NewJob`."""

    model: str
    spec: str
    pin: str
    content_hash: str
    num_rows: int
    num_enqueued_tokens: int


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """The files of results that a batch ends with; None for one that would be empty."""

    output: NewFile | None
    error: NewFile | None
    num_reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch as it stands in the store; see `NewBatch`. `job` is the job that it is.

    `errors` is None unless validation failed. `num_reasoning_tokens` is known at the end;
    `num_enqueued_tokens`, an estimate, from the start on.
    """

    job: JobRecord
    owner: str | None
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str] | None
    output_expires_after_s: int | None
    model: str | None
    errors: tuple[BatchError, ...] | None
    output_file_id: str | None
    error_file_id: str | None
    num_reasoning_tokens: int | None
    request_hash: str
    num_enqueued_tokens: int | None


@dataclass(frozen=True, slots=True)
class WantedBatch:
    """A batch to be added with its job; its owner may have `max_open` that have not ended, and
    store `max_stored_bytes`."""

    batch: NewBatch
    job: NewJob
    max_open: int | None = None
    max_stored_bytes: int | None = None


def create_all(
    store: Store, wanted: Sequence[WantedBatch], *, now_s: float
) -> list[BatchRecord | QuotaError]:
    """Add batches with their jobs, in state validating, all in one transaction; once this returns,
    they survive any crash.

    One that was added under the same `idempotency_hash` stands for a new one. A QuotaError stands
    for one whose owner has as much as he may have.
    """
    found: list[BatchRecord | QuotaError] = []
    stored_bytes: dict[str | None, int] = {}
    with store.write() as connection:
        for one in wanted:
            try:
                found.append(_create(connection, one, stored_bytes, now_s))
            except QuotaError as error:
                found.append(error)
    return found


def _create(
    connection: Connection, wanted: WantedBatch, stored_bytes: dict[str | None, int], now_s: float
) -> BatchRecord:
    """`stored_bytes` keeps what each owner stores: others wait while it is summed."""
    batch = wanted.batch
    if batch.idempotency_hash is not None:
        same = batches.c.idempotency_hash == batch.idempotency_hash
        found = connection.execute(_query().where(same)).first()
        if found is not None:
            return _record(found)
    values = asdict(batch)
    values["metadata"] = None if batch.metadata is None else json.dumps(batch.metadata)
    values["record_bytes"] = len(values["metadata"] or "")
    _refuse_too_many(connection, batch.owner, wanted.max_open)
    if wanted.max_stored_bytes is not None:
        if batch.owner not in stored_bytes:
            stored_bytes[batch.owner] = sum_stored_bytes(connection, batch.owner, now_s)
        refuse_too_much(stored_bytes[batch.owner], values["record_bytes"], wanted.max_stored_bytes)
    seq = insert_job(connection, wanted.job, now_s=now_s).seq
    connection.execute(insert(batches).values(job_seq=seq, **values))
    if batch.owner in stored_bytes:
        stored_bytes[batch.owner] += RECORD_BYTES + values["record_bytes"]
    return _read(connection, wanted.job.id)


def _refuse_too_many(connection: Connection, owner: str | None, max_open: int | None) -> None:
    if max_open is not None and len(_open_ones(connection, owner)) >= max_open:
        raise QuotaError(f"this API key may have {max_open} at once; wait until a batch has ended")


def start(
    store: Store,
    batch_id: str,
    valid: ValidInput,
    *,
    now_s: float,
    max_enqueued_tokens: int | None = None,
) -> BatchRecord:
    """validating -> running: the input is valid and pinned, and every row is known.

    Raises QuotaError when the batches of its owner that have not ended would hold more than
    `max_enqueued_tokens`, and changes nothing then.
    """
    values = asdict(valid)
    known = {name: values.pop(name) for name in ("model", "num_enqueued_tokens")}
    with store.write() as connection:
        allowed = (JobState.VALIDATING,)
        job = move_job(connection, batch_id, allowed, JobState.RUNNING, started_at=now_s, **values)
        connection.execute(update(batches).where(batches.c.job_seq == job.seq).values(**known))
        batch = _read(connection, batch_id)
        if max_enqueued_tokens is not None:
            enqueued_tokens = sum(_open_ones(connection, batch.owner))
            if enqueued_tokens > max_enqueued_tokens:
                raise QuotaError(
                    f"Enqueued token limit reached for {valid.model} in organization batchrun. "
                    f"Limit: {max_enqueued_tokens} enqueued tokens. Please try again once some "
                    "in_progress batches have been completed."
                )
        return batch


def fail(store: Store, batch_id: str, errors: Sequence[BatchError], *, now_s: float) -> BatchRecord:
    """validating -> failed: the input cannot be used; nothing ran."""
    listed = json.dumps([asdict(error) for error in errors])
    reason = " ".join(errors[0].message.split())
    with store.write() as connection:
        allowed = (JobState.VALIDATING,)
        job = move_job(
            connection, batch_id, allowed, JobState.FAILED, reason=reason, finished_at=now_s
        )
        kept = {"errors": listed, "record_bytes": batches.c.record_bytes + len(listed)}
        connection.execute(update(batches).where(batches.c.job_seq == job.seq).values(**kept))
        return _read(connection, batch_id)


def finish(store: Store, ending: JobRecord, found: ResultFiles, *, now_s: float) -> BatchRecord:
    """finalizing -> completed or expired, cancelling -> cancelled: the files are on the disk.

    Raises StateError when the job has come to end otherwise since it was `ending`.
    """
    assert ending.ends_as is not None
    counted = count_all(store, ending.id)
    with store.write() as connection:
        now = read_job(connection, ending.id)
        if (now.state, now.ends_as) != (ending.state, ending.ends_as):
            raise StateError(f"{ending.id} was {ending.state} and is {now.state} by now")
        for file in (found.output, found.error):
            if file is not None:
                insert_file(connection, file, now_s=now_s)
        allowed = (now.state,)
        move_job(connection, ending.id, allowed, ending.ends_as, counted, finished_at=now_s)
        connection.execute(
            update(batches)
            .where(batches.c.job_seq == ending.seq)
            .values(
                output_file_id=None if found.output is None else found.output.id,
                error_file_id=None if found.error is None else found.error.id,
                num_reasoning_tokens=found.num_reasoning_tokens,
            )
        )
        return _read(connection, ending.id)


def find(store: Store, batch_id: str, *, scope: str | None = None) -> BatchRecord | None:
    """The batch with exactly this id, or None."""
    if "\0" in batch_id:
        return None
    with store.read() as connection:
        row = connection.execute(_within(scope).where(jobs.c.id == batch_id)).first()
    return None if row is None else _record(row)


def is_input(store: Store, file_id: str) -> bool:
    """Whether a batch that has not ended has this file for its input."""
    return _has_batch(store, file_id, jobs.c.state.in_(OPEN))


def needs_kept_input(store: Store, batch: BatchRecord) -> bool:
    """Whether a batch that has started, or another that may, has the input of this one."""
    may_start = jobs.c.state.in_(OPEN) & (jobs.c.id != batch.job.id)
    return _has_batch(store, batch.input_file_id, may_start | (jobs.c.num_rows > 0))


def _has_batch(store: Store, file_id: str, such: ColumnElement[bool]) -> bool:
    query = select(batches.c.job_seq).join(jobs, batches.c.job_seq == jobs.c.seq)
    with store.read() as connection:
        found = connection.execute(query.where(batches.c.input_file_id == file_id, such))
        return found.first() is not None


def list_page(
    store: Store, *, limit: int, after: BatchRecord | None = None, scope: str | None = None
) -> list[BatchRecord]:
    """Up to `limit` batches that are older than `after`, newest first."""
    query = _within(scope).order_by(batches.c.job_seq.desc()).limit(limit)
    if after is not None:
        query = query.where(batches.c.job_seq < after.job.seq)
    with store.read() as connection:
        return [_record(row) for row in connection.execute(query)]


def _open_ones(connection: Connection, owner: str | None) -> Sequence[int]:
    """The batches of an owner that have not ended: the tokens that each keeps."""
    is_open = batches.c.job_seq.in_(select(jobs.c.seq).where(jobs.c.state.in_(OPEN)))
    tokens = select(func.coalesce(batches.c.num_enqueued_tokens, 0))
    return connection.execute(tokens.where(batches.c.owner == owner, is_open)).scalars().all()


def _within(scope: str | None) -> Select[Any]:
    return _query() if scope is None else _query().where(batches.c.owner == scope)


def _query() -> Select[Any]:
    columns = (column.label(f"batch_{column.name}") for column in batches.c)
    return select(jobs, *columns).join(batches, batches.c.job_seq == jobs.c.seq)


def _read(connection: Connection, batch_id: str) -> BatchRecord:
    return _record(connection.execute(_query().where(jobs.c.id == batch_id)).one())


def _record(row: Row[Any]) -> BatchRecord:
    values = {column.name: getattr(row, f"batch_{column.name}") for column in batches.c}
    del values["job_seq"], values["idempotency_hash"], values["record_bytes"]
    for name in ("metadata", "errors"):
        values[name] = None if values[name] is None else json.loads(values[name])
    if values["errors"] is not None:
        values["errors"] = tuple(BatchError(**error) for error in values["errors"])
    return BatchRecord(job=record_of(row), **values)
