"""The end of a batch whose input can be read no more, or not yet again."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
from store_builders import add_batch, answered

from batchrun.daemon.ending import INPUT_TRIES, MAX_WRITING, end_batch
from batchrun.jobs.batch import new_batch_job, validate_input
from batchrun.jobs.objects import MAX_THREADS, in_thread
from batchrun.jobs.results.file_bytes import (
    FileBytes,
    recover_files,
    remove_file,
    sweep_files,
)
from batchrun.keys import FairDoor
from batchrun.store import batches, files, jobs, results
from batchrun.store.batches import BatchRecord, NewBatch, ValidInput
from batchrun.store.check import check_store
from batchrun.store.database import Store, open_store
from batchrun.store.files import NewFile
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState, ProgressSink

CHAT = "/v1/chat/completions"
IDS = [f"custom-{number}" for number in range(1_200)]
NUM_ANSWERED = 1_100
"""More than the rows that are read when a file is opened."""


class Home:
    """A store and the folders beside it, with one batch of which some rows are answered."""

    def __init__(self, folder: Path) -> None:
        self.store: Store = open_store(folder / "store.db")
        self.links = folder / "inputs"
        self.place = FileBytes(folder / "files")
        self.door = FairDoor(MAX_WRITING)
        (folder / "files").mkdir()
        body = {"model": "m", "messages": []}
        lines = [{"custom_id": i, "method": "POST", "url": CHAT, "body": body} for i in IDS]
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        given = files.add(
            self.store, NewFile("in.jsonl", "batch", len(content), "0" * 64, None), now_s=1.0
        )
        self.input = folder / "files" / given.id
        self.input.write_bytes(content)
        self.batch_id = self._start(given.id)

    def _start(self, file_id: str) -> str:
        job = new_batch_job(Path("/srv"), CHAT, deadline_s=60.0, weight=1.0)
        asked = NewBatch(file_id, CHAT, "24h", None, None, "hash")
        made = add_batch(self.store, asked, job, now_s=time.time())
        found = validate_input(made, self.place, {"m"}, links=self.links)
        assert isinstance(found, ValidInput)
        batches.start(self.store, job.id, found, now_s=2.0)
        return str(job.id)

    def answer(self, num_rows: int) -> None:
        """So many of the first rows have an answer."""
        seq = self.job.seq
        outcomes = [(seq, answered(row, json.dumps({"row": row}))) for row in range(num_rows)]
        results.commit(self.store, outcomes, now_s=3.0)

    @property
    def job(self) -> JobRecord:
        """The batch, as a job."""
        return jobs.get(self.store, self.batch_id)

    @property
    def batch(self) -> BatchRecord:
        """The batch."""
        found = batches.find(self.store, self.batch_id)
        assert found is not None
        return found

    def lose_input(self) -> None:
        """Neither the file nor its link is there."""
        for path in (self.input, *self.links.iterdir()):
            path.unlink()

    def damage_input(self) -> None:
        """One line in the middle is no JSON any more; size and time of the file are the same."""
        text = self.input.read_bytes()
        status = self.input.stat()
        at = text.index(b'{"custom_id": "custom-1050"')
        with self.input.open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        os.utime(self.input, ns=(status.st_atime_ns, status.st_mtime_ns))

    async def end(self, progress: ProgressSink = lambda *_: None) -> None:
        """Let the batch end."""
        await end_batch(
            self.store,
            self.job,
            links=self.links,
            place=self.place,
            progress=progress,
            door=self.door,
        )

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a file of results."""
        assert file_id is not None
        content = (self.place.spool / file_id).read_bytes()
        return [json.loads(line) for line in content.splitlines()]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setattr("batchrun.daemon.ending.RETRY_INTERVAL_S", 0.0)
    made = Home(tmp_path)
    yield made
    made.store.close()


async def test_an_input_that_is_deleted_goes_once_no_open_batch_has_it(home: Home) -> None:
    remove_file(home.store, home.place, home.input.name)
    recover_files(home.store, home.place)
    sweep_files(home.store, home.place)
    assert home.input.exists()

    jobs.request_cancel(home.store, home.batch_id, now_s=4.0)
    await home.end()
    sweep_files(home.store, home.place)

    assert not [path for path in home.place.spool.iterdir() if home.input.name in path.name]
    assert list(check_store(home.store)) == []


@pytest.mark.parametrize("state", [JobState.EXPIRED, JobState.CANCELLED])
async def test_a_batch_whose_input_is_gone_ends_with_the_answers_that_it_has(
    home: Home, state: JobState
) -> None:
    home.answer(NUM_ANSWERED)
    if state is JobState.EXPIRED:
        jobs.begin_finalizing(home.store, home.batch_id, state, now_s=4.0)
    else:
        jobs.request_cancel(home.store, home.batch_id, now_s=4.0)
    home.lose_input()

    await home.end()

    assert home.job.state is state
    answers, rest = home.lines(home.batch.output_file_id), home.lines(home.batch.error_file_id)
    assert [line["row"] for line in answers] == list(range(NUM_ANSWERED))
    assert [line["row"] for line in rest] == list(range(NUM_ANSWERED, len(IDS)))
    assert {line["custom_id"] for line in answers + rest} == {None}
    assert all(line["response"]["body"] == {"row": line["row"]} for line in answers)
    assert list(check_store(home.store)) == []


async def test_batches_that_are_being_written_leave_threads_to_commits_and_callers(
    home: Home,
) -> None:
    home.answer(NUM_ANSWERED)
    jobs.request_cancel(home.store, home.batch_id, now_s=4.0)
    go_on, num_begun = threading.Event(), Semaphore(0)

    def hold(stage: str, done: int, total: int) -> None:
        num_begun.release()
        go_on.wait()

    num_threads = max(MAX_THREADS, min(32, (os.cpu_count() or 1) + 4))
    ends = [asyncio.create_task(home.end(hold)) for _ in range(num_threads)]
    try:
        for _ in range(MAX_WRITING):
            while not num_begun.acquire(blocking=False):
                await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(lambda: home.job.state) is JobState.CANCELLING
            assert await in_thread(home.place.locate, home.input.name) == home.input
    finally:
        go_on.set()
        await asyncio.gather(*ends)
    assert home.job.state is JobState.CANCELLED
    assert list(check_store(home.store)) == []


async def test_of_a_damaged_input_only_the_damaged_line_has_no_custom_id(home: Home) -> None:
    home.answer(NUM_ANSWERED)
    jobs.begin_finalizing(home.store, home.batch_id, JobState.EXPIRED, now_s=4.0)
    home.damage_input()

    await home.end()

    lines = home.lines(home.batch.output_file_id) + home.lines(home.batch.error_file_id)
    assert [line["custom_id"] for line in lines] == [*IDS[:1_050], None, *IDS[1_051:]]
    assert [line["row"] for line in lines if "row" in line] == [1_050]


async def test_a_batch_that_is_done_waits_for_its_input_until_its_deadline(home: Home) -> None:
    home.answer(len(IDS))
    jobs.begin_finalizing(home.store, home.batch_id, JobState.COMPLETED, now_s=4.0)
    away = [(path, path.read_bytes()) for path in (home.input, *home.links.iterdir())]
    home.lose_input()
    num_tries = 0

    def put_back(stage: str, done: int, total: int) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 2 * INPUT_TRIES + 1:
            for path, content in away:
                path.write_bytes(content)

    await end_batch(
        home.store,
        home.job,
        links=home.links,
        place=home.place,
        progress=put_back,
        door=home.door,
    )

    assert home.job.state is JobState.COMPLETED
    assert [line["custom_id"] for line in home.lines(home.batch.output_file_id)] == IDS
