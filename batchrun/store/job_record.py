"""A job as callers know it, and as it comes out of the store."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row

from batchrun.store.counts import COUNT_NAMES, Counts, counts_of
from batchrun.store.schema import jobs
from batchrun.types import JobState

ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
ID_LENGTH = 10
BATCH_PREFIX = "batch_"
"""With it begin the ids of the jobs that came as batches of OpenAI's API, and no other."""


def new_job_id() -> str:
    """An id that no other job has."""
    return "job_" + "".join(secrets.choice(ID_ALPHABET) for _ in range(ID_LENGTH))


@dataclass(frozen=True, slots=True)
class NewJob:
    """A submission whose input was checked and pinned. `spec` and `pin` are JSON texts.

    The submitter chooses the id, so that handing a job over twice adds it once.
    """

    name: str
    spec: str
    pin: str
    content_hash: str
    num_rows: int
    deadline_s: float | None = None
    id: str = field(default_factory=new_job_id)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it stands in the store. Instants are UTC epoch seconds.

    `seq` orders jobs by submission; `reason` says why the job is paused or failed. `counts` is
    None until the job ends; from `results_removed_at` on its results are gone. `finalizing_at` is
    None where a deadline ended the job.
    """

    seq: int
    id: str
    name: str
    state: JobState
    spec: str
    pin: str
    content_hash: str
    num_rows: int
    created_at: float
    expires_at: float | None
    started_at: float | None
    finished_at: float | None
    ends_as: JobState | None
    reason: str | None
    counts: Counts | None = None
    results_removed_at: float | None = None
    finalizing_at: float | None = None
    cancelling_at: float | None = None

    @property
    def is_batch(self) -> bool:
        """Whether it is a batch of OpenAI's API: without rows until its input was validated."""
        return self.id.startswith(BATCH_PREFIX)


def record_of(row: Row[Any]) -> JobRecord:
    """A job from a row that has all columns of `jobs`."""
    values = {column.name: getattr(row, column.name) for column in jobs.c}
    values["counts"] = counts_of(row)
    for name in COUNT_NAMES:
        del values[name]
    values["state"] = JobState(values["state"])
    values["ends_as"] = None if values["ends_as"] is None else JobState(values["ends_as"])
    return JobRecord(**values)
