"""What holds on PostgreSQL alone: its locks, lost connections, first opens, and messages."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from commit_relay import commit_relay
from postgres_server import END_LOCK_SESSION, PASSWORD, QUOTED_PASSWORD, PostgresServer
from store_builders import answered, execute, select

from batchrun.errors import StoreError, StoreLockedError, StoreUnreachableError
from batchrun.store import jobs, results
from batchrun.store.check import check_store
from batchrun.store.database import Store, open_store, open_to_read
from batchrun.store.jobs import NewJob
from batchrun.store.place import DaemonLock
from batchrun.store.retention import is_shrinkable, unused_bytes, write_snapshot
from batchrun.types import JobState, Usage

JOB = NewJob("name", "{}", "{}", "hash", 3)
HOLDS_LOCK = """
import sys
from batchrun.store.place import DaemonLock; from batchrun.store.database import open_store

with DaemonLock(open_store(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
WITHOUT_DRIVER = """
import sys
sys.modules["psycopg"] = None
from batchrun.errors import StoreError
from batchrun.store.database import open_store
try:
    open_store("postgresql://u:p@127.0.0.1/none")
except StoreError as error:
    print(error)
"""


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """A new store's URL."""
    return postgres.new_store()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A new store on PostgreSQL alone."""
    opened = open_store(url)
    yield opened
    opened.close()


def test_a_database_is_known_by_every_name_and_is_no_other(
    postgres: PostgresServer, store: Store, url: str
) -> None:
    again = open_store(url.replace("127.0.0.1", "localhost"))
    other = open_store(postgres.new_store())

    assert again.name != store.name
    assert again.identity() == store.identity() != other.identity()
    again.close()
    other.close()


def test_first_opens_at_the_same_time_make_one_store(postgres: PostgresServer) -> None:
    url = postgres.new_database()

    with ThreadPoolExecutor(4) as threads:
        for opened in threads.map(open_store, [url] * 4):
            assert list(check_store(opened)) == []
            opened.close()

    assert select(url, "SELECT count(*) FROM alembic_version") == [(1,)]


def test_the_migrated_schema_is_that_of_the_tables(postgres: PostgresServer, url: str) -> None:
    from sqlalchemy import create_engine

    from batchrun.store.schema import metadata

    direct = postgres.new_database()
    engine = create_engine(direct.replace("postgresql:", "postgresql+psycopg:"))
    metadata.create_all(engine)
    engine.dispose()

    assert _columns(url) == _columns(direct)


def _columns(url: str) -> list[tuple[object, ...]]:
    return select(
        url,
        "SELECT table_name, column_name, data_type, is_nullable, character_maximum_length"
        " FROM information_schema.columns WHERE table_schema = 'public'"
        " AND table_name <> 'alembic_version' ORDER BY table_name, column_name",
    )


def test_a_database_with_other_tables_is_refused(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    execute(url, "CREATE TABLE other (x int)")

    with pytest.raises(StoreError, match="holds other tables; not a batchrun store"):
        open_store(url)


def test_a_database_of_another_encoding_is_refused(postgres: PostgresServer) -> None:
    url = postgres.new_database(more="ENCODING 'LATIN1' TEMPLATE template0")

    with pytest.raises(StoreError, match="is in LATIN1; make it with ENCODING 'UTF8'"):
        open_store(url)


def test_an_upgrade_waits_until_no_daemon_runs(url: str, store: Store) -> None:
    with DaemonLock(store):
        execute(url, "DROP TABLE " + ", ".join(_tables(url)))
        with pytest.raises(StoreLockedError, match="a daemon works on it"):
            open_store(url)

    open_store(url).close()


def _tables(url: str) -> list[str]:
    query = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    return [name for (name,) in select(url, query)]


def test_a_second_daemon_is_kept_off_until_the_first_is_gone(url: str, store: Store) -> None:
    command = [sys.executable, "-c", HOLDS_LOCK, url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as held:
        assert held.stdout is not None and held.stdout.readline() == "held\n"
        with pytest.raises(StoreLockedError, match="another daemon works on it"):
            DaemonLock(store).acquire()

        held.send_signal(signal.SIGKILL)
        held.wait()

    with DaemonLock(store, wait_s=30.0) as lock:
        lock.check()


def test_who_stands_by_does_not_lead_on_a_store_that_a_newer_batchrun_upgraded(
    url: str, store: Store
) -> None:
    execute(url, "UPDATE alembic_version SET version_num = '9999'")

    for _ in range(2):  # The lock is given back.
        with pytest.raises(StoreError, match="a newer batchrun has upgraded it; end this daemon"):
            DaemonLock(store).take()


def test_a_lost_lock_is_taken_again(url: str, store: Store) -> None:
    with DaemonLock(store) as lock:
        assert select(url, END_LOCK_SESSION) == [(True,)]

        lock.check()

        with pytest.raises(StoreLockedError):
            DaemonLock(store).acquire()


def test_a_lock_lost_with_its_server_is_taken_again_with_it(
    postgres: PostgresServer, store: Store
) -> None:
    with DaemonLock(store) as lock:
        postgres.stop("immediate")
        for _ in range(2):
            with pytest.raises(StoreUnreachableError, match="cannot be reached"):
                lock.check()
        postgres.start()

        lock.check()

        with pytest.raises(StoreLockedError):
            DaemonLock(store).acquire()


def test_a_lost_lock_that_another_daemon_took_ends_the_first(url: str, store: Store) -> None:
    with DaemonLock(store) as lock:
        assert select(url, END_LOCK_SESSION) == [(True,)]

        with DaemonLock(store), pytest.raises(StoreLockedError, match="another daemon"):
            lock.check()


@pytest.mark.parametrize("delivers", [True, False])
def test_a_transition_cut_off_in_its_commit_ends_one_way_or_the_other(
    postgres: PostgresServer, url: str, *, delivers: bool
) -> None:
    with commit_relay(postgres.port) as relay:
        store = open_store(url.replace(f":{postgres.port}/", f":{relay.port}/"))
        job = jobs.create(store, JOB, now_s=0.0)
        relay.delivers, relay.is_armed = delivers, True

        if delivers:
            assert jobs.start(store, job.id, now_s=1.0).state is JobState.RUNNING
        else:
            with pytest.raises(StoreUnreachableError):
                jobs.start(store, job.id, now_s=1.0)

        assert not relay.is_armed
        wanted = JobState.RUNNING if delivers else JobState.VALIDATING
        assert jobs.get(store, job.id).state is wanted
        store.close()


def test_what_an_engine_says_too_much_is_stored_all_the_same(store: Store) -> None:
    seq = jobs.create(store, JOB, now_s=0.0).seq
    outcome = replace(answered(0), finish_reason="stop\0" * 20, usage=Usage(1 << 40, 2, 5))

    assert results.commit(store, [(seq, outcome)], now_s=1.0) == 1
    assert results.count(store, seq).num_prompt_tokens == (1 << 31) - 1


def test_a_reason_with_a_nul_is_stored_without_it(store: Store) -> None:
    job = jobs.create(store, JOB, now_s=0.0)

    assert jobs.pause(store, job.id, "the engine said \0").reason == "the engine said "


def test_a_session_that_only_reads_cannot_write(url: str, store: Store) -> None:
    reader = open_to_read(url)

    with pytest.raises(StoreError, match="read-only transaction"):
        jobs.create(reader, JOB, now_s=0.0)

    assert jobs.list_jobs(store) == jobs.list_jobs(reader) == []
    reader.close()


def test_a_read_is_one_snapshot(store: Store) -> None:
    with store.read() as connection:
        before = connection.exec_driver_sql("SELECT count(*) FROM jobs").scalar()
        jobs.create(store, JOB, now_s=0.0)

        assert connection.exec_driver_sql("SELECT count(*) FROM jobs").scalar() == before == 0


def test_writers_that_read_first_never_lose_a_change(store: Store) -> None:
    seq = jobs.create(store, JOB, now_s=0.0).seq

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: results.record_engine_death(store, seq, [0]), range(40)))

    assert results.engine_deaths(store, seq) == {0: 40}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ((QUOTED_PASSWORD, "wrong%20one"), "cannot be reached .*password authentication failed"),
        (("127.0.0.1", "127.0.0.2"), "cannot be reached .*refused"),
        (("/store_", "/no_store_"), "does not exist"),
    ],
)
def test_a_database_that_cannot_be_opened_is_one_line_without_the_password(
    url: str, change: tuple[str, str], error: str
) -> None:
    with pytest.raises(StoreError, match=error) as raised:
        open_store(url.replace(*change))

    line = str(raised.value)
    assert "\n" not in line
    assert [word for word in (PASSWORD, QUOTED_PASSWORD, "wrong one") if word in line] == []


def test_a_missing_driver_is_one_line() -> None:
    command = [sys.executable, "-c", WITHOUT_DRIVER]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout == (
        "a PostgreSQL store needs its driver: pip install 'batchrun[postgres]'\n"
    )


def test_what_only_a_file_has_is_left_out_or_refused(store: Store, tmp_path: Path) -> None:
    assert (unused_bytes(store), is_shrinkable(store)) == (0, False)

    with pytest.raises(StoreError, match="copy it with `pg_dump`"):
        write_snapshot(store, tmp_path / "backup.db")
