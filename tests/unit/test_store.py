"""The store: transitions, append-only results, and what survives."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from store_builders import answered, execute, fail_job, refused

from batchrun.errors import StateError, StoreError, StoreLockedError, UnknownJobError
from batchrun.files import StoreLock
from batchrun.store import jobs, results
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import Counts, NewJob
from batchrun.store.sqlite import NETWORK_FILE_SYSTEMS, refuse_network_file_system
from batchrun.types import JobState, RowError


def new_job(name: str = "loogle", *, num_rows: int = 3) -> NewJob:
    return NewJob(name=name, spec="{}", pin="{}", content_hash="c0ffee", num_rows=num_rows)


def test_a_created_job_is_there_after_reopening(store_location: str | Path) -> None:
    first = open_store(store_location)
    created = jobs.create(first, new_job(), now_s=5.0)
    first.close()

    again = open_store(store_location)

    assert jobs.get(again, created.id) == created
    assert created.state is JobState.VALIDATING
    again.close()


def test_a_job_handed_over_twice_is_there_once(store: Store) -> None:
    job = new_job()

    first, second = jobs.create(store, job, now_s=1.0), jobs.create(store, job, now_s=2.0)

    assert first == second
    assert jobs.list_jobs(store) == [first]


def test_a_job_walks_from_validating_to_completed(store: Store) -> None:
    job = jobs.create(store, new_job(), now_s=1.0)

    jobs.start(store, job.id, now_s=2.0)
    jobs.begin_finalizing(store, job.id, JobState.COMPLETED, now_s=2.5)
    ended = jobs.finish(store, job.id, now_s=3.0)

    assert (ended.state, ended.started_at, ended.finished_at) == (JobState.COMPLETED, 2.0, 3.0)


def test_a_job_does_not_end_with_an_output_that_was_written_before_it_went_on(
    store: Store,
) -> None:
    job = jobs.create(store, new_job(), now_s=1.0)
    jobs.start(store, job.id, now_s=2.0)
    expired = jobs.begin_finalizing(store, job.id, JobState.EXPIRED, now_s=2.5)
    jobs.pause(store, job.id, "by the user")
    jobs.resume(store, job.id, now_s=2.6)
    complete = jobs.begin_finalizing(store, job.id, JobState.COMPLETED, now_s=3.0)

    with pytest.raises(StateError, match="went on while its output was written"):
        jobs.finish(store, job.id, now_s=3.5, exported=expired)
    ended = jobs.finish(store, job.id, now_s=4.0, exported=complete)

    assert (ended.state, ended.finished_at) == (JobState.COMPLETED, 4.0)


def test_a_job_is_counted_before_others_have_to_wait(tmp_path: Path) -> None:
    """Also what comes between the two counts."""
    store, other = (open_store(tmp_path / "store.db") for _ in range(2))
    asked: list[str] = []
    late: list[int] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)
        if statement == "BEGIN IMMEDIATE" and late:
            results.commit(other, [(job.seq, answered(late.pop(), "yes"))], now_s=3.0)

    event.listen(store.engine, "before_cursor_execute", note)
    for is_late in (False, True):
        job = jobs.create(store, new_job(), now_s=1.0)
        results.commit(store, [(job.seq, answered(0)), (job.seq, refused(1))], now_s=2.0)
        jobs.request_cancel(store, job.id, now_s=2.5)
        asked, late = [], [2] * is_late
        counts = jobs.finish(store, job.id, now_s=4.0).counts
        assert counts is not None and counts.num_done == 2 + is_late
        in_the_lock = asked[asked.index("BEGIN IMMEDIATE") :]
        assert any("sum(" in statement for statement in in_the_lock) == is_late
    store.close()
    other.close()


def test_a_job_whose_output_may_be_written_takes_no_row_over_from_another(store: Store) -> None:
    job = jobs.create(store, new_job(), now_s=1.0)

    def take_over(row: int) -> int:
        outcome = job.seq, answered(row, "yes")
        return results.commit(store, [outcome], now_s=2.0, are_taken_over=True)

    assert take_over(0) == 1
    jobs.request_cancel(store, job.id, now_s=3.0)
    assert take_over(1) == 0
    assert results.commit(store, [(job.seq, answered(1, "yes"))], now_s=2.0) == 1


def test_the_first_answer_is_found_behind_any_number_of_failures(store: Store) -> None:
    job = jobs.create(store, new_job(), now_s=1.0)
    assert results.first_answer(store, job.seq) is None

    results.commit(store, [(job.seq, refused(row)) for row in range(70)], now_s=2.0)
    results.commit(store, [(job.seq, answered(80, "yes"))], now_s=2.0)

    found = results.first_answer(store, job.seq)
    assert found is not None and found.row == 80 and found.body is not None


def test_a_paused_job_resumes_where_it_was(store: Store) -> None:
    early = jobs.create(store, new_job(), now_s=1.0)
    late = jobs.create(store, new_job(), now_s=1.0)
    jobs.start(store, late.id, now_s=2.0)
    for job in (early, late):
        assert jobs.pause(store, job.id, "by the user").reason == "by the user"

    assert jobs.resume(store, early.id, now_s=3.0).state is JobState.VALIDATING
    resumed = jobs.resume(store, late.id, now_s=3.0)
    assert (resumed.state, resumed.reason) == (JobState.RUNNING, None)


@pytest.mark.parametrize("move", ["start", "pause", "resume", "cancel", "finish", "finalize"])
def test_a_terminal_job_never_changes(store: Store, move: str) -> None:
    job = jobs.create(store, new_job(), now_s=1.0)
    ended = fail_job(store, job.id, "no rows", now_s=2.0)
    moves = {
        "start": lambda: jobs.start(store, job.id, now_s=3.0),
        "pause": lambda: jobs.pause(store, job.id, "x"),
        "resume": lambda: jobs.resume(store, job.id, now_s=2.6),
        "cancel": lambda: jobs.request_cancel(store, job.id, now_s=2.5),
        "finish": lambda: jobs.finish(store, job.id, now_s=3.0),
        "finalize": lambda: jobs.begin_finalizing(store, job.id, JobState.COMPLETED, now_s=2.5),
    }

    with pytest.raises(StateError):
        moves[move]()

    assert jobs.get(store, job.id) == ended


def test_a_job_is_found_by_prefix_and_by_name(store: Store) -> None:
    job = jobs.create(store, new_job("nightly"), now_s=1.0)

    assert jobs.get(store, job.id[:8]) == job
    assert jobs.get(store, "nightly") == job
    with pytest.raises(UnknownJobError, match="no such job"):
        jobs.get(store, "job_zzzz")


def test_results_are_read_back_in_row_order(store: Store) -> None:
    job = jobs.create(store, new_job(), now_s=1.0)
    outcomes = [(job.seq, refused(2)), (job.seq, answered(0, "blue"))]

    assert results.commit(store, outcomes, now_s=9.0) == 2

    first, last = results.read(store, job.seq)
    assert (first.row, first.body, first.error) == (0, b"blue", None)
    assert (last.row, last.body, last.error) == (2, None, RowError("bad_request", "too long", 400))
    assert list(results.done_rows(store, job.seq)) == [0, 2]
    assert list(results.done_rows(store, job.seq, since_s=1e9)) == []
    assert results.count(store, job.seq) == Counts(1, 1, 10, 2, 5)


def test_the_first_result_of_a_row_stays(store: Store) -> None:
    job = jobs.create(store, new_job(), now_s=1.0)
    results.commit(store, [(job.seq, answered(0, "first"))], now_s=1.0)

    added = results.commit(
        store, [(job.seq, answered(0, "second")), (job.seq, answered(1))], now_s=2.0
    )

    assert added == 1
    assert next(results.read(store, job.seq)).body == b"first"


def test_a_terminal_job_takes_no_more_results(store: Store) -> None:
    job = jobs.create(store, new_job(), now_s=1.0)
    fail_job(store, job.id, "no rows", now_s=2.0)

    assert results.commit(store, [(job.seq, answered(0))], now_s=3.0) == 0
    assert list(results.done_rows(store, job.seq)) == []


def test_results_are_paged_without_loss(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROWS_PER_READ", 7)
    job = jobs.create(store, new_job(num_rows=50), now_s=1.0)
    outcomes = [(job.seq, refused(i) if i % 3 else answered(i)) for i in range(50)]
    results.commit(store, outcomes, now_s=1.0)

    assert [r.row for r in results.read(store, job.seq)] == list(range(50))
    failed = [r.row for r in results.read(store, job.seq, failed_only=True, limit=10)]
    assert failed == [i for i in range(50) if i % 3][:10]


def test_attempts_and_engine_deaths_add_up(store: Store) -> None:
    job = jobs.create(store, new_job(), now_s=1.0)
    for tried in (1, 2):
        results.record_attempt(store, job.seq, 4, tried)
    results.record_engine_death(store, job.seq, [4, 5])
    results.record_engine_death(store, job.seq, [5])

    assert results.attempts_so_far(store, job.seq) == {4: 2}
    assert results.engine_deaths(store, job.seq) == {4: 1, 5: 2}


def test_epochs_only_grow_and_settings_last(store: Store) -> None:
    first = jobs.begin_epoch(store, pid=1, now_s=1.0)
    assert jobs.begin_epoch(store, pid=2, now_s=0.5) > first
    jobs.write_setting(store, "offline", False)
    jobs.write_setting(store, "offline", True)
    assert jobs.read_setting(store, "offline", None) is True
    assert jobs.read_setting(store, "other", "unset") == "unset"


def test_settings_are_looked_up_by_how_their_keys_begin(store: Store) -> None:
    keys = ["a_b:\U0001f600", "a_b:1", "A_b:2", "axb:3", "a_b", "a_c"]
    jobs.replace_settings(store, [], dict.fromkeys(keys, 0))
    asked: list[tuple[str, Any]] = []
    event.listen(store.engine, "before_cursor_execute", lambda *of: asked.append((of[2], of[3])))

    assert {*jobs.list_settings(store, "a_b:")} == {"\U0001f600", "1"}
    assert {*jobs.list_settings(store, "")} == {*keys}

    if store.is_sqlite:
        (query, values), *_ = (each for each in asked if "settings" in each[0])
        with store.read() as connection:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values).all()
        assert "SEARCH settings USING INDEX" in str(plan)


def test_migrations_and_tables_describe_the_same_schema(tmp_path: Path) -> None:
    from sqlalchemy import create_engine

    from batchrun.store.schema import metadata

    open_store(tmp_path / "migrated.db").close()
    direct = create_engine(f"sqlite:///{tmp_path / 'direct.db'}")
    metadata.create_all(direct)
    direct.dispose()

    assert _described(tmp_path / "migrated.db") == _described(tmp_path / "direct.db")


def _described(path: Path) -> dict[str, list[tuple[object, ...]]]:
    connection = sqlite3.connect(path)
    tables = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' "
        "AND name NOT LIKE 'sqlite%' AND name <> 'alembic_version'"
    ).fetchall()
    found = {
        name: connection.execute(f"PRAGMA table_info({name})").fetchall()
        + sorted(row[2:4] for row in connection.execute(f"PRAGMA index_list({name})"))
        for (name,) in tables
    }
    connection.close()
    return found


def test_a_store_of_a_newer_version_is_refused_and_untouched(store_location: str | Path) -> None:
    open_store(store_location).close()
    execute(store_location, "UPDATE alembic_version SET version_num = '9999'")

    with pytest.raises(StoreError, match="newer batchrun"):
        open_store(store_location)


@pytest.mark.parametrize("content", [b"not a database at all, surely" * 40, None])
def test_another_file_is_not_taken_for_a_store(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "store.db"
    if content is None:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE other (x)")
        connection.close()
    else:
        path.write_bytes(content)

    with pytest.raises(StoreError, match="not a batchrun store"):
        open_store(path)


def test_the_lock_keeps_a_second_holder_out_until_released(tmp_path: Path) -> None:
    first = StoreLock(tmp_path / "lock")
    first.acquire()
    with pytest.raises(StoreLockedError, match="in use by process"):
        StoreLock(tmp_path / "lock").acquire()
    first.release()
    with StoreLock(tmp_path / "lock"):
        pass


@pytest.mark.parametrize(
    ("point", "kind"), [("/", "nfs4"), *(("{}", kind) for kind in sorted(NETWORK_FILE_SYSTEMS))]
)
def test_a_store_on_a_network_file_system_is_refused(tmp_path: Path, point: str, kind: str) -> None:
    folder = tmp_path / "my home"
    place = point.format(str(folder).replace(" ", "\\040"))
    mounts = tmp_path / "mounts"
    mounts.write_text(f"tmpfs /nowhere tmpfs rw 0 0\nserver:/export {place} {kind} rw 0 0\n")

    (tmp_path / "link").symlink_to(folder)
    for home in (folder, tmp_path / "link"):
        with pytest.raises(StoreError, match=rf"on a network file system \({kind}\).*--home"):
            refuse_network_file_system(home, mounts)

    mounts.write_text(f"server:/export /nowhere {kind} rw 0 0\n/dev/sda {place} ext4 rw 0 0\n")
    refuse_network_file_system(folder, mounts)
