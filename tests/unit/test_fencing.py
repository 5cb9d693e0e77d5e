"""On PostgreSQL a daemon that led once writes nothing more: every way of writing, and its lock."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from postgres_server import END_LOCK_SESSION, PostgresServer
from store_builders import answered, read_tables, select

from batchrun import store as store_folder
from batchrun.errors import NotLeadingError, StoreUnreachableError
from batchrun.jobs.batch import new_batch_job
from batchrun.keys import digest, new_key
from batchrun.store import api_keys, batches, files, jobs, orders, results, retention
from batchrun.store.api_keys import NewApiKey
from batchrun.store.batches import BatchError, NewBatch, ResultFiles, ValidInput, WantedBatch
from batchrun.store.database import Store, open_store
from batchrun.store.files import NewFile
from batchrun.store.jobs import NewJob
from batchrun.store.orders import Order, OrderAnswer
from batchrun.store.place import DaemonLock

ENDPOINT = "/v1/chat/completions"
STOPS_IN_A_WRITE = """
import sys, time
from batchrun.store import jobs
from batchrun.store.place import DaemonLock; from batchrun.store.database import open_store

store = open_store(sys.argv[1])
lock = DaemonLock(store)
lock.acquire()
jobs.begin_epoch(store, pid=1, now_s=0.0, name="stopped")
with store.write() as connection:
    print("writing", flush=True)
    time.sleep(600)
"""


def leading(url: str, name: str) -> tuple[Store, DaemonLock]:
    """A daemon's store and lock, as far as leading goes."""
    store = open_store(url)
    lock = DaemonLock(store, wait_s=30.0)
    lock.acquire()
    jobs.begin_epoch(store, pid=1, now_s=0.0, name=name)
    return store, lock


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """A new store's URL."""
    return postgres.new_store()


def new_job() -> NewJob:
    return NewJob("name", "{}", "{}", "hash", 2)


def new_file() -> NewFile:
    return NewFile("in.jsonl", "batch", 10, "0" * 64, None)


def new_batch() -> WantedBatch:
    asked = NewBatch("file-1", ENDPOINT, "24h", None, None, "r")
    return WantedBatch(asked, new_batch_job(Path("/srv"), ENDPOINT, deadline_s=60, weight=1))


@dataclass
class Fixtures:
    """What the writes are about, made beforehand by whoever led first."""

    store: Store
    job: str = field(init=False)
    ended: str = field(init=False)
    paused: str = field(init=False)
    cancelled: str = field(init=False)
    batch: str = field(init=False)
    lost_batch: str = field(init=False)
    ending_batch: str = field(init=False)
    file: str = field(init=False)
    key: str = field(init=False)
    order: str = field(init=False)
    removal: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        store = self.store
        made_jobs = (jobs.create(store, new_job(), now_s=1.0).id for _ in range(4))
        self.job, self.ended, self.paused, self.cancelled = made_jobs
        jobs.pause(store, self.paused, "by the user")
        for each in (self.ended, self.cancelled):
            jobs.request_cancel(store, each, now_s=2.0)
        jobs.finish(store, self.ended, now_s=3.0, reason="output not written: no disk")
        made = batches.create_all(store, [new_batch() for _ in range(3)], now_s=1.0)
        self.batch, self.lost_batch, self.ending_batch = (each.job.id for each in made)  # type: ignore[union-attr]
        jobs.request_cancel(store, self.ending_batch, now_s=2.0)
        self.file = files.add(store, new_file(), now_s=1.0).id
        self.key = new_key()[0]
        api_keys.add(store, NewApiKey(self.key, "first", "user", digest("x")), now_s=1.0)
        self.order, _ = (orders.give_order(store, Order("POST", "/offline")) for _ in range(2))
        old_answer = orders.ANSWER_PREFIX + "old"
        jobs.write_setting(store, old_answer, {"at_s": 0.0, "content": {}})
        gone = jobs.create(store, NewJob("gone", "{}", "{}", "h", 10_000), now_s=1.0)
        results.commit(store, [(gone.seq, answered(9_000))], now_s=2.0)
        jobs.request_cancel(store, gone.id, now_s=2.0)
        ended = jobs.finish(store, gone.id, now_s=3.0)
        self.removal = retention.remove_results(store, ended, now_s=4.0)
        next(self.removal)

    @property
    def writes(self) -> Mapping[str, Callable[[Store], object]]:
        """By function that opens a write transaction; each changes something where it may."""
        job, batch = self.job, self.batch
        valid = ValidInput("m", "{}", "{}", "h", 2, 40)
        error = BatchError("code", "message")
        return {
            "jobs.create": lambda store: jobs.create(store, new_job(), now_s=1.0),
            "jobs._move": lambda store: jobs.start(store, job, now_s=2.0),
            "results.commit": lambda store: results.commit(store, [(1, answered(0))], now_s=1.0),
            "results.record_attempt": lambda store: results.record_attempt(store, 1, 1, 2),
            "results.record_engine_death": lambda s: results.record_engine_death(s, 1, [1]),
            "jobs.resume": lambda store: jobs.resume(store, self.paused, now_s=2.0),
            "jobs.finish": lambda store: jobs.finish(store, self.cancelled, now_s=5.0),
            "jobs.note_output": lambda store: jobs.note_output(store, self.ended),
            "jobs.write_setting": lambda store: jobs.write_setting(store, "a", 1),
            "jobs.replace_settings": lambda store: jobs.replace_settings(store, ["a"], {"b": 2}),
            "batches.create_all": lambda s: batches.create_all(s, [new_batch()], now_s=1.0),
            "batches.start": lambda store: batches.start(store, batch, valid, now_s=2.0),
            "batches.fail": lambda s: batches.fail(s, self.lost_batch, [error], now_s=2.0),
            "batches.finish": lambda store: batches.finish(
                store, jobs.get(store, self.ending_batch), ResultFiles(None, None, 0), now_s=3.0
            ),
            "files.add": lambda store: files.add(store, new_file(), now_s=1.0),
            "files.remove": lambda store: files.remove(store, self.file),
            "api_keys.add": lambda store: api_keys.add(
                store, NewApiKey(new_key()[0], "second", "user", digest("y")), now_s=1.0
            ),
            "api_keys.change": lambda s: api_keys.change(s, self.key, {"stored_bytes": 7}),
            "api_keys.revoke": lambda store: api_keys.revoke(store, self.key, now_s=2.0),
            "retention._mark": lambda store: list(
                retention.remove_results(store, jobs.get(store, self.ended), now_s=4.0)
            ),
            "orders._put": lambda s: orders.answer_order(s, "1", OrderAnswer(200, "{}")),
            "orders._take_out": lambda store: orders.withdraw_order(store, self.order),
            "orders.take_orders": orders.take_orders,
            "orders.forget_answers": orders.forget_answers,
            "jobs.begin_epoch": lambda store: jobs.begin_epoch(store, pid=2, now_s=1.0),
        }


def writers() -> set[str]:
    """Every function of the store that opens a write transaction, by module."""
    found = set()
    for path in Path(store_folder.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and "store.write()" in ast.unparse(function):
                found.add(f"{path.stem}.{function.name}")
    return found


def test_a_former_leader_writes_nothing_whatever_it_writes(url: str) -> None:
    old, old_lock = leading(url, "old")
    made = Fixtures(old)
    select(url, END_LOCK_SESSION)
    new, new_lock = leading(url, "new")
    before = read_tables(url)

    assert made.writes.keys() | {"retention._remove"} == writers()
    for name, write in made.writes.items():
        with pytest.raises(NotLeadingError, match="another daemon leads by now"):
            write(old)
        assert read_tables(url) == before, name
        write(new)
        after = read_tables(url)
        assert after != before, name
        before = after
    with pytest.raises(NotLeadingError):
        next(made.removal)
    assert read_tables(url) == before
    with pytest.raises(NotLeadingError, match="another daemon works on it"):
        old_lock.check()
    assert jobs.read_leader(new).term == new.term
    new_lock.release()
    for store in (old, new):
        store.close()


def test_a_leader_that_stops_in_the_middle_of_a_write_is_led_past(url: str) -> None:
    command = [sys.executable, "-c", STOPS_IN_A_WRITE, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stopped:
        assert stopped.stdout is not None and stopped.stdout.readline() == "writing\n"
        stopped.send_signal(signal.SIGSTOP)
        store, lock = leading(url, "next")
        jobs.create(store, new_job(), now_s=1.0)
        assert len(jobs.list_jobs(store)) == 1
        stopped.kill()
    lock.release()
    store.close()


def test_a_leader_cut_off_leads_again_in_its_term_where_nobody_else_did(url: str) -> None:
    store, lock = leading(url, "only")
    term = store.term
    select(url, END_LOCK_SESSION)

    lock.check()

    jobs.create(store, new_job(), now_s=1.0)
    assert store.term == term
    other = open_store(url)
    assert not DaemonLock(other).take()
    lock.release()
    for each in (store, other):
        each.close()


def test_a_leader_writes_nothing_once_a_replica_that_lacks_commits_was_promoted(
    url: str, postgres: PostgresServer
) -> None:
    store, lock = leading(url, "only")
    jobs.create(store, new_job(), now_s=1.0)
    copy = postgres.copy()
    lock.check()
    jobs.create(store, new_job(), now_s=2.0)
    postgres.fail_over(copy)

    with pytest.raises(NotLeadingError, match="a replica has taken its place"):
        jobs.create(store, new_job(), now_s=3.0)
    with pytest.raises(NotLeadingError, match="a replica has taken its place"):
        lock.check()

    assert len(jobs.list_jobs(store)) == 1
    next_store, next_lock = leading(url, "next")
    jobs.create(next_store, new_job(), now_s=4.0)
    next_lock.check()
    next_lock.release()
    for each in (store, next_store):
        each.close()


def test_a_server_that_does_not_tell_its_timeline_is_led_and_written_all_the_same(
    url: str, postgres: PostgresServer
) -> None:
    name = url.rpartition("/")[2]
    tells = "FUNCTION pg_walfile_name(pg_lsn)"
    role = f"CREATE ROLE plain_{name} LOGIN PASSWORD 'plain'"
    grants = f"GRANT ALL ON ALL TABLES IN SCHEMA public TO plain_{name}"
    sequences = f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO plain_{name}"
    for told in (tells, "FUNCTION pg_control_system()"):
        postgres.execute(name, f"REVOKE EXECUTE ON {told} FROM PUBLIC")
    postgres.execute(name, role, grants, sequences)
    plain = f"postgresql://plain_{name}:plain@{url.rpartition('@')[2]}"
    store, lock = leading(plain, "only")
    assert (store.timeline, store.identity()) == (None, store.name)
    jobs.create(store, new_job(), now_s=1.0)
    select(url, END_LOCK_SESSION)
    lock.check()
    jobs.create(store, new_job(), now_s=2.0)
    assert len(jobs.list_jobs(store)) == 2
    lock.release()
    store.close()


def test_nobody_leads_on_a_replica(url: str, postgres: PostgresServer) -> None:
    store, lock = leading(url, "only")
    postgres.fail_over(postgres.copy(), promotes=False)
    try:
        with pytest.raises(StoreUnreachableError, match="is a replica"):
            lock.check()
        with pytest.raises(StoreUnreachableError, match="is a replica"):
            DaemonLock(store).take()
    finally:
        postgres.promote()
    lock.release()
    store.close()


def test_a_leader_that_was_led_past_does_not_lead_on_when_the_lock_is_free(url: str) -> None:
    store, lock = leading(url, "old")
    select(url, END_LOCK_SESSION)
    other, others_lock = leading(url, "new")
    others_lock.release()
    other.close()

    with pytest.raises(NotLeadingError):
        lock.check()

    store.close()
