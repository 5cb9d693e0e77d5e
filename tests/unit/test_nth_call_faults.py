"""Each call that makes something durable fails once, the first, the second and so on, on the way of
a job from its submission to its output: nothing is lost, and everything can still be read."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from store_builders import answered

from batchrun.daemon.ending import export
from batchrun.errors import BatchrunError
from batchrun.files import sync_folder
from batchrun.jobs.results.keeping import check_files
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import prepare_job
from batchrun.store import jobs, results
from batchrun.store.check import check_store
from batchrun.store.database import Store, open_store
from batchrun.types import JobState

CALLS = ("open", "fsync", "replace", "link", "mkdir")
NUM_ROWS = 2
MESSAGES = [{"role": "user", "content": "{{ x }}"}]
MAX_CALLS = 500


class NthCall:
    """Counts calls and lets the n-th fail, with an error that such a call can have."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_calls = 0

    def is_due(self) -> bool:
        self.num_calls += 1
        return self.num_calls == self.number

    def failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if self.is_due():
                code = errno.ENOSPC if self.number % 2 else errno.EIO
                raise OSError(code, os.strerror(code))
            return call(*arguments, **options)

        return wrapped

    def on_commit(self, _connection: object) -> None:
        if self.is_due():
            raise sqlite3.OperationalError("database or disk is full")


@contextmanager
def faults(number: int, store: Store) -> Iterator[NthCall]:
    """Within, the n-th call fails."""
    fault = NthCall(number)
    event.listen(store.engine, "commit", fault.on_commit)
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, fault.failing(getattr(os, name)))
        yield fault
    event.remove(store.engine, "commit", fault.on_commit)


def until_done(work: Callable[[], Any]) -> Any:
    """What a user or the daemon does: hear in one line why it failed, and try again."""
    try:
        return work()
    except BatchrunError as error:
        assert "\n" not in str(error)
        return work()


def run_job(folder: Path, store: Store) -> None:
    """A job from its file to its output."""
    values = {"path": str(folder / "in.jsonl"), "messages": MESSAGES}
    output = {"path": str(folder / "new" / "deep" / "out.jsonl")}
    spec = JobSpec.model_validate({"name": "x", "input": values, "output": output})
    links = folder / "inputs"
    new = until_done(lambda: prepare_job(spec, links=links))
    record = until_done(lambda: jobs.create(store, new, now_s=1.0))
    until_done(lambda: jobs.start(store, record.id, now_s=2.0))
    for row in range(NUM_ROWS):
        reply = json.dumps({"choices": [{"message": {"content": f"answer {row}"}}]})
        entry = (record.seq, answered(row, reply))
        until_done(partial(results.commit, store, [entry], now_s=3.0))
    ending = until_done(
        lambda: jobs.begin_finalizing(store, record.id, JobState.COMPLETED, now_s=4.0)
    )
    until_done(lambda: export(store, ending, links=links))
    until_done(lambda: jobs.finish(store, record.id, now_s=5.0))


def check(folder: Path, store: Store) -> None:
    (record,) = jobs.list_jobs(store)
    assert record.state is JobState.COMPLETED
    assert [str(each) for each in check_store(store)] == []
    assert [str(each) for each in check_files([record], links=folder / "inputs")] == []
    lines = (folder / "new" / "deep" / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["response"] for line in lines] == [
        f"answer {row}" for row in range(NUM_ROWS)
    ]
    assert list(folder.rglob("*.part")) == []


def test_no_call_that_fails_once_loses_anything(tmp_path: Path) -> None:
    for number in range(1, MAX_CALLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "in.jsonl").write_text('{"x": "hello"}\n' * NUM_ROWS)
        store = open_store(folder / "store.db")
        with faults(number, store) as fault:
            run_job(folder, store)
        check(folder, store)
        store.close()
        if fault.num_calls < number:
            break

    assert 20 < fault.num_calls < number < MAX_CALLS


def test_each_folder_that_is_made_and_each_name_in_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text('{"x": "hello"}\n' * NUM_ROWS)
    store = open_store(tmp_path / "store.db")
    synced: list[str] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    sync_folder(tmp_path / "..")
    run_job(tmp_path, store)
    store.close()

    wanted = ("", "inputs", "new", "new/deep")
    assert {str(tmp_path / name) for name in wanted} <= set(synced)
