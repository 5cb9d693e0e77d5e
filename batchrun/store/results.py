"""Append-only results: a row is done if and only if it stands here under (job, row).

What is not here is pending, so resuming is a set difference and a crash leaves nothing to repair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from sqlalchemy import Connection, Row, func, select

from batchrun.errors import StateError
from batchrun.failpoints import failpoint
from batchrun.store.database import Store, insert_new, upsert
from batchrun.store.jobs import (
    BATCH_PREFIX,
    CUT_PREFIX,
    ENDED,
    LEAVING,
    Counts,
    JobRecord,
    count_cut_results,
    count_results,
    kept_counts,
    read_setting,
    record_of,
)
from batchrun.store.schema import SAME_ROW, attempts, bodies, jobs, results, suspects
from batchrun.types import Outcome, OutcomeKind, RowError, Usage

COMPRESSION_LEVEL = 3
ROWS_PER_READ, ROWS_PER_FETCH = 2_000, 10_000
BYTES_PER_READ = 8 << 20
"""Of compressed replies."""
KEYS_PER_READ = 500
MAX_BODY_BYTES = 1 << 30
MAX_TOKENS = (1 << 31) - 1
MAX_REASON_CHARS = 32


@dataclass(frozen=True, slots=True)
class StoredResult:
    """One row's end, as committed. `body` is the engine's JSON reply, or None with `error` set."""

    row: int
    body: bytes | None = None
    error: RowError | None = None
    finish_reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    attempts: int = 1


def commit(
    store: Store,
    outcomes: Sequence[tuple[int, Outcome]],
    *,
    now_s: float,
    are_taken_over: bool = False,
) -> int:
    """Append the outcomes (each with its job's seq) in one transaction; returns how many were new.

    A row that already has a result keeps it, and a terminal job takes no more results; of another
    job it takes none over once its output may be written.
    Once this returns, the new results survive any crash.
    """
    # With a checksum, since SQLite has none: a flipped bit in a reply does not go unnoticed.
    compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True)
    # In the order of the key, so that a page is changed once. Equal keys stay in their order.
    ordered = sorted(outcomes, key=lambda entry: (entry[0], entry[1].row))
    index = [_index_row(seq, outcome, now_s) for seq, outcome in ordered]
    contents = [
        (seq, outcome.row, compressor.compress(_content(outcome))) for seq, outcome in ordered
    ]
    with store.write() as connection:
        states = (*ENDED, *LEAVING) if are_taken_over else ENDED
        closed = _seqs_in(connection, {seq for seq, _ in outcomes}, states)
        if closed:
            index = [entry for entry in index if entry[0] not in closed]
            contents = [entry for entry in contents if entry[0] not in closed]
        num_new = insert_new(connection, results, index)
        failpoint("store.results.between")
        insert_new(connection, bodies, contents)
        return num_new


def done_rows(store: Store, job_seq: int, since_s: float = 0.0) -> npt.NDArray[np.int64]:
    """The rows of a job that have a result, committed from an instant on, ascending."""
    is_wanted = (results.c.job_seq == job_seq) & (results.c.committed_at >= since_s)
    query = select(results.c.row).where(is_wanted).order_by(results.c.row)
    query = query.execution_options(yield_per=ROWS_PER_FETCH)
    with store.read() as connection, connection.execute(query) as found:
        return np.fromiter(found.scalars(), dtype=np.int64)


def count(store: Store, job_seq: int) -> Counts:
    """Ended rows and tokens of a job; those of a job that has ended stay when its results go."""
    with store.read() as connection:
        return kept_counts(connection, job_seq) or count_results(connection, job_seq)


def count_cut(store: Store, record: JobRecord) -> int:
    """How many answers of a job ended at the most tokens that they might have."""
    kept = read_setting(store, CUT_PREFIX + record.id, None)
    if isinstance(kept, int):
        return kept
    with store.read() as connection:
        return count_cut_results(connection, record.seq)


def count_failed(store: Store, job_seq: int, since_s: float) -> int:
    """How many rows of a job have failed since an instant."""
    query = select(func.count()).where(results.c.job_seq == job_seq, results.c.ok == 0)
    with store.read() as connection:
        return connection.execute(query.where(results.c.committed_at >= since_s)).scalar_one()


def answer_tokens(store: Store, job_seq: int, rows: Sequence[int]) -> list[int]:
    """Output tokens of those of the rows that have an answer, in the order given."""
    found: dict[int, int] = {}
    columns = select(results.c.row, results.c.num_output_tokens)
    with store.read() as connection:
        for start in range(0, len(rows), KEYS_PER_READ):
            some = results.c.row.in_(rows[start : start + KEYS_PER_READ])
            query = columns.where(results.c.job_seq == job_seq, some, results.c.ok == 1)
            found.update((row, num_tokens) for row, num_tokens in connection.execute(query))
    return [found[row] for row in rows if found.get(row)]


def latest_answer_tokens(store: Store, job_seq: int, most: int) -> list[int]:
    """Output tokens of at most so many answers of a job, those of its last rows, in row order."""
    query = select(results.c.num_output_tokens).where(
        results.c.job_seq == job_seq, results.c.ok == 1, results.c.num_output_tokens > 0
    )
    with store.read() as connection:
        found = connection.execute(query.order_by(results.c.row.desc()).limit(most))
        return list(found.scalars())[::-1]


def mean_answer_tokens(store: Store, job_seq: int) -> float | None:
    """Mean output tokens of a job's answers; None where there is none."""
    is_answer = (results.c.job_seq == job_seq) & (results.c.ok == 1)
    query = select(func.avg(results.c.num_output_tokens)).where(is_answer)
    with store.read() as connection:
        mean = connection.execute(query).scalar_one()
    return None if mean is None else float(mean)


def read(
    store: Store,
    job_seq: int,
    *,
    failed_only: bool = False,
    limit: int | None = None,
    since_s: float = 0.0,
) -> Iterator[StoredResult]:
    """Results of a job, those committed since `since_s`, in row order, read in bounded pieces.

    Raises StateError when they were removed.
    """
    refuse_removed(store, job_seq)
    decompressor = zstandard.ZstdDecompressor()
    after, left = -1, limit
    while left is None or left > 0:
        size = ROWS_PER_READ if left is None else min(ROWS_PER_READ, left)
        page = _page(store, job_seq, after, size, since_s, failed_only=failed_only)
        # Of those of the page some may have been removed, and those to come.
        refuse_removed(store, job_seq)
        if not page:
            return
        yield from (_stored(entry, decompressor) for entry in page)
        after = page[-1].row
        left = None if left is None else left - len(page)


def first_answer(store: Store, job_seq: int) -> StoredResult | None:
    """The result of a job's first row that has an answer."""
    query = select(results, bodies.c.content).join(bodies, SAME_ROW)
    query = query.where(results.c.job_seq == job_seq, results.c.ok == 1)
    with store.read() as connection:
        found = connection.execute(query.order_by(results.c.row).limit(1)).first()
    return None if found is None else _stored(found, zstandard.ZstdDecompressor())


def answering_model(store: Store, job_seq: int) -> str | None:
    """The model that gave a job's answers; None where there is none, or they do not tell."""
    answer = first_answer(store, job_seq)
    if answer is None or answer.body is None:
        return None
    model: str | None = json.loads(answer.body).get("model")
    return model


def read_rows(store: Store, job_seq: int, rows: Sequence[int]) -> list[StoredResult]:
    """The results of those of the rows that have one, in the order given."""
    decompressor = zstandard.ZstdDecompressor()
    found: dict[int, StoredResult] = {}
    query = select(results, bodies.c.content).join(bodies, SAME_ROW)
    query = query.where(results.c.job_seq == job_seq)
    for start in range(0, len(rows), KEYS_PER_READ):
        some = query.where(results.c.row.in_(rows[start : start + KEYS_PER_READ]))
        with store.read() as connection:
            entries = connection.execute(some).all()
        found.update((entry.row, _stored(entry, decompressor)) for entry in entries)
    return [found[row] for row in rows if row in found]


def record_attempt(store: Store, job_seq: int, row: int, num_attempts: int) -> None:
    """Remember durably how often a row was tried, so that a restart does not start over."""
    key = {"job_seq": job_seq, "row": row}
    with store.write() as connection:
        upsert(connection, attempts, key, {"num_attempts": num_attempts})


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
            key, first = {"job_seq": job_seq, "row": row}, {"num_engine_deaths": 1}
            more = {"num_engine_deaths": suspects.c.num_engine_deaths + 1}
            upsert(connection, suspects, key, first, changes=more)


def engine_deaths(store: Store, job_seq: int) -> dict[int, int]:
    """Rows of a job that were in flight when an engine died, with how often."""
    query = select(suspects.c.row, suspects.c.num_engine_deaths)
    with store.read() as connection:
        found = connection.execute(query.where(suspects.c.job_seq == job_seq))
        return {row: deaths for row, deaths in found}


def _index_row(seq: int, outcome: Outcome, now_s: float) -> tuple[object, ...]:
    """The values of `results`, in the order of its columns.

    An engine may say anything; what PostgreSQL's columns do not hold would be refused for ever.
    """
    usage, reason = outcome.usage, outcome.finish_reason
    return (
        seq,
        outcome.row,
        int(outcome.kind is OutcomeKind.OK),
        outcome.attempt,
        None if reason is None else reason.replace("\0", "")[:MAX_REASON_CHARS],
        min(int(usage.num_prompt_tokens), MAX_TOKENS),
        min(int(usage.num_output_tokens), MAX_TOKENS),
        min(int(usage.num_cached_tokens), MAX_TOKENS),
        outcome.duration_s,
        now_s,
    )


def _content(outcome: Outcome) -> bytes:
    if outcome.kind is OutcomeKind.OK:
        assert outcome.body is not None
        return outcome.body
    assert outcome.error is not None
    return json.dumps(asdict(outcome.error)).encode()


def _seqs_in(connection: Connection, seqs: set[int], states: Collection[str]) -> set[int]:
    query = select(jobs.c.seq).where(jobs.c.seq.in_(seqs), jobs.c.state.in_(states))
    return set(connection.execute(query).scalars())


def refuse_removed(store: Store, job_seq: int) -> None:
    """Raises StateError when the job's results were removed."""
    query = select(jobs.c.id, jobs.c.results_removed_at).where(jobs.c.seq == job_seq)
    with store.read() as connection:
        found = connection.execute(query).first()
    if found is not None and found.results_removed_at is not None:
        day = datetime.fromtimestamp(found.results_removed_at, UTC).date()
        raise StateError(f"{found.id}: its results were removed on {day} by `batchrun gc`")


def refuse_replaced(store: Store, record: JobRecord) -> None:
    """Raises StateError when a job that ended later has its output in the place of this one's."""
    is_later = jobs.c.finished_at > (record.finished_at or 0.0)
    # Specs are long: only those are read that hold the longest part that JSON never escapes.
    part = max(re.split(r"[^ !#-\[\]-~]", record.output_path), key=len)
    may_be = jobs.c.spec.contains(part, autoescape=True)
    is_job = ~jobs.c.id.startswith(BATCH_PREFIX, autoescape=True)
    query = select(jobs).where(is_later, may_be, is_job)
    with store.read() as connection:
        later = map(record_of, connection.execute(query.order_by(jobs.c.finished_at.desc())))
        for other in later:
            if other.has_output and other.output_path == record.output_path:
                raise StateError(
                    f"{record.output_path} is where {other.id} wrote its output later; "
                    f"`batchrun results {record.id} -o OTHER` writes this job's again"
                )


def _stored(entry: Row[Any], decompressor: zstandard.ZstdDecompressor) -> StoredResult:
    body = error = None
    try:
        plain = decompressor.decompress(entry.content, max_output_size=MAX_BODY_BYTES)
        body, error = (plain, None) if entry.ok else (None, RowError(**json.loads(plain)))
    except (zstandard.ZstdError, ValueError, TypeError) as damage:
        error = RowError("result_damaged", f"the store's copy cannot be read: {damage}")
    return StoredResult(
        entry.row,
        body,
        error,
        entry.finish_reason,
        Usage(entry.num_prompt_tokens, entry.num_output_tokens, entry.num_cached_tokens),
        entry.attempts,
    )


def _page(
    store: Store, job_seq: int, after: int, size: int, since_s: float, *, failed_only: bool
) -> Sequence[Row[Any]]:
    """Up to `size` results, and no more than hold `BYTES_PER_READ`, but for a single one."""
    wanted = (results.c.job_seq == job_seq) & (results.c.row > after)
    if since_s > 0.0:
        wanted &= results.c.committed_at >= since_s
    if failed_only:
        wanted &= results.c.ok == 0
    pairs = results.join(bodies, SAME_ROW)
    lengths = select(results.c.row, func.length(bodies.c.content)).select_from(pairs)
    found = select(results, bodies.c.content).select_from(pairs).where(wanted)
    with store.read() as connection:
        last, num_bytes = after, 0
        sizes = connection.execute(lengths.where(wanted).order_by(results.c.row).limit(size))
        for row, length in sizes.all():
            num_bytes += length
            if num_bytes > BYTES_PER_READ and last != after:
                break
            last = row
        found = found.where(results.c.row <= last).order_by(results.c.row)
        return connection.execute(found).all()
