"""More uploads at once than a daemon may have files open, from callers who take their time."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
from batch_client import ask, deployment_client
from deployment_rig import DeploymentRig
from raw_http import FORM_END, FORM_HEADERS, file_head, form_field

NUM_OPEN_FILES = 64
MOST_UPLOADS = NUM_OPEN_FILES // 8
NUM_UPLOADS = 60
HEAD = form_field("purpose", "user_data") + file_head()
TAIL = b"\r\n" + FORM_END
DRIP = b"x" * 2_000
DRIP_S = 0.5
WAIT_S = 60.0


class SlowUpload:
    """An upload that goes on, whatever is answered, until it is told to end."""

    def __init__(self) -> None:
        self.answer = bytearray()
        self.is_answered = asyncio.Event()
        self.may_end = asyncio.Event()

    async def run(self, port: int) -> None:
        """Upload a file, in chunks."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        collecting = asyncio.create_task(self._collect(reader))
        writer.write(_request_head())
        with suppress(ConnectionError):
            _write_chunk(writer, HEAD)
            while not self.may_end.is_set():
                _write_chunk(writer, DRIP)
                await writer.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.may_end.wait(), DRIP_S)
            _write_chunk(writer, TAIL)
            _write_chunk(writer, b"")
        await asyncio.wait_for(self.is_answered.wait(), WAIT_S)
        writer.transport.abort()
        await collecting

    async def _collect(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(65_536):
                self.answer += piece
                if self.answer.endswith(b"}"):
                    self.is_answered.set()

    @property
    def status(self) -> int:
        """Of the answer."""
        return int(self.answer.split()[1])


def _request_head() -> bytes:
    fields = {**FORM_HEADERS, "Host": "localhost", "Transfer-Encoding": "chunked"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST /v1/files HTTP/1.1\r\n{lines}\r\n".encode()


def _write_chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


@asynccontextmanager
async def slow_uploads(rig: DeploymentRig, num_uploads: int) -> AsyncIterator[list[SlowUpload]]:
    """So many, begun one after the other, each when those before it are refused or on their way.
    They end with the block."""
    uploads: list[SlowUpload] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(num_uploads):
            uploads.append(SlowUpload())
            group.create_task(uploads[-1].run(rig.port))
            async with asyncio.timeout(WAIT_S):
                while sum(u.is_answered.is_set() for u in uploads) + num_parts(rig) < len(uploads):
                    await asyncio.sleep(0.02)
        yield uploads
        for upload in uploads:
            upload.may_end.set()


def num_parts(rig: DeploymentRig) -> int:
    """How many uploads are being written."""
    return len(list((rig.home / "files").glob(".*.part")))


def test_a_daemon_may_open_as_many_files_as_the_system_lets_it(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1_024, hard) - 1, hard))
    try:
        rig.ask("up", "-d")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert resource.prlimit(rig.pid_of("daemon"), resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_daemon_without_enough_memory_refuses_in_one_line(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with rig.start("up") as starting:
        resource.prlimit(starting.pid, resource.RLIMIT_AS, (900_000_000, limits[1]))
        _, said = starting.communicate(timeout=WAIT_S)

    assert (starting.returncode, said.count("\n")) == (2, 1), said
    assert "a daemon needs 1,000 MB of address space, and 900 are allowed: raise" in said


@pytest.mark.slow
async def test_slow_uploads_leave_files_to_the_daemon_for_its_work(rig: DeploymentRig) -> None:
    rig.use_fake_engine(window={"requests": 4})
    rig.ask("up", "-d")
    daemon = rig.pid_of("daemon")
    resource.prlimit(daemon, resource.RLIMIT_NOFILE, (NUM_OPEN_FILES, NUM_OPEN_FILES))

    async with slow_uploads(rig, NUM_UPLOADS) as uploads:
        refused = [upload for upload in uploads if upload.is_answered.is_set()]
        held = [upload for upload in uploads if upload not in refused]
        job = await asyncio.to_thread(rig.complete_job, 100)
        another = await asyncio.to_thread(ask, rig, "GET", "/batches")

    assert (another.status_code, rig.job(job)["num_completed"]) == (200, 100)
    assert len(refused) == NUM_UPLOADS - MOST_UPLOADS
    for upload in refused:
        head, _, body = bytes(upload.answer).partition(b"\r\n\r\n")
        assert upload.status == 503, body
        assert b"retry-after: 2" in head.lower()
        assert json.loads(body)["error"]["type"] == "server_error"
    assert [upload.status for upload in held] == [200] * MOST_UPLOADS
    with deployment_client(rig) as client:
        assert len(client.openai.files.list().data) == MOST_UPLOADS
    assert psutil.Process(daemon).is_running() and rig.pid_of("daemon") == daemon


@pytest.mark.slow
def test_what_the_system_refuses_for_a_while_ends_no_daemon(rig: DeploymentRig) -> None:
    rig.use_fake_engine()
    rig.ask("up", "-d")
    daemon = rig.pid_of("daemon")
    record = rig.home / "run" / "gateway-process.json"
    kept = record.rename(record.with_suffix(".kept"))
    record.mkdir()
    wait_for_text(rig.home / "log" / "daemon.log", "the gateway cannot be watched")
    record.rmdir()
    kept.rename(record)

    rig.complete_job(10)

    assert psutil.Process(daemon).is_running() and rig.pid_of("daemon") == daemon


@pytest.mark.nightly
async def test_a_failure_is_told_even_when_an_upload_holds_up_the_end(rig: DeploymentRig) -> None:
    go = rig.folder / "go"
    command = ["sh", "-c", f"until [ -e {go} ]; do sleep 0.1; done; exit 1"]
    rig.configure({"command": command, "port": rig.engine_port})
    with rig.start("up") as starting:
        wait_for_text(rig.home / "log" / "gateway.log", "listening")
        async with slow_uploads(rig, 1) as (upload,):
            go.touch()
            _, said = await asyncio.to_thread(starting.communicate, timeout=WAIT_S)
            upload.is_answered.set()

    assert (starting.returncode, "engine 0 ended" in said) == (4, True), said


def wait_for_text(path: Path, text: str) -> None:
    """Wait until a log has it."""
    deadline_s = time.monotonic() + WAIT_S
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline_s, f"{path} never had {text!r}"
        time.sleep(0.05)
