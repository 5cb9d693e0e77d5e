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

A job finalizes `ends_as` completed, failed when every row of it failed, or expired when its
deadline passes (also while it is validating or paused). A terminal job never changes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, or_, select, update

from batchrun.errors import MAX_MESSAGE_CHARS, StateError, UnknownJobError, shortened
from batchrun.store.database import Store, upsert
from batchrun.store.schema import epochs, jobs, results, settings
from batchrun.types import TERMINAL_JOB_STATES, JobState


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
    completed = func.coalesce(func.sum(results.c.ok), 0)
    tokens = (func.coalesce(func.sum(results.c[name]), 0) for name in COUNT_NAMES[2:])
    query = select(completed, func.count() - completed, *tokens)
    return Counts(*connection.execute(query.where(results.c.job_seq == job_seq)).one())


def count_cut_results(connection: Connection, job_seq: int) -> int:
    """How many of a job's answers ended at the most tokens that they might have."""
    query = select(func.count()).where(results.c.job_seq == job_seq, results.c.ok == 1)
    return connection.execute(query.where(results.c.finish_reason == CUT_REASON)).scalar_one()


FinalCounts = tuple[Counts, int]
"""What the results of a job add up to at its end, and how many answers were cut."""


def count_all(store: Store, job_id: str) -> FinalCounts:
    """For the transaction that ends a job: counting millions of rows would keep others waiting."""
    with store.read() as connection:
        return _recount(connection, read_job(connection, job_id), None)


def _recount(connection: Connection, job: JobRecord, known: FinalCounts | None) -> FinalCounts:
    """What is known, unless results have come since: none ever changes."""
    if known is not None:
        num_done = known[0].num_done
        query = select(func.count()).where(results.c.job_seq == job.seq)
        if num_done == job.num_rows or num_done == connection.execute(query).scalar_one():
            return known
    return count_results(connection, job.seq), count_cut_results(connection, job.seq)


def kept_counts(connection: Connection, job_seq: int) -> Counts | None:
    """What a job kept when it ended, or None while it has not."""
    query = select(*(jobs.c[name] for name in COUNT_NAMES)).where(jobs.c.seq == job_seq)
    found = connection.execute(query).first()
    return None if found is None else counts_of(found)


def counts_of(job: Row[Any]) -> Counts | None:
    """The kept counts among a job's columns, or None when there are none."""
    kept = {name: value for name in COUNT_NAMES if (value := getattr(job, name)) is not None}
    return Counts(**kept) if len(kept) == len(COUNT_NAMES) else None


ENDED = [str(state) for state in TERMINAL_JOB_STATES]
LEAVING = [str(JobState.FINALIZING), str(JobState.CANCELLING)]
"""States of jobs whose output is written, or soon will be."""
OPEN = [str(state) for state in JobState if not state.is_terminal]
"""Found by their index, of which `not in` makes no use."""
ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
ID_LENGTH = 10
LEAST_PREFIX_CHARS = 2
"""How much of an id must be given behind its `job_` or `batch_`."""
LEADER_SETTING, LEADER_GATEWAY_SETTING = "leader", "leader gateway"
ENDED_PREFIX = "ended:"
"""With it and a job's id begins the key of the setting that stands until its end was told."""
CUT_PREFIX, RESUMED_PREFIX, ACCEPTED_PREFIX = "num_cut:", "resumed:", "accepted:"
"""And of those of how many of its answers were cut, once it has ended; and of the instants when it
was last resumed, and when another input was last accepted for it."""
CUT_REASON = "length"
"""What engines say of an answer that ended at `max_tokens`."""
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

    @property
    def output_path(self) -> str:
        """Where its output file goes."""
        return str(json.loads(self.spec).get("output", {}).get("path", ""))

    @property
    def has_output(self) -> bool:
        """Whether its output was written. One that was cancelled or has expired can end without,
        and says why then; one that has failed has an output if its rows were run."""
        if self.state is JobState.FAILED:
            return self.finalizing_at is not None
        is_ended = self.state in {JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED}
        return is_ended and self.reason is None


def record_of(row: Row[Any]) -> JobRecord:
    """A job from a row that has all columns of `jobs`."""
    values = {column.name: getattr(row, column.name) for column in jobs.c}
    values["counts"] = counts_of(row)
    for name in COUNT_NAMES:
        del values[name]
    values["state"] = JobState(values["state"])
    values["ends_as"] = None if values["ends_as"] is None else JobState(values["ends_as"])
    return JobRecord(**values)


def insert_job(connection: Connection, job: NewJob, *, now_s: float) -> JobRecord:
    """Add a job in state validating."""
    values = asdict(job)
    deadline_s = values.pop("deadline_s")
    values["expires_at"] = None if deadline_s is None else now_s + deadline_s
    connection.execute(insert(jobs).values(**values, state=JobState.VALIDATING, created_at=now_s))
    return read_job(connection, job.id)


def move_job(
    connection: Connection,
    job_id: str,
    allowed: Sequence[JobState],
    to: JobState,
    counted: FinalCounts | None = None,
    /,
    **values: object,
) -> JobRecord:
    """Move a job that is in one of the states `allowed`, and set columns with it.

    A job that ends keeps its counts from then on, `counted` unless results have come since, and a
    setting says that its end is to be told. A long `reason` is cut.
    Raises UnknownJobError and StateError.
    """
    if to.is_terminal:
        counted = _recount(connection, read_job(connection, job_id), counted)
        values |= asdict(counted[0])
    if isinstance(reason := values.get("reason"), str):
        values["reason"] = shortened(reason, MAX_MESSAGE_CHARS)
    changed = connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.state.in_([str(state) for state in allowed]))
        .values(state=str(to), **{name: _plain(value) for name, value in values.items()})
    )
    record = read_job(connection, job_id)
    if changed.rowcount != 1:
        needed = ", ".join(allowed)
        raise StateError(
            f"{job_id} is {record.state} and cannot become {to} (possible while: {needed})"
        )
    if counted is not None:
        for prefix, value in ((ENDED_PREFIX, "{}"), (CUT_PREFIX, str(counted[1]))):
            upsert(connection, settings, {"key": prefix + job_id}, {"value": value})
    return record


def _plain(value: object) -> object:
    """A value as the columns take it; PostgreSQL has no text with NUL in it."""
    return str(value).replace("\0", "") if isinstance(value, str) else value


def read_job(connection: Connection, job_id: str) -> JobRecord:
    """The job with exactly this id. Raises UnknownJobError."""
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).first()
    if row is None:
        raise UnknownJobError(f"{job_id}: no such job; `batchrun status` lists the jobs")
    return record_of(row)


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


def pause(store: Store, job_id: str, reason: str) -> JobRecord:
    """validating, running or finalizing -> paused, for `reason` (one line)."""
    allowed = (JobState.VALIDATING, JobState.RUNNING, JobState.FINALIZING)
    return _move(store, job_id, allowed, JobState.PAUSED, reason=reason, ends_as=None)


def resume(store: Store, job_id: str, *, now_s: float, pin: str | None = None) -> JobRecord:
    """paused -> running, or back to validating when the job never started.

    `pin` replaces the job's, where its input changed and is accepted as it is now.
    """
    with store.write() as connection:
        started = read_job(connection, job_id).started_at is not None
        target = JobState.RUNNING if started else JobState.VALIDATING
        accepted = {} if pin is None else {"pin": pin}
        for prefix in [RESUMED_PREFIX, ACCEPTED_PREFIX][: 1 + len(accepted)]:
            upsert(connection, settings, {"key": prefix + job_id}, {"value": json.dumps(now_s)})
        return move_job(connection, job_id, (JobState.PAUSED,), target, reason=None, **accepted)


def begin_finalizing(store: Store, job_id: str, ends_as: JobState, *, now_s: float) -> JobRecord:
    """running -> finalizing as completed or failed: no row is pending. Or as expired, paused jobs
    too."""
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


def finish(
    store: Store,
    job_id: str,
    *,
    now_s: float,
    reason: str | None = None,
    exported: JobRecord | None = None,
) -> JobRecord:
    """finalizing -> completed, failed or expired, cancelling -> cancelled: the output file is in
    place, written of the job as it was `exported`: one that went on since has another.

    `reason` says why it is not, where a cancelled job's input is gone, and why a job failed.
    """
    counted = count_all(store, job_id)
    with store.write() as connection:
        now = read_job(connection, job_id)
        ends_as = now.ends_as
        allowed = (JobState.FINALIZING, JobState.CANCELLING)
        if ends_as is None:
            raise StateError(f"{job_id}: not finalizing")
        if exported is not None and any(
            getattr(now, name) != getattr(exported, name) for name in ("state", "ends_as", "pin")
        ):
            raise StateError(f"{job_id}: went on while its output was written")
        ended = {"finished_at": now_s, "reason": reason}
        return move_job(connection, job_id, allowed, ends_as, counted, **ended)


def note_output(store: Store, job_id: str) -> None:
    """The output of a job that has ended without one is in its place after all."""
    with store.write() as connection:
        ended = jobs.c.state.in_([str(JobState.CANCELLED), str(JobState.EXPIRED)])
        connection.execute(update(jobs).where(jobs.c.id == job_id, ended).values(reason=None))


def get(store: Store, job_id: str) -> JobRecord:
    """The job with this id, or the newest of this name, or that with this unique prefix of its id.

    Raises UnknownJobError: no such job, or a prefix that several jobs share.
    """
    with store.read() as connection:
        found = connection.execute(select(jobs).where(jobs.c.id == job_id)).all()
        if not found:
            by_name = select(jobs).where(jobs.c.name == job_id).order_by(jobs.c.seq.desc())
            found = connection.execute(by_name.limit(1)).all()
        if not found and len(job_id.partition("_")[2]) >= LEAST_PREFIX_CHARS:
            begins = jobs.c.id.startswith(job_id, autoescape=True)
            found = connection.execute(select(jobs).where(begins).limit(2)).all()
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


def list_shown(
    store: Store, most_ended: int, also: str | None = None
) -> tuple[list[JobRecord], int]:
    """Every job that has not ended, the newest of those that have, and the one that `get` finds for
    `also`, oldest first; and how many others have ended. Raises UnknownJobError."""
    has_ended = jobs.c.state.in_(ENDED)
    newest = select(jobs.c.seq).where(has_ended).order_by(jobs.c.seq.desc()).limit(most_ended)
    is_shown = or_(~has_ended, jobs.c.seq.in_(newest))
    if also is not None:
        is_shown |= jobs.c.id == get(store, also).id
    with store.read() as connection:
        found = connection.execute(select(jobs).where(is_shown).order_by(jobs.c.seq))
        shown = [record_of(row) for row in found]
        num_ended = connection.execute(select(func.count()).where(has_ended)).scalar_one()
    return shown, num_ended - sum(record.state.is_terminal for record in shown)


def list_newest(store: Store, most: int) -> list[JobRecord]:
    """The jobs submitted last, the newest first."""
    with store.read() as connection:
        found = connection.execute(select(jobs).order_by(jobs.c.seq.desc()).limit(most))
        return [record_of(row) for row in found]


def newest_states(store: Store, most: int) -> dict[int, JobState]:
    """The states of the jobs submitted last, by `seq`, the newest first."""
    query = select(jobs.c.seq, jobs.c.state).order_by(jobs.c.seq.desc()).limit(most)
    with store.read() as connection:
        return {seq: JobState(state) for seq, state in connection.execute(query).all()}


def list_some(store: Store, seqs: Sequence[int]) -> list[JobRecord]:
    """The jobs with these `seq`, oldest first."""
    query = select(jobs).where(jobs.c.seq.in_(seqs)).order_by(jobs.c.seq)
    with store.read() as connection:
        return [record_of(row) for row in connection.execute(query)] if seqs else []


def list_alike(store: Store, *hashes: str) -> list[JobRecord]:
    """The jobs of such content, the newest first, those that have not ended before the others."""
    query = select(jobs).where(jobs.c.content_hash.in_(hashes))
    query = query.order_by(jobs.c.state.in_(ENDED), jobs.c.seq.desc())
    with store.read() as connection:
        return [record_of(row) for row in connection.execute(query)]


@dataclass(frozen=True, slots=True)
class Leader:
    """The daemon that leads on the store, or led last, since which epoch (0: none ever did), and
    where others reach its gateway."""

    name: str
    term: int
    gateway: str = ""


def begin_epoch(store: Store, *, pid: int, now_s: float, name: str = "", gateway: str = "") -> int:
    """Record the start of a daemon of this name, whose gateway others reach at this URL; returns
    its epoch, larger than every earlier one.

    It is the term in which `store` may write from now on.
    """
    with store.write() as connection:
        added = connection.execute(insert(epochs).values(started_at=now_s, pid=pid))
        told = {LEADER_SETTING: name, LEADER_GATEWAY_SETTING: [name, gateway]}
        for key, value in told.items():
            upsert(connection, settings, {"key": key}, {"value": json.dumps(value)})
        (epoch,) = added.inserted_primary_key or (0,)
    store.term = int(epoch)
    return store.term


def read_leader(store: Store) -> Leader:
    """Who leads, as far as the store knows."""
    with store.read() as connection:
        term = connection.execute(select(func.coalesce(func.max(epochs.c.epoch), 0))).scalar_one()
        wanted = settings.c.key.in_([LEADER_SETTING, LEADER_GATEWAY_SETTING])
        rows = connection.execute(select(settings).where(wanted)).all()
    found = {row.key: json.loads(row.value) for row in rows}
    name = found.get(LEADER_SETTING, "")
    its, gateway = found.get(LEADER_GATEWAY_SETTING, ("", ""))
    return Leader(name, int(term), gateway if its == name else "")


def read_setting(store: Store, key: str, default: object) -> object:
    """A durable setting's JSON value, or `default`."""
    with store.read() as connection:
        found = connection.execute(select(settings.c.value).where(settings.c.key == key)).scalar()
    return default if found is None else json.loads(found)


def write_setting(store: Store, key: str, value: object) -> None:
    """Set a durable setting to a JSON value."""
    with store.write() as connection:
        upsert(connection, settings, {"key": key}, {"value": json.dumps(value)})


def list_settings(store: Store, prefix: str) -> dict[str, object]:
    """The durable settings whose keys begin so, by what follows in the key."""
    key, last = settings.c.key, f"{prefix}\U0010ffff"
    # SQLite's index finds keys between two, and none LIKE one; PostgreSQL reads all settings.
    fits = key.between(prefix, last) if store.is_sqlite else key.startswith(prefix, autoescape=True)
    with store.read() as connection:
        found = connection.execute(select(settings).where(fits)).all()
    return {row.key.removeprefix(prefix): json.loads(row.value) for row in found}


def replace_settings(store: Store, removed: Sequence[str], added: Mapping[str, object]) -> None:
    """Remove some durable settings and set others to JSON values, in one transaction."""
    with store.write() as connection:
        for start in range(0, len(removed), SETTINGS_AT_ONCE):
            keys = removed[start : start + SETTINGS_AT_ONCE]
            connection.execute(delete(settings).where(settings.c.key.in_(keys)))
        for key, value in added.items():
            upsert(connection, settings, {"key": key}, {"value": json.dumps(value)})


SETTINGS_AT_ONCE = 500


def _move(
    store: Store, job_id: str, allowed: Sequence[JobState], to: JobState, **values: object
) -> JobRecord:
    with store.write() as connection:
        return move_job(connection, job_id, allowed, to, **values)
