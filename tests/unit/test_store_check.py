"""What a check finds in a store that was tampered with, and that it finds nothing else."""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from store_builders import answered, execute, load_dump, refused

from batchrun.errors import StoreError
from batchrun.store import jobs, results
from batchrun.store.check import check_store
from batchrun.store.database import Store, open_to_read
from batchrun.store.jobs import NewJob
from batchrun.store.schema import HEAD
from batchrun.types import JobState

NOBODY = 65_534
DONE, ENDED, RUNNING, PAUSED, FAILED = (f"job_000000000{seq}" for seq in range(1, 6))

TAMPERED = [
    ("DELETE FROM results WHERE job_seq = 1 AND row = 1", f"{DONE}, row 1: has no result"),
    ("DELETE FROM results WHERE job_seq = 1 AND row = 1", f"{DONE}, row 1: has a reply without"),
    ("DELETE FROM results WHERE job_seq = 1 AND row = 1", f"{DONE}: it kept num_completed 2"),
    ("DELETE FROM results WHERE job_seq = 1 AND row = 2", f"{DONE}, row 2: has no result"),
    ("DELETE FROM bodies WHERE job_seq = 3 AND row = 3", f"{RUNNING}, row 3: has a result without"),
    ("UPDATE results SET row = 4 WHERE job_seq = 3 AND ok = 0", f"{RUNNING}, row 4: has a result"),
    ("UPDATE results SET row = -1 WHERE job_seq = 3 AND ok = 0", f"{RUNNING}, row -1: has a"),
    ("UPDATE results SET ok = 2 WHERE job_seq = 3 AND row = 0", f"{RUNNING}, row 0: ok is 2"),
    ("UPDATE results SET ok = 0 WHERE job_seq = 3 AND row = 0", f"{RUNNING}, row 0: its reply"),
    ("UPDATE results SET attempts = -1 WHERE job_seq = 3", f"{RUNNING}, row 3: attempts is -1"),
    ("UPDATE bodies SET content = substr(content, 1, 40)", f"{RUNNING}, row 0: its reply cannot"),
    ("UPDATE results SET job_seq = 99 WHERE job_seq = 2", "row 4: results: 1 rows of job number"),
    ("UPDATE bodies SET job_seq = 99 WHERE job_seq = 2", "row 4: bodies: 1 rows of job number 99"),
    ("UPDATE attempts SET job_seq = 99", "row 1: attempts: 1 rows of job number 99"),
    ("UPDATE suspects SET job_seq = 99", "row 1: suspects: 2 rows of job number 99"),
    ("UPDATE attempts SET num_attempts = 0", f"{RUNNING}, row 1: num_attempts is 0"),
    ("UPDATE suspects SET row = 9 WHERE row = 2", f"{RUNNING}, row 9: has num_engine_deaths"),
    ("UPDATE jobs SET num_failed = 0 WHERE seq = 1", f"{DONE}: it kept num_completed 2"),
    ("UPDATE jobs SET num_failed = NULL WHERE seq = 1", f"{DONE}: completed, and its counts"),
    ("UPDATE jobs SET num_failed = 0 WHERE seq = 3", f"{RUNNING}: running, and its counts"),
    ("UPDATE jobs SET state = 'done' WHERE seq = 3", f"{RUNNING}: state 'done' is none"),
    ("UPDATE jobs SET ends_as = 'expired' WHERE seq = 1", f"{DONE}: completed, and to end as"),
    ("UPDATE jobs SET ends_as = 'completed' WHERE seq = 4", f"{PAUSED}: paused, and to end as"),
    ("UPDATE jobs SET finished_at = NULL WHERE seq = 2", f"{ENDED}: cancelled, and finished at"),
    ("UPDATE jobs SET finished_at = 5 WHERE seq = 3", f"{RUNNING}: running, and finished at 5"),
    ("UPDATE jobs SET started_at = NULL WHERE seq = 3", f"{RUNNING}: running, and never started"),
    ("UPDATE jobs SET num_rows = 0 WHERE seq = 4", f"{PAUSED}: 0 rows"),
    ("UPDATE jobs SET reason = NULL WHERE seq = 4", f"{PAUSED}: paused for no reason"),
    ("UPDATE jobs SET results_removed_at = 5 WHERE seq = 3", f"{RUNNING}: running, and its resu"),
    ("UPDATE results SET job_seq = 5 WHERE job_seq = 2", f"{FAILED}: failed before it ran"),
    ("UPDATE epochs SET epoch = 7 WHERE epoch = 2", "epochs: number 7 was never given out"),
    ("UPDATE epochs SET epoch = -1 WHERE epoch = 1", "epochs: number -1 is not above 0"),
    ("UPDATE alembic_version SET version_num = '0001'", "schema 0001, and this batchrun has"),
]


def check(path: str | Path) -> list[str]:
    store = open_to_read(path)
    try:
        return [str(violation) for violation in check_store(store)]
    finally:
        store.close()


@pytest.mark.parametrize(("statement", "line"), TAMPERED)
def test_what_was_tampered_with_is_named_and_left_as_it_is(
    tmp_path: Path, statement: str, line: str
) -> None:
    path = load_dump(tmp_path / "store.db", HEAD)
    assert check(path) == []
    execute(path, statement)
    before = path.read_bytes()

    found = check(path)

    assert any(violation.startswith(line) for violation in found), found
    assert path.read_bytes() == before


def test_a_flipped_bit_in_a_reply_is_found(tmp_path: Path) -> None:
    path = load_dump(tmp_path / "store.db", HEAD)
    before = path.read_bytes()
    place = before.index(bytes.fromhex("28B52FFD2469C502001246131790296D9CFA64EF77"))
    flipped = bytes([before[place + 18] ^ 1])
    path.write_bytes(before[: place + 18] + flipped + before[place + 19 :])

    assert [re.sub(": .*", "", line) for line in check(path)] == ["job_0000000008, row 0"]


def test_a_damaged_page_is_found(tmp_path: Path) -> None:
    path = load_dump(tmp_path / "store.db", HEAD)
    execute(path, "PRAGMA writable_schema=ON", "UPDATE sqlite_master SET rootpage = 3 WHERE "
            "name = 'ix_jobs_state'")  # fmt: skip

    found = check(path)

    assert found != []
    assert all(line.startswith("the file is damaged: ") for line in found)


def test_a_job_whose_results_were_removed_is_sound(tmp_path: Path) -> None:
    path = load_dump(tmp_path / "store.db", HEAD)
    execute(
        path,
        "UPDATE jobs SET results_removed_at = 5 WHERE seq = 1",
        "DELETE FROM results WHERE job_seq = 1 AND row = 1",
    )

    assert check(path) == []


def test_a_check_reads_beside_a_writer_that_has_not_committed(
    store: Store, store_location: str | Path
) -> None:
    job = jobs.create(store, NewJob("name", "{}", "{}", "hash", 2), now_s=0.0)
    jobs.start(store, job.id, now_s=1.0)
    results.commit(store, [(job.seq, answered(0))], now_s=2.0)

    with store.write() as connection:
        connection.exec_driver_sql("DELETE FROM bodies")
        found = check(store_location)

    assert found == []


def test_a_job_that_walked_through_its_states_is_sound(
    store: Store, store_location: str | Path
) -> None:
    job = jobs.create(store, NewJob("name", "{}", "{}", "hash", 3), now_s=0.0)
    jobs.pause(store, job.id, "wait")
    jobs.resume(store, job.id, now_s=0.5)
    jobs.start(store, job.id, now_s=1.0)
    outcomes = [(job.seq, answered(2)), (job.seq, refused(0)), (job.seq, answered(1))]
    results.commit(store, outcomes, now_s=2.0)
    jobs.begin_finalizing(store, job.id, JobState.COMPLETED, now_s=1.5)
    assert check(store_location) == []

    jobs.finish(store, job.id, now_s=3.0)

    assert check(store_location) == []


def check_as_nobody(path: Path, found: Connection) -> None:
    if os.getuid() == 0:
        os.setuid(NOBODY)
    found.send(check(path))


def test_a_store_in_a_folder_that_cannot_be_written_is_read_all_the_same() -> None:
    # Not in tmp_path, whose parents are open to their owner alone.
    with tempfile.TemporaryDirectory() as folder:
        path = load_dump(Path(folder) / "store.db", HEAD)
        execute(path, "PRAGMA journal_mode=WAL")
        Path(folder).chmod(0o555)
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(
            target=check_as_nobody, args=(path, theirs)
        )
        child.start()

        assert ours.recv() == []

        child.join()
        assert [entry.name for entry in Path(folder).iterdir()] == ["store.db"]
        Path(folder).chmod(0o755)


@pytest.mark.parametrize("content", [b"no store at all" * 100, b"", None])
def test_what_is_no_store_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "store.db"
    if content is not None:
        path.write_bytes(content)

    if content == b"":
        assert check(path)[0].startswith("schema missing")
    else:
        with pytest.raises(StoreError, match=r"not a batchrun store|no such store"):
            check(path)
