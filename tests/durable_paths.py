"""The ways on which batchrun makes something durable, each to be walked while the disk is at fault.

A way lies in a folder of its own, and can be walked again in it after it broke off.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

from starlette.requests import Request
from store_builders import add_batch, answered, load_dump

from batchrun.cli.main import call
from batchrun.daemon.ending import end_batch, export
from batchrun.errors import BatchrunError
from batchrun.home import Home
from batchrun.jobs.batch import new_batch_job, validate_input
from batchrun.jobs.pin import InputPin, link_name
from batchrun.jobs.results.file_bytes import MARK, FileBytes, check_contents, recover_files
from batchrun.jobs.results.keeping import check_files
from batchrun.jobs.spec import JobSpec
from batchrun.jobs.submit import prepare_job
from batchrun.keys import FairDoor
from batchrun.server.api.errors import ApiError, Caller
from batchrun.server.api.files import Files
from batchrun.server.api.upload import Traffic
from batchrun.store import batches, files, jobs, results
from batchrun.store.batches import NewBatch, ValidInput
from batchrun.store.check import check_store
from batchrun.store.database import Store, open_store, open_to_read
from batchrun.store.files import NewFile
from batchrun.store.jobs import JobRecord
from batchrun.types import JobState

CHAT = "/v1/chat/completions"
NUM_ROWS = 12
ROWS_AT_ONCE = 4
REPLY = json.dumps({"choices": [{"message": {"content": "yes"}}]})
LINE = {"method": "POST", "url": CHAT, "body": {"model": "m", "messages": []}}
Acknowledge = Callable[[str], None]


class DurableWay(ABC):
    """One way. `walk` raises BatchrunError where the disk does not let it go on; what it told to
    `acknowledge` must stand from then on, whatever happens."""

    name: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = Home(folder / "home")
        self.place = FileBytes(self.home.files)
        self.input = folder / "in.jsonl"
        self.output = folder / "new" / "deep" / "out.parquet"
        self._store: Store | None = None

    def prepare(self) -> None:
        """Make what the way begins with, in an empty folder."""
        self.home.create()
        self.input.write_text('{"x": "hello"}\n' * NUM_ROWS)
        self._begin()
        self.close()

    @property
    def store(self) -> Store:
        """The store, opened when it is first asked for."""
        if self._store is None:
            self._store = open_store(self.home.store)
        return self._store

    def close(self) -> None:
        """Close the store; it is opened anew when it is next asked for."""
        if self._store is not None:
            self._store.close()
            self._store = None

    @abstractmethod
    def _begin(self) -> None:
        """What is there before."""

    @abstractmethod
    def walk(self, acknowledge: Acknowledge) -> None:
        """Go the whole way, or what is left of it."""

    def check(self, acknowledged: Sequence[str], *, has_links: bool = True) -> None:
        """What holds at every moment. Raises AssertionError and BatchrunError.

        Not `has_links`: inputs could not be linked, which is no fault of a job.
        """
        with closing(open_store(self.home.store)) as store:
            recover_files(store, self.place)
            records = jobs.list_jobs(store)
            found = [*check_store(store), *check_files(records, links=self.home.inputs)]
            found += check_contents(store, self.place)
            assert [str(each) for each in found] == []
            for record in records if has_links else ():
                _check_links(record, self.home.inputs)
            self._check(store, acknowledged)

    @abstractmethod
    def _check(self, store: Store, acknowledged: Sequence[str]) -> None:
        """What was acknowledged stands."""

    def _job(self, name: str, *, num_done: int, is_over: bool = False) -> JobRecord:
        """A job that runs, or is over, with so many answered rows."""
        output = {"path": str(self.folder / f"{name}.jsonl" if is_over else self.output)}
        new = prepare_job(self._spec(output, name), links=self.home.inputs)
        record = jobs.create(self.store, new, now_s=1.0)
        jobs.start(self.store, record.id, now_s=2.0)
        done = [(record.seq, answered(row, REPLY)) for row in range(num_done)]
        results.commit(self.store, done, now_s=3.0)
        if is_over:
            ending = jobs.begin_finalizing(self.store, record.id, JobState.COMPLETED, now_s=4.0)
            export(self.store, ending, links=self.home.inputs)
            jobs.finish(self.store, record.id, now_s=5.0)
        return record

    def _spec(self, output: dict[str, str], name: str = "x") -> JobSpec:
        values = {"path": str(self.input), "messages": [{"role": "user", "content": "{{ x }}"}]}
        return JobSpec.model_validate({"name": name, "input": values, "output": output})


def _check_links(record: JobRecord, links: Path) -> None:
    """The input of a job outlives its file."""
    is_needed = record.results_removed_at is None
    for file in InputPin.model_validate_json(record.pin).files if is_needed else ():
        assert (links / link_name(file)).exists(), f"{record.id}: its input has no link"


class Submission(DurableWay):
    """The first job of a home, from an input that was just written."""

    name = "submit"

    def prepare(self) -> None:
        """There is nothing yet."""

    def _begin(self) -> None:
        raise AssertionError("nothing is there before")

    def check(self, acknowledged: Sequence[str], *, has_links: bool = True) -> None:
        """As for any way, once something was acknowledged; else with whatever there is."""
        self.home.create()
        super().check(acknowledged, has_links=has_links)

    def walk(self, acknowledge: Acknowledge) -> None:
        self.home.create()
        try:
            self.input.write_text('{"x": "hello"}\n' * NUM_ROWS)
        except OSError as error:
            raise BatchrunError("whoever writes the input hears of it") from error
        new = prepare_job(self._spec({"path": str(self.output)}), links=self.home.inputs)
        acknowledge(jobs.create(self.store, new, now_s=1.0).id)

    def _check(self, store: Store, acknowledged: Sequence[str]) -> None:
        assert {job.id for job in jobs.list_jobs(store)} >= set(acknowledged)


class Commits(DurableWay):
    name = "commit"

    def _begin(self) -> None:
        self._job("x", num_done=0)

    def walk(self, acknowledge: Acknowledge) -> None:
        for first in range(0, NUM_ROWS, ROWS_AT_ONCE):
            rows = range(first, first + ROWS_AT_ONCE)
            results.commit(self.store, [(1, answered(row, REPLY)) for row in rows], now_s=3.0)
            acknowledge(str(rows[-1]))
        results.record_attempt(self.store, 1, 0, 2)
        results.record_engine_death(self.store, 1, [1, 2])

    def _check(self, store: Store, acknowledged: Sequence[str]) -> None:
        done = results.done_rows(store, 1).tolist()
        assert done == list(range(len(done))) and len(done) % ROWS_AT_ONCE == 0
        assert max(map(int, acknowledged), default=-1) < len(done)


class Export(DurableWay):
    name = "export"

    def _begin(self) -> None:
        self._job("x", num_done=NUM_ROWS)

    def walk(self, acknowledge: Acknowledge) -> None:
        (record,) = jobs.list_jobs(self.store)
        if record.state is JobState.RUNNING:
            jobs.begin_finalizing(self.store, record.id, JobState.COMPLETED, now_s=4.0)
        (record,) = jobs.list_jobs(self.store)
        if record.state is JobState.FINALIZING:
            export(self.store, record, links=self.home.inputs)
            jobs.finish(self.store, record.id, now_s=5.0)
        acknowledge("finished")

    def _check(self, store: Store, acknowledged: Sequence[str]) -> None:
        (record,) = jobs.list_jobs(store)
        if acknowledged:
            assert record.state is JobState.COMPLETED


class Upload(DurableWay):
    name = "upload"

    def _begin(self) -> None:
        assert files.list_all(self.store) == []

    def walk(self, acknowledge: Acknowledge) -> None:
        made = Files(self.store, self.place, Traffic())
        try:
            reply = asyncio.run(made.create(_upload(_lines())))
        except ApiError as error:
            raise BatchrunError(str(error)) from error
        acknowledge(str(json.loads(bytes(reply.body))["id"]))

    def _check(self, store: Store, acknowledged: Sequence[str]) -> None:
        assert {file.id for file in files.list_all(store)} >= set(acknowledged)
        listed = {file.id for file in files.list_all(store)}
        lying = {path.name for path in self.home.files.iterdir() if path.is_file()}
        going = {name.removesuffix(MARK) for name in lying if name.endswith(MARK)}
        assert {each for each in lying - going if not each.endswith((".part", MARK))} == listed


class BatchStart(DurableWay):
    """A batch is made and its input is validated."""

    name = "batch start"

    def _begin(self) -> None:
        self._add_input()

    def _add_input(self) -> str:
        content = _lines()
        given = NewFile("in.jsonl", "batch", len(content), _sha256(content), None)
        (self.home.files / given.id).write_bytes(content)
        return files.add(self.store, given, now_s=1.0).id

    def walk(self, acknowledge: Acknowledge) -> None:
        self._make(files.list_all(self.store)[0].id, acknowledge)

    def _make(self, file_id: str, acknowledge: Acknowledge) -> str:
        job = new_batch_job(self.folder, CHAT, deadline_s=3e9, weight=1.0)
        asked = NewBatch(file_id, CHAT, "24h", None, None, "hash")
        made = add_batch(self.store, asked, job, now_s=1.0)
        acknowledge(job.id)
        found = validate_input(made, self.place, {"m"}, links=self.home.inputs)
        assert isinstance(found, ValidInput), found
        batches.start(self.store, job.id, found, now_s=2.0)
        acknowledge(f"started {job.id}")
        return job.id

    def _check(self, store: Store, acknowledged: Sequence[str]) -> None:
        found = {job.id: job.state for job in jobs.list_jobs(store)}
        for said in acknowledged:
            is_started = found[said.removeprefix("started ")] is JobState.RUNNING
            assert is_started or not said.startswith("started ")


class BatchEnd(BatchStart):
    name = "batch end"

    def _begin(self) -> None:
        batch = self._make(self._add_input(), lambda _: None)
        rows = range(NUM_ROWS - 2)
        done = [(jobs.get(self.store, batch).seq, answered(row, REPLY)) for row in rows]
        results.commit(self.store, done, now_s=3.0)

    def walk(self, acknowledge: Acknowledge) -> None:
        (record,) = jobs.list_jobs(self.store)
        if record.state is JobState.RUNNING:
            jobs.begin_finalizing(self.store, record.id, JobState.EXPIRED, now_s=4.0)
        (record,) = jobs.list_jobs(self.store)
        name = "batchrun.daemon.{}.RETRY_INTERVAL_S"
        with patch(name.format("writer"), 0.0), patch(name.format("ending"), 0.0):
            asyncio.run(
                end_batch(
                    self.store,
                    record,
                    links=self.home.inputs,
                    place=self.place,
                    progress=lambda *_: None,
                    door=FairDoor(1),
                )
            )
        acknowledge("ended")

    def _check(self, store: Store, acknowledged: Sequence[str]) -> None:
        (record,) = jobs.list_jobs(store)
        batch = batches.find(store, record.id)
        assert batch is not None
        if acknowledged:
            assert record.state is JobState.EXPIRED
        if record.state is JobState.EXPIRED:
            found = [batch.output_file_id, batch.error_file_id]
            sizes = [(self.home.files / str(name)).read_bytes().count(b"\n") for name in found]
            assert sizes == [NUM_ROWS - 2, 2]


class _Command(DurableWay):
    """A way that a command goes, in this process."""

    def _run(self, *arguments: str) -> None:
        """Raises BatchrunError with what the command says on stderr."""
        said = io.StringIO()
        words = ["batchrun", *arguments, "--home", str(self.home.path)]
        self.close()
        with (
            redirect_stdout(io.StringIO()),
            redirect_stderr(said),
            patch.object(sys, "argv", words),
        ):
            code = call()
        if code:
            raise BatchrunError(said.getvalue().strip())


class Backup(_Command):
    name = "backup"

    @property
    def copy(self) -> Path:
        """The backup."""
        return self.folder / "copies" / "copy.db"

    def _begin(self) -> None:
        self._job("x", num_done=NUM_ROWS)
        self.copy.parent.mkdir()
        self._run("store", "backup", str(self.copy))
        self._job("y", num_done=2)

    def walk(self, acknowledge: Acknowledge) -> None:
        self._run("store", "backup", str(self.copy))
        acknowledge("copied")

    def _check(self, store: Store, acknowledged: Sequence[str]) -> None:
        assert len(jobs.list_jobs(store)) == 2
        with closing(open_to_read(self.copy)) as copy:
            assert list(check_store(copy)) == []
            assert len(jobs.list_jobs(copy)) >= (2 if acknowledged else 1)


class Collection(_Command):
    name = "gc"

    def _begin(self) -> None:
        self._job("x", num_done=NUM_ROWS, is_over=True)
        self.input.write_text('{"x": "other"}\n' * NUM_ROWS)
        self._job("y", num_done=2)
        content = _lines()
        old = NewFile("in.jsonl", "batch", len(content), _sha256(content), 1)
        (self.home.files / old.id).write_bytes(content)
        files.add(self.store, old, now_s=1.0)

    def walk(self, acknowledge: Acknowledge) -> None:
        self._run("gc", "--older-than", "1h")
        acknowledge("collected")

    def _check(self, store: Store, acknowledged: Sequence[str]) -> None:
        old, new = jobs.list_jobs(store)
        assert results.count(store, old.seq).num_completed == NUM_ROWS
        assert (self.folder / "x.jsonl").read_text().count("\n") == NUM_ROWS
        assert results.done_rows(store, new.seq).tolist() == [0, 1]
        if acknowledged:
            assert old.results_removed_at is not None and files.list_all(store) == []
            assert results.done_rows(store, old.seq).tolist() == []


class Migration(DurableWay):
    name = "migration"
    revision = "0001"

    def _begin(self) -> None:
        load_dump(self.home.store, self.revision)

    def walk(self, acknowledge: Acknowledge) -> None:
        with closing(open_store(self.home.store)):
            acknowledge("migrated")

    def check(self, acknowledged: Sequence[str], *, has_links: bool = True) -> None:
        """What the dump holds is there; the files that it names never were."""
        with closing(open_store(self.home.store)) as store:
            assert list(check_store(store)) == []
            self._check(store, acknowledged)

    def _check(self, store: Store, acknowledged: Sequence[str]) -> None:
        found = jobs.list_jobs(store)
        assert len(found) > 2
        assert sum(len(results.done_rows(store, job.seq)) for job in found) > 2


WAYS: tuple[type[DurableWay], ...] = (
    *(Submission, Commits, Export, Upload, BatchStart),
    *(BatchEnd, Backup, Collection, Migration),
)


def _lines() -> bytes:
    lines = (json.dumps({"custom_id": f"r{row}", **LINE}) for row in range(NUM_ROWS))
    return "".join(f"{line}\n" for line in lines).encode()


def _sha256(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


def _upload(content: bytes) -> Request:
    head = b'--xyz\r\nContent-Disposition: form-data; name="'
    body = head + b'purpose"\r\n\r\nbatch\r\n'
    body += head + b'file"; filename="in.jsonl"\r\n\r\n' + content + b"\r\n--xyz--\r\n"
    headers = [(b"content-type", b"multipart/form-data; boundary=xyz")]
    pieces: Iterator[bytes] = iter([body])

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": next(pieces), "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    request = Request(scope, receive)
    request.state.caller = Caller()
    return request
