"""Whether each batch of OpenAI's API fits the job that it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, select

from batchrun.store.job_record import BATCH_PREFIX
from batchrun.store.schema import batches, jobs
from batchrun.types import TERMINAL_JOB_STATES, JobState

WITHOUT_FILES = {str(state) for state in JobState} - {
    str(state) for state in TERMINAL_JOB_STATES - {JobState.FAILED}
}


def check_batches(connection: Connection) -> Iterator[tuple[str | None, str]]:
    """(job id, what is wrong) for every fault; the id is None where there is no such job."""
    has_batch = batches.c.job_seq == jobs.c.seq
    alone = select(batches.c.job_seq).where(batches.c.job_seq.not_in(select(jobs.c.seq)))
    for seq in connection.execute(alone).scalars():
        yield None, f"batches: one of job number {seq}, which does not exist"
    query = select(jobs.c.id, jobs.c.state, jobs.c.started_at, batches).outerjoin(
        batches, has_batch
    )
    for row in connection.execute(query.order_by(jobs.c.seq)).all():
        yield from ((row.id, what) for what in _batch_faults(row))


def _batch_faults(row: Row[Any]) -> Iterator[str]:
    is_batch = row.job_seq is not None
    if row.id.startswith(BATCH_PREFIX) is not is_batch:
        yield "is a batch" if is_batch else "is called a batch, and is none"
    if not is_batch:
        return
    if (row.errors is not None) is not (row.state == JobState.FAILED):
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
