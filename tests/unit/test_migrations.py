"""A store of every released schema comes up to this one, whole, or stays what it was."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from store_builders import DUMPS, execute, load_dump, read_tables, select

from batchrun.errors import StoreError, StoreLockedError
from batchrun.files import StoreLock
from batchrun.store import database, jobs, results
from batchrun.store.check import check_store
from batchrun.store.database import open_store, open_to_read
from batchrun.store.jobs import Counts
from batchrun.store.schema import HEAD, REVISIONS

KILLED_AT = """
import os, signal, sys
from sqlalchemy import Engine, event
from batchrun.store.database import open_store

seen = 0

@event.listens_for(Engine, "after_cursor_execute")
def count(connection, cursor, statement, *rest):
    global seen
    seen += statement.startswith(("ALTER", "UPDATE"))
    if seen == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

open_store(sys.argv[1])
"""
HOLDS_LOCK = """
import sys
from pathlib import Path
from batchrun.files import StoreLock

with StoreLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def test_there_is_a_dump_of_every_schema() -> None:
    assert tuple(sorted(path.stem for path in DUMPS.glob("*.sql"))) == REVISIONS


@pytest.mark.parametrize("revision", REVISIONS)
def test_an_upgraded_store_has_every_row_and_is_sound(tmp_path: Path, revision: str) -> None:
    path = load_dump(tmp_path / "store.db", revision)
    before = read_tables(path)

    store = open_store(path)
    after = read_tables(path)

    assert [str(violation) for violation in check_store(store)] == []
    store.close()
    for table, rows in before.items():
        kept = [
            {name: row[name] for name in old} for row, old in zip(after[table], rows, strict=True)
        ]
        assert kept == rows


@pytest.mark.parametrize("revision", REVISIONS)
def test_jobs_and_results_of_an_upgraded_store_read_as_they_were_written(
    tmp_path: Path, revision: str
) -> None:
    store = open_store(load_dump(tmp_path / "store.db", revision))

    job = jobs.get(store, "job_0000000001")
    first, second, third = results.read(store, job.seq)

    assert job.counts == results.count(store, job.seq) == Counts(2, 1, 21, 4, 10)
    assert first.body is not None and "grün" in first.body.decode("unicode-escape")
    assert second.body is not None and b"blue" in second.body
    assert third.error is not None and third.error.message == "the prompt is too long — é"
    assert {str(record.state) for record in jobs.list_jobs(store)} == {
        "completed", "cancelled", "running", "paused", "failed", "expired", "validating",
        "finalizing",
    }  # fmt: skip
    store.close()


@pytest.mark.parametrize("revision", ["0003", "0004", "0005", "0006"])
def test_an_upgrade_counts_what_batches_store_and_ends_their_removals(
    tmp_path: Path, revision: str
) -> None:
    """A removal used to leave the metadata and the errors of a batch."""
    path = load_dump(tmp_path / "store.db", revision)
    execute(
        path,
        "UPDATE jobs SET results_removed_at = 9000 WHERE seq = 10",
        "UPDATE batches SET metadata = '{}' WHERE job_seq = 10",
    )

    store = open_store(path)

    assert [str(violation) for violation in check_store(store)] == []
    store.close()
    kept = select(path, "SELECT metadata, errors, record_bytes FROM batches ORDER BY job_seq")
    metadata = r'{"team": "eval \u00e9"}'
    assert kept == [(metadata, None, len(metadata)), (None, None, None), (None, None, 0)]


@pytest.mark.parametrize("statement", range(1, 8))
def test_a_kill_in_the_middle_of_an_upgrade_leaves_the_old_schema(
    tmp_path: Path, statement: int
) -> None:
    path = load_dump(tmp_path / "store.db", "0001")
    before = dump(path)

    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT, str(path), str(statement)], check=False, timeout=60
    )

    assert killed.returncode == -signal.SIGKILL
    assert dump(path) == before
    store = open_store(path)
    assert [str(violation) for violation in check_store(store)] == []
    store.close()


def test_an_upgrade_waits_for_whoever_holds_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MIGRATION_WAIT_S", 0.0)
    path = load_dump(tmp_path / "store.db", "0001")
    command = [sys.executable, "-c", HOLDS_LOCK, str(tmp_path / "store.lock")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as held:
        assert held.stdout is not None and held.stdout.readline() == "held\n"

        with pytest.raises(StoreLockedError, match=f"in use by process {held.pid}"):
            open_store(path)

        held.communicate("")
    open_store(path).close()


def test_the_holder_of_the_lock_upgrades_itself(tmp_path: Path) -> None:
    path = load_dump(tmp_path / "store.db", "0001")

    with StoreLock(tmp_path / "store.lock"):
        open_store(path).close()

    assert f"INSERT INTO \"alembic_version\" VALUES('{HEAD}');" in dump(path)


def test_reading_an_old_store_does_not_upgrade_it(tmp_path: Path) -> None:
    path = load_dump(tmp_path / "store.db", "0001")
    before = path.read_bytes()

    store = open_to_read(path)
    found = [str(violation) for violation in check_store(store)]
    store.close()

    assert len(found) == 1
    assert found[0].startswith(f"schema 0001, and this batchrun has {HEAD}")
    assert path.read_bytes() == before


@pytest.mark.parametrize("revision", ["0000", "9999", "something"])
def test_a_store_of_an_unknown_schema_is_refused(tmp_path: Path, revision: str) -> None:
    path = load_dump(tmp_path / "store.db", HEAD)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    before = dump(path)

    with pytest.raises(StoreError, match=f"schema {revision}, this one knows {HEAD}"):
        open_store(path)

    assert dump(path) == before
