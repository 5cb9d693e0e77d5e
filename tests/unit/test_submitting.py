"""Submissions: which job is the same, and whether a daemon has taken one."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import polars as pl
import pytest

import batchrun
from batchrun.control.client import DaemonClient
from batchrun.control.submitting import find_or_add, hand_over, prepare
from batchrun.errors import BatchrunError, StoreLockedError
from batchrun.files import StoreLock
from batchrun.home import Home
from batchrun.jobs.spec import JobSpec
from batchrun.python.asking import Question, ask
from batchrun.python.frames import frame_of
from batchrun.store import jobs
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState

JOB = """\
name: sample
input: {path: rows.parquet, messages: [{role: user, content: "{{ text }}"}]}
output: {path: out.parquet}
"""
EndsSoon = Callable[[Store, str], JobRecord]
CANCELLED: EndsSoon = partial(jobs.request_cancel, now_s=1.0)
EXPIRED: EndsSoon = partial(jobs.begin_finalizing, ends_as=JobState.EXPIRED, now_s=1.0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home beside a job file and its rows, in the folder one works in."""
    monkeypatch.chdir(tmp_path)
    pl.DataFrame({"text": ["a", "b"]}).write_parquet("rows.parquet")
    Path("job.yaml").write_text(JOB)
    made = Home(tmp_path / "home")
    made.create()
    return made


def submitted(home: Home, continue_from: str | None = None, *, more: str = "") -> str:
    Path("job.yaml").write_text(JOB + more)
    job = batchrun.submit("job.yaml", home=home.path, continue_from=continue_from, progress=False)
    return job.id


def at(daemon: socket.socket, home: Home) -> None:
    """Leave this process in the home as its daemon, with this address."""
    url = f"http://127.0.0.1:{daemon.getsockname()[1]}"
    home.daemon_record.write_text(json.dumps({"pid": os.getpid(), "url": url, "token": "t"}))


@pytest.mark.parametrize("end", [CANCELLED, EXPIRED], ids=["cancelled", "expired"])
def test_a_job_that_is_about_to_end_early_is_not_taken_up(home: Home, end: EndsSoon) -> None:
    asked = ask(
        Question("{{ text }}"), frame_of(pl.DataFrame({"text": ["a"]})), home, progress=False
    )
    old = [submitted(home), asked.begin(DaemonClient(home))]
    with closing(open_store(home.store_location)) as store:
        for job_id in old:
            end(store, job_id)

    again = ask(asked.question, asked.frame, home, progress=False).begin(DaemonClient(home))

    assert submitted(home) not in old
    assert again not in old


@pytest.mark.parametrize("is_paused", [False, True], ids=["waiting", "paused"])
def test_a_job_whose_deadline_has_passed_is_not_taken_up(home: Home, *, is_paused: bool) -> None:
    Path("job.yaml").write_text(JOB + "deadline: 1h\n")
    job = prepare(Path("job.yaml"), home, is_shown=False)
    with closing(open_store(home.store_location)) as store:
        jobs.create(store, job, now_s=1.0)
        if is_paused:
            jobs.pause(store, job.id, "by hand")

    assert submitted(home, more="deadline: 24h\n") != job.id


def test_a_job_that_was_done_before_its_deadline_is_taken_up(home: Home) -> None:
    Path("job.yaml").write_text(JOB + "deadline: 1h\n")
    job = prepare(Path("job.yaml"), home, is_shown=False)
    with closing(open_store(home.store_location)) as store:
        jobs.create(store, job, now_s=1.0)
        jobs.start(store, job.id, now_s=2.0)
        jobs.begin_finalizing(store, job.id, JobState.COMPLETED, now_s=3.0)

    assert submitted(home, more="deadline: 24h\n") == job.id


def test_what_continues_another_job_is_the_same_as_what_continues_it_too(home: Home) -> None:
    first = submitted(home)
    with closing(open_store(home.store_location)) as store:
        jobs.request_cancel(store, first, now_s=1.0)
        jobs.finish(store, first, now_s=2.0)
    anew = submitted(home)

    continuing = submitted(home, first)

    assert anew != continuing == submitted(home, first)
    with closing(open_store(home.store_location)) as store:
        assert json.loads(jobs.get(store, continuing).spec)["continue_from"] == first


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("max_failed: 1\n", "max_failed: 50%\n"),
        ("", "retries: 9\n"),
        ("deadline: 1h\n", "deadline: 2h\n"),
        ("weight: 2\n", ""),
    ],
)
def test_a_limit_that_changes_no_request_makes_no_other_job(
    home: Home, capsys: pytest.CaptureFixture[str], before: str, after: str
) -> None:
    old = submitted(home, more=before)

    assert submitted(home, more=after) == old
    key = (before or after).partition(":")[0]
    assert f"{old} goes on with its own {key}; to change that, cancel" in capsys.readouterr().err
    assert submitted(home, more="request: {temperature: 0}\n") != old


def test_a_job_whose_hash_has_its_limits_in_it_is_found(home: Home) -> None:
    Path("job.yaml").write_text(JOB + "max_failed: 5%\n")
    job = prepare(Path("job.yaml"), home, is_shown=False)
    spec = JobSpec.model_validate_json(job.spec)
    left_out = {"source", "continue_from", "start", "row_timeout", "on_done"}
    values = spec.model_dump(mode="json", exclude=left_out)
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    older = replace(job, content_hash=hashlib.sha256(text.encode()).hexdigest())
    with closing(open_store(home.store_location)) as store:
        jobs.create(store, older, now_s=1.0)

    assert older.content_hash != job.content_hash
    assert find_or_add(job, home, is_shown=False) == (older.id, False)


def test_of_a_daemon_that_may_have_taken_a_job_one_is_told_which(home: Home) -> None:
    job = prepare(Path("job.yaml"), home, is_shown=False)

    def take_without_an_answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 20)

    with StoreLock(home.store_lock), socket.create_server(("127.0.0.1", 0)) as listener:
        at(listener, home)
        taking = threading.Thread(target=take_without_an_answer)
        taking.start()
        line = f"runs and gave no answer .*; once it answers, `batchrun status {job.id}` tells "
        with pytest.raises(BatchrunError, match=line):
            hand_over(job, home)
        taking.join()


def test_a_daemon_that_takes_no_calls_has_taken_no_job(home: Home) -> None:
    job = prepare(Path("job.yaml"), home, is_shown=False)

    with StoreLock(home.store_lock), socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        at(unheard, home)
        with pytest.raises(StoreLockedError, match=f"in use by process {os.getpid()}; "):
            hand_over(job, home)
