"""Append-only results: a row is done if and only if it stands here under (job, row).

What is not here is pending, so resuming is a set difference and a crash leaves nothing to repair.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard
from sqlalchemy import Connection, Table, bindparam, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from batchrun.store.database import Store
from batchrun.store.schema import attempts, bodies, jobs, results, suspects
from batchrun.types import TERMINAL_JOB_STATES, Outcome, OutcomeKind, RowError, Usage

COMPRESSION_LEVEL = 3
ROWS_PER_READ = 2_000
MAX_BODY_BYTES = 1 << 30


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


@dataclass(frozen=True, slots=True)
class StoredResult:
    """One row's end, as committed. `body` is the engine's reply, or None with `error` set."""

    row: int
    attempts: int
    body: bytes | None
    error: RowError | None
    finish_reason: str | None
    usage: Usage


def commit(store: Store, outcomes: Sequence[tuple[int, Outcome]], *, now_s: float) -> int:
    """Append the outcomes (each with its job's seq) in one transaction; returns how many were new.

    A row that already has a result keeps it, and a terminal job takes no more results.
    Once this returns, the new results survive any crash.
    """
    compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL)
    entries = [_result_values(seq, outcome, now_s) for seq, outcome in outcomes]
    contents = [
        {"job_seq": seq, "row": outcome.row, "content": compressor.compress(_content(outcome))}
        for seq, outcome in outcomes
    ]
    with store.write() as connection:
        closed = _terminal_seqs(connection, {seq for seq, _ in outcomes})
        live = [i for i, entry in enumerate(entries) if entry["job_seq"] not in closed]
        before = _num_known(connection, entries, live)
        if live:
            _insert_new(connection, results, [entries[i] for i in live])
            _insert_new(connection, bodies, [contents[i] for i in live])
        return len(live) - before


def done_rows(store: Store, job_seq: int) -> npt.NDArray[np.int64]:
    """The rows of a job that have a result, ascending."""
    query = select(results.c.row).where(results.c.job_seq == job_seq).order_by(results.c.row)
    with store.read() as connection:
        return np.fromiter((row for (row,) in connection.execute(query)), dtype=np.int64)


def count(store: Store, job_seq: int) -> Counts:
    """Ended rows and tokens of a job."""
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
    with store.read() as connection:
        total, completed, prompt, output, cached = connection.execute(query).one()
    return Counts(completed, total - completed, prompt, output, cached)


def read(
    store: Store, job_seq: int, *, failed_only: bool = False, limit: int | None = None
) -> Iterator[StoredResult]:
    """Results of a job in row order, read in bounded pieces."""
    decompressor = zstandard.ZstdDecompressor()
    after, left = -1, limit
    while left is None or left > 0:
        size = ROWS_PER_READ if left is None else min(ROWS_PER_READ, left)
        page = _page(store, job_seq, after, size, failed_only=failed_only)
        for row, num_attempts, reason, prompt, output, cached, ok, content in page:
            plain = decompressor.decompress(content, max_output_size=MAX_BODY_BYTES)
            yield StoredResult(
                row=row,
                attempts=num_attempts,
                body=plain if ok else None,
                error=None if ok else RowError(**json.loads(plain)),
                finish_reason=reason,
                usage=Usage(prompt, output, cached),
            )
        if len(page) < size:
            return
        after = page[-1][0]
        left = None if left is None else left - len(page)


def record_attempt(store: Store, job_seq: int, row: int, num_attempts: int) -> None:
    """Remember durably how often a row was tried, so that a restart does not start over."""
    values = {"job_seq": job_seq, "row": row, "num_attempts": num_attempts}
    with store.write() as connection:
        _upsert(connection, attempts, values, {"num_attempts": num_attempts})


def attempts_so_far(store: Store, job_seq: int) -> dict[int, int]:
    """Rows of a job that were retried, with how often they were tried."""
    query = select(attempts.c.row, attempts.c.num_attempts).where(attempts.c.job_seq == job_seq)
    with store.read() as connection:
        return {row: tried for row, tried in connection.execute(query)}


def record_engine_death(store: Store, job_seq: int, rows: Sequence[int]) -> None:
    """Count one engine death against each of the rows that were in flight on it."""
    if not rows:
        return
    with store.write() as connection:
        for row in rows:
            values = {"job_seq": job_seq, "row": row, "num_engine_deaths": 1}
            more = {"num_engine_deaths": suspects.c.num_engine_deaths + 1}
            _upsert(connection, suspects, values, more)


def engine_deaths(store: Store, job_seq: int) -> dict[int, int]:
    """Rows of a job that were in flight when an engine died, with how often."""
    query = select(suspects.c.row, suspects.c.num_engine_deaths)
    with store.read() as connection:
        found = connection.execute(query.where(suspects.c.job_seq == job_seq))
        return {row: deaths for row, deaths in found}


def _result_values(seq: int, outcome: Outcome, now_s: float) -> dict[str, object]:
    return {
        "job_seq": seq,
        "row": outcome.row,
        "ok": int(outcome.kind is OutcomeKind.OK),
        "attempts": outcome.attempt,
        "finish_reason": outcome.finish_reason,
        "num_prompt_tokens": outcome.usage.num_prompt_tokens,
        "num_output_tokens": outcome.usage.num_output_tokens,
        "num_cached_tokens": outcome.usage.num_cached_tokens,
        "duration_s": outcome.duration_s,
        "committed_at": now_s,
    }


def _content(outcome: Outcome) -> bytes:
    if outcome.kind is OutcomeKind.OK:
        assert outcome.body is not None
        return outcome.body
    assert outcome.error is not None
    error = outcome.error
    fields = {"code": error.code, "message": error.message, "status_code": error.status_code}
    return json.dumps(fields).encode()


def _terminal_seqs(connection: Connection, seqs: set[int]) -> set[int]:
    terminal = [str(state) for state in TERMINAL_JOB_STATES]
    query = select(jobs.c.seq).where(jobs.c.seq.in_(seqs), jobs.c.state.in_(terminal))
    return set(connection.execute(query).scalars())


def _num_known(
    connection: Connection, entries: Sequence[dict[str, object]], live: Sequence[int]
) -> int:
    """How many of the live entries already have a result."""
    rows_of: dict[object, list[object]] = {}
    for i in live:
        rows_of.setdefault(entries[i]["job_seq"], []).append(entries[i]["row"])
    query = select(func.count()).where(
        results.c.job_seq == bindparam("seq"), results.c.row.in_(bindparam("rows", expanding=True))
    )
    found = 0
    for seq, rows in rows_of.items():
        found += connection.execute(query, {"seq": seq, "rows": rows}).scalar_one()
    return found


def _insert_new(
    connection: Connection, table: Table, values: Sequence[Mapping[str, object]]
) -> None:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(dialect.insert(table).on_conflict_do_nothing(), list(values))


def _upsert(
    connection: Connection,
    table: Table,
    values: Mapping[str, object],
    changes: Mapping[str, object],
) -> None:
    changed = connection.execute(
        update(table)
        .where(table.c.job_seq == values["job_seq"], table.c.row == values["row"])
        .values(**changes)
    )
    if changed.rowcount == 0:
        _insert_new(connection, table, [values])


def _page(
    store: Store,
    job_seq: int,
    after: int,
    size: int,
    *,
    failed_only: bool,
) -> Sequence[tuple[int, int, str | None, int, int, int, int, bytes]]:
    columns = (
        results.c.row,
        results.c.attempts,
        results.c.finish_reason,
        results.c.num_prompt_tokens,
        results.c.num_output_tokens,
        results.c.num_cached_tokens,
        results.c.ok,
        bodies.c.content,
    )
    same_row = (results.c.job_seq == bodies.c.job_seq) & (results.c.row == bodies.c.row)
    query = select(*columns).join(bodies, same_row).where(results.c.job_seq == job_seq)
    query = query.where(results.c.row > after).order_by(results.c.row).limit(size)
    if failed_only:
        query = query.where(results.c.ok == 0)
    with store.read() as connection:
        return [tuple(row) for row in connection.execute(query)]
