"""What jobs have taken of engines: shared by rows, kept over a restart; and rows that are kept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest
from store_builders import fail_job

from batchrun.daemon.engine_link import Slot
from batchrun.daemon.prices import EngineSeconds, read_spent
from batchrun.engine.command import AttachedSettings
from batchrun.engine.engine import AttachedEngine
from batchrun.jobs.inputs.rows import FileState
from batchrun.jobs.results.keeping import ORPHAN_AGE_S, find_unused_rows, remove
from batchrun.pool.row_queue import Window
from batchrun.python.frames import kept_rows
from batchrun.store import jobs
from batchrun.store.database import Store, open_store
from batchrun.store.jobs import JobRecord, NewJob
from batchrun.types import JobState

NOW_S = 1e9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.db")
    yield opened
    opened.close()


async def slot_with(*job_ids: str) -> Slot:
    """An engine that has a row of each of these jobs, and two of one that is named twice."""
    engine = AttachedEngine(AttachedSettings(name="0", url="http://127.0.0.1:1"))
    slot = Slot(engine, uses_priority=False, window=Window(10, 1000))
    for row, job_id in enumerate(job_ids):
        slot.in_flight[job_id, row] = cast(Any, None)
    await engine.client.close()
    return slot


async def test_an_engine_s_time_is_shared_by_rows_and_engines_add_up(store: Store) -> None:
    seconds = EngineSeconds(store)
    slots = [await slot_with("a", "a", "a", "b"), await slot_with("a"), await slot_with()]

    for now_s in (100.0, 101.0, 103.0):
        seconds.look(slots, now_s)

    assert seconds.spent_s == pytest.approx({"a": 3 * (0.75 + 1), "b": 3 * 0.25})


async def test_what_was_saved_goes_on_after_a_restart(store: Store) -> None:
    seconds = EngineSeconds(store)
    slots = [await slot_with("a")]
    for now_s in (100.0, 104.0):
        seconds.look(slots, now_s)
    seconds.save(104.0, at_once=True)

    later = EngineSeconds(store)
    later.load()
    for now_s in (7.0, 8.0):
        later.look(slots, now_s)
    later.save(8.0, at_once=True)

    assert read_spent(store) == {"a": 5.0}


async def test_a_machine_that_slept_is_not_paid_for(store: Store) -> None:
    seconds = EngineSeconds(store)
    slots = [await slot_with("a")]
    for now_s in (100.0, 90_000.0):
        seconds.look(slots, now_s)

    assert seconds.spent_s["a"] <= 10.0


def job_over(store: Store, rows: Path, output: Path) -> JobRecord:
    """A job that has ended, with its results there."""
    spec = f'{{"input": {{"path": ["{rows}"]}}, "output": {{"path": "{output}"}}}}'
    record = jobs.create(store, NewJob("job", spec, "{}", "hash", 1), now_s=NOW_S)
    return fail_job(store, record.id, "a reason", now_s=NOW_S)


DIGEST, DRAFT = "0123456789abcdef", "0123456789ab"


def test_rows_stay_while_a_job_s_results_do_and_go_with_them(store: Store, tmp_path: Path) -> None:
    frames, uploads = tmp_path / "frames", tmp_path / "uploads"
    frames.mkdir()
    (uploads / DRAFT).mkdir(parents=True)
    paths = [frames / f"{DIGEST}.parquet", frames / f"{DIGEST}.answers.parquet"]
    paths += [uploads / DRAFT / "input.csv", uploads / DRAFT / "answers.parquet"]
    for path in paths:
        path.write_bytes(b"12345")
    made = [job_over(store, *paths[:2]), job_over(store, *paths[2:])]
    kept_in = (frames, uploads, tmp_path / "nothing")

    def found(records: list[JobRecord], now_s: float = 0.0) -> list[Path]:
        return [each.path for each in find_unused_rows(records, kept_in=kept_in, now_s=now_s)]

    gone = [replace(record, results_removed_at=NOW_S) for record in made]
    assert found(made, now_s=1e12) == []
    assert found([made[0], gone[1]]) == [uploads / DRAFT]
    assert found([gone[0], made[0], gone[1]]) == [uploads / DRAFT]
    assert found(gone) == [uploads / DRAFT], "a call may have found the rows that lie there"
    assert found(gone, now_s=1e12) == [*reversed(paths[:2]), uploads / DRAFT]
    assert found([]) == []
    (frames / "theirs.parquet").write_bytes(b"x")
    assert frames / "theirs.parquet" not in found([], now_s=1e12)
    for unused in find_unused_rows(gone, kept_in=kept_in, now_s=1e12):
        remove(unused)
        remove(unused)
    assert [*frames.iterdir(), *uploads.iterdir()] == [frames / "theirs.parquet"]


def test_rows_that_no_job_names_go_a_day_after_the_last_call(tmp_path: Path) -> None:
    path = kept_rows(table := pl.DataFrame({"text": ["a"]}), tmp_path)
    os.utime(path, (NOW_S, NOW_S))
    before = path.stat()
    (unused,) = find_unused_rows([], kept_in=(tmp_path,), now_s=1e12)
    time.sleep(0.05)

    assert kept_rows(table, tmp_path) == path
    remove(unused)

    asked_at = path.stat().st_ctime
    assert FileState.of(path) == FileState(
        before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns
    ), "jobs that read it are not disturbed"
    assert asked_at > before.st_ctime
    for past_s, num_found in ((-1, 0), (1, 1)):
        now_s = asked_at + ORPHAN_AGE_S + past_s
        assert len(find_unused_rows([], kept_in=(tmp_path,), now_s=now_s)) == num_found


def test_the_end_of_a_job_is_noted_in_the_transaction_that_ends_it(store: Store) -> None:
    record = jobs.create(store, NewJob("job", "{}", "{}", "hash", 1), now_s=NOW_S)
    assert jobs.list_settings(store, jobs.ENDED_PREFIX) == {}

    fail_job(store, record.id, "a reason", now_s=NOW_S)

    assert jobs.list_settings(store, jobs.ENDED_PREFIX) == {record.id: {}}
    assert jobs.newest_states(store, 5) == {record.seq: JobState.FAILED}
    assert [each.id for each in jobs.list_some(store, [record.seq, 99])] == [record.id]
    assert jobs.list_some(store, []) == []
