"""Files and batches in the store, on SQLite and on PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from store_builders import add_batch, answered, execute, load_dump, refused

from batchrun.errors import StateError
from batchrun.jobs.batch import new_batch_job
from batchrun.server.api.batches import batch_object
from batchrun.store import batches, files, jobs, results
from batchrun.store.batches import BatchError, BatchRecord, NewBatch, ResultFiles, ValidInput
from batchrun.store.check import check_store
from batchrun.store.database import Store
from batchrun.store.files import FilePage, NewFile
from batchrun.store.jobs import Counts, JobRecord
from batchrun.store.schema import HEAD
from batchrun.types import JobState

ENDPOINT = "/v1/chat/completions"
DONE, FAILED, WAITING = (f"batch_{number:032d}" for number in (1, 2, 3))


def make_file(name: str = "in.jsonl", *, expires_after_s: int | None = None) -> NewFile:
    return NewFile(name, "batch", 10, "0" * 64, expires_after_s)


def make_batch(store: Store, *, key: str | None = None, request: str = "r") -> BatchRecord:
    job = new_batch_job(Path("/srv"), ENDPOINT, deadline_s=86_400, weight=1)
    asked = NewBatch("file-1", ENDPOINT, "24h", {"a": "ü\0"}, None, request, key)
    return add_batch(store, asked, job, now_s=100.0)


def start(store: Store, batch: BatchRecord, num_rows: int = 2) -> BatchRecord:
    valid = ValidInput("m", batch.job.spec, batch.job.pin, "h", num_rows, 40)
    return batches.start(store, batch.job.id, valid, now_s=101.0)


def end(store: Store, batch: BatchRecord) -> JobRecord:
    return jobs.begin_finalizing(store, batch.job.id, JobState.COMPLETED, now_s=102.0)


def test_pages_of_files_join_in_either_order(store: Store) -> None:
    made = [files.add(store, make_file(str(number)), now_s=5.0) for number in range(5)]

    page = files.list_page(store, FilePage(2), now_s=6.0)
    rest = files.list_page(store, FilePage(9, after=page[-1]), now_s=6.0)
    upward = files.list_page(store, FilePage(9, newest_first=False), now_s=6.0)

    assert page + rest == made[::-1]
    assert upward == made


def test_a_file_is_gone_when_its_time_is_over(store: Store) -> None:
    made = files.add(store, make_file(expires_after_s=10), now_s=5.0)

    assert files.find(store, made.id, now_s=14.9) == made
    assert files.find(store, made.id, now_s=15.0) is None
    assert files.list_page(store, FilePage(9), now_s=15.0) == []
    assert files.find_expired(store, now_s=15.0) == [made]


def test_a_batch_is_a_job_that_knows_its_rows_when_it_starts(store: Store) -> None:
    made = make_batch(store)
    assert (made.job.state, made.job.num_rows, made.model) == (JobState.VALIDATING, 0, None)
    assert made.metadata == {"a": "ü\0"}

    started = start(store, made)

    assert (started.job.state, started.job.num_rows, started.model) == (JobState.RUNNING, 2, "m")
    assert [batch.job.id for batch in batches.list_page(store, limit=5)] == [made.job.id]
    assert list(check_store(store)) == []


def test_one_key_makes_one_batch(store: Store) -> None:
    first = make_batch(store, key="k" * 64)
    again = make_batch(store, key="k" * 64, request="other")

    assert again == first
    assert len(jobs.list_jobs(store)) == 1


def test_a_batch_that_failed_keeps_its_errors(store: Store) -> None:
    made = make_batch(store)
    errors = [BatchError("invalid_url", "bad \0 url" * 9_999, "url", 3), BatchError("x", "y")]

    failed = batches.fail(store, made.job.id, errors, now_s=103.0)

    assert (failed.job.state, failed.errors) == (JobState.FAILED, tuple(errors))
    assert 10 < len(failed.job.reason or "") < 5_000
    with pytest.raises(StateError):
        start(store, made)


def test_a_batch_ends_together_with_its_files(store: Store) -> None:
    made = start(store, make_batch(store))
    results.commit(store, [(made.job.seq, answered(0)), (made.job.seq, refused(1))], now_s=101.5)
    found = ResultFiles(make_file("out"), make_file("error"), 3)

    done = batches.finish(store, end(store, made), found, now_s=103.0)

    assert (done.job.state, done.job.counts) == (JobState.COMPLETED, Counts(1, 1, 10, 2, 5))
    listed = files.list_page(store, FilePage(5, newest_first=False), now_s=104.0)
    assert [file.id for file in listed] == [done.output_file_id, done.error_file_id]
    assert batch_object(done, Counts(1, 1, 10, 2, 5))["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 5},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 12,
    }
    assert list(check_store(store)) == []


def test_a_batch_that_came_to_end_otherwise_is_not_finished(store: Store) -> None:
    ending = end(store, start(store, make_batch(store)))
    jobs.request_cancel(store, ending.id, now_s=103.0)

    with pytest.raises(StateError):
        batches.finish(store, ending, ResultFiles(make_file(), None, 0), now_s=104.0)

    assert files.list_all(store) == []


STATUSES = [
    ({"state": JobState.VALIDATING}, "validating"),
    ({"state": JobState.PAUSED}, "validating"),
    ({"state": JobState.PAUSED, "started_at": 1.0}, "in_progress"),
    ({"state": JobState.RUNNING, "started_at": 1.0}, "in_progress"),
    ({"state": JobState.FINALIZING, "started_at": 1.0, "ends_as": JobState.COMPLETED},
     "finalizing"),
    ({"state": JobState.FINALIZING, "started_at": 1.0, "ends_as": JobState.EXPIRED},
     "in_progress"),
    ({"state": JobState.FINALIZING, "ends_as": JobState.EXPIRED}, "validating"),
    *(({"state": state}, str(state)) for state in JobState if state.is_terminal),
]  # fmt: skip


@pytest.mark.parametrize(("values", "status"), STATUSES)
def test_every_state_has_a_word_of_openais(
    tmp_path: Path, values: dict[str, object], status: str
) -> None:
    from batchrun.store.database import open_store

    store = open_store(tmp_path / "store.db")
    batch = make_batch(store)
    store.close()

    seen = batch_object(replace(batch, job=replace(batch.job, **values)), Counts())  # type: ignore[arg-type]

    assert seen["status"] == status


TAMPERED = [
    (f"UPDATE jobs SET id = 'job_x' WHERE id = '{DONE}'", "job_x: is a batch"),
    ("DELETE FROM batches WHERE job_seq = 9", f"{DONE}: is called a batch, and is none"),
    ("UPDATE batches SET job_seq = 99 WHERE job_seq = 9", "batches: one of job number 99"),
    ("UPDATE batches SET errors = NULL WHERE job_seq = 10", f"{FAILED}: failed, and its input"),
    ("UPDATE batches SET errors = '[' WHERE job_seq = 10", f"{FAILED}: its errors cannot be read"),
    ("UPDATE batches SET model = 'm' WHERE job_seq = 11", f"{WAITING}: its model is m"),
    ("UPDATE batches SET error_file_id = 'f' WHERE job_seq = 11", f"{WAITING}: validating, and"),
    ("UPDATE files SET seq = 99 WHERE seq = 4", "files: number 99 was never given out"),
]


@pytest.mark.parametrize(("statement", "line"), TAMPERED)
def test_a_batch_that_was_tampered_with_is_named(tmp_path: Path, statement: str, line: str) -> None:
    from batchrun.store.database import open_to_read

    path = load_dump(tmp_path / "store.db", HEAD)
    execute(path, statement)
    store = open_to_read(path)

    found = [str(violation) for violation in check_store(store)]
    store.close()

    assert any(violation.startswith(line) for violation in found), found
