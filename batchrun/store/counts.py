"""How many rows of a job have ended, and the tokens they took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from batchrun.store.schema import jobs, results


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows of a job have ended, and the tokens they took."""

    num_completed: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def num_done(self) -> int:
        """Rows that have a result, good or bad."""
        return self.num_completed + self.num_failed


COUNT_NAMES = tuple(Counts.__dataclass_fields__)
"""The columns in which a job that has ended keeps its counts."""


def count_results(connection: Connection, job_seq: int) -> Counts:
    """What the results of a job add up to now."""
    columns = (
        results.c.num_prompt_tokens,
        results.c.num_output_tokens,
        results.c.num_cached_tokens,
    )
    query = select(
        func.count(),
        func.coalesce(func.sum(results.c.ok), 0),
        *(func.coalesce(func.sum(column), 0) for column in columns),
    ).where(results.c.job_seq == job_seq)
    total, completed, prompt, output, cached = connection.execute(query).one()
    return Counts(completed, total - completed, prompt, output, cached)


def kept_counts(connection: Connection, job_seq: int) -> Counts | None:
    """What a job kept when it ended, or None while it has not."""
    query = select(*(jobs.c[name] for name in COUNT_NAMES)).where(jobs.c.seq == job_seq)
    found = connection.execute(query).first()
    return None if found is None else counts_of(found)


def counts_of(job: Row[Any]) -> Counts | None:
    """The kept counts among a job's columns, or None when there are none."""
    kept = {name: value for name in COUNT_NAMES if (value := getattr(job, name)) is not None}
    return Counts(**kept) if len(kept) == len(COUNT_NAMES) else None
