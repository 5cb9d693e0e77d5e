"""Whether the rows of one job are what they should be: in range, once, whole and readable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zstandard
from sqlalchemy import Connection, Row, Table, select

from batchrun.store.schema import attempts, bodies, results, suspects
from batchrun.types import ProgressSink, RowError

ROWS_PER_READ = 5_000
MAX_BODY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class RowFinding:
    """What is wrong with a row."""

    row: int
    what: str


def check_rows(
    connection: Connection,
    job: Row[Any],
    *,
    is_complete: bool,
    progress: ProgressSink | None = None,
) -> Iterator[RowFinding]:
    """What is wrong with the rows of a job (a row of `jobs`); `is_complete`: each needs a result.

    Decompresses every reply.
    """
    decompressor = zstandard.ZstdDecompressor()
    expected = 0
    for entry in _entries(connection, job.seq):
        if is_complete:
            yield from _missing(expected, min(entry.row, job.num_rows))
        expected = max(expected, entry.row + 1)
        yield from (RowFinding(entry.row, what) for what in _faults(entry, job, decompressor))
        if progress is not None and entry.row % ROWS_PER_READ == 0:
            progress(f"checking {job.id}", entry.row, job.num_rows)
    if is_complete:
        yield from _missing(expected, job.num_rows)
    yield from _bodies_alone(connection, job.seq)
    yield from _odd_counters(connection, job, attempts, "num_attempts")
    yield from _odd_counters(connection, job, suspects, "num_engine_deaths")


def _entries(connection: Connection, job_seq: int) -> Iterator[Row[Any]]:
    """Every result with its reply, in row order, read in bounded pieces."""
    same_row = (results.c.job_seq == bodies.c.job_seq) & (results.c.row == bodies.c.row)
    query = select(results, bodies.c.content).outerjoin(bodies, same_row)
    query = query.where(results.c.job_seq == job_seq).order_by(results.c.row).limit(ROWS_PER_READ)
    page = connection.execute(query).all()
    while page:
        yield from page
        page = connection.execute(query.where(results.c.row > page[-1].row)).all()


def _missing(start: int, end: int) -> Iterator[RowFinding]:
    for row in range(max(start, 0), end):
        yield RowFinding(row, "has no result, and the job is completed")


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


def _bodies_alone(connection: Connection, job_seq: int) -> Iterator[RowFinding]:
    same_row = (results.c.job_seq == bodies.c.job_seq) & (results.c.row == bodies.c.row)
    query = select(bodies.c.row).outerjoin(results, same_row).order_by(bodies.c.row)
    query = query.where(bodies.c.job_seq == job_seq, results.c.row.is_(None))
    for row in connection.execute(query).scalars():
        yield RowFinding(row, "has a reply without a result")


def _odd_counters(
    connection: Connection, job: Row[Any], table: Table, name: str
) -> Iterator[RowFinding]:
    query = select(table.c.row, table.c[name]).where(table.c.job_seq == job.seq)
    for row, number in connection.execute(query):
        if number < 1:
            yield RowFinding(row, f"{name} is {number}")
        if not 0 <= row < job.num_rows:
            yield RowFinding(row, f"has {name}, and the job has {job.num_rows} rows")
