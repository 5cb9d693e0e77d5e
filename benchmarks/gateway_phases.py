"""What keeps a daemon busy while `gateway_cost` looks at its gateway, one phase after the other."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.home import Home
from batchrun.jobs.job_file import load_job_file
from batchrun.jobs.submit import prepare_job
from batchrun.store import jobs, results
from batchrun.store.database import open_store
from benchmarks.deployment import answer_of
from benchmarks.gateway_rig import GatewayRig, Window
from benchmarks.paced import CHAT, MODEL
from benchmarks.store import outcomes, write_workload

Record = dict[str, object]

MIB = 1 << 20
FILE_BYTES = 200 * MIB
FILE_LINES = 50_000
NUM_VALIDATIONS = 8
SETTLE_S = 3.0
CHUNK_ROWS = 100_000
COMMIT_ROWS = 4_000
BOUNDARY = "gateway-cost"
SUBMITTED_JOB = """\
name: submitted
input: {path: short.parquet, id: id, messages: [{role: user, content: "{{ text }}"}]}
request: {max_tokens: 8, temperature: 0}
output: {path: submitted-out.parquet}
"""


def write_short_rows(folder: Path, num_rows: int) -> None:
    """The input of the job that is submitted."""
    schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(folder / "short.parquet", schema) as file:
        for start in range(0, num_rows, CHUNK_ROWS):
            rows = range(start, min(start + CHUNK_ROWS, num_rows))
            texts = [f"In one word: what is the colour of number {row}?" for row in rows]
            file.write_table(pa.table([[f"row-{row}" for row in rows], texts], schema=schema))
    (folder / "submitted.yaml").write_text(SUBMITTED_JOB)


def write_finished_rows(folder: Path, num_rows: int) -> str:
    """A home with a paused job that has all of its results and no output file; the job's id."""
    workload = write_workload(folder, num_rows)
    home = Home(folder / "home")
    home.create()
    with closing(open_store(home.store_location)) as store:
        spec = load_job_file(workload.job_file, cwd=folder)
        job = jobs.create(store, prepare_job(spec, links=home.inputs), now_s=time.time())
        jobs.start(store, job.id, now_s=time.time())
        entries = ((job.seq, outcome) for outcome in outcomes(workload, np.arange(num_rows)))
        while batch := list(islice(entries, COMMIT_ROWS)):
            results.commit(store, batch, now_s=time.time())
        jobs.pause(store, job.id, "its results are written")
    workload.bodies.unlink()
    return job.id


def submit(rig: GatewayRig) -> Iterator[tuple[Window, Record]]:
    """A million rows: checked and pinned by the command, then read and ordered by the daemon."""
    window = Window("submit")
    with rig.watched(window):
        began_s = time.monotonic()
        job_id = str(rig.batchrun("submit", "submitted.yaml")["id"])
        command_s = time.monotonic() - began_s
        rig.wait_for_job(job_id, "running")
    yield window, {"command_s": command_s}
    rig.batchrun("cancel", job_id)
    rig.wait_for_job(job_id, "cancelled")


def transfer_and_validate(rig: GatewayRig) -> Iterator[tuple[Window, Record]]:
    """200 MiB and 50,000 lines up, validated several times, and down again."""
    lines = _lines()
    memory = _PeakMemory(rig.daemon_pid)
    up, validation, down = Window("upload"), Window("validate"), Window("download")
    with rig.watched(up):
        file_id, digest = _upload(rig.port, lines)
    yield up, {"bytes": FILE_BYTES, "daemon_growth_bytes": memory.growth_bytes()}
    with rig.watched(down):
        assert _download(rig.port, file_id) == digest
    yield down, {"bytes": FILE_BYTES, "daemon_growth_bytes": memory.growth_bytes()}
    growths = []
    for _ in range(NUM_VALIDATIONS):
        with rig.watched(validation):
            batch_id = _create_batch(rig.port, file_id)
            _wait_for_batch(rig.port, batch_id, "in_progress")
        growths.append(memory.growth_bytes())
        _ask(rig.port, "POST", f"/v1/batches/{batch_id}/cancel")
        _wait_for_batch(rig.port, batch_id, "cancelled")
    longest_s = max(end - begin for begin, end in validation.spans)
    more = {"first_growth_bytes": growths[0], "last_growth_bytes": growths[-1]}
    yield validation, {"lines": FILE_LINES, "longest_s": longest_s, **more}


def export(rig: GatewayRig, job_id: str) -> Iterator[tuple[Window, Record]]:
    """A million results, written by the daemon at the job's end and by `batchrun results` too."""
    window = Window("export")
    rig.batchrun("resume", job_id)
    rig.wait_for_job(job_id, "finalizing", "completed")
    with rig.watched(window), rig.start_command("results", job_id, "-o", "copy.parquet") as copy:
        began_s = time.monotonic()
        rig.wait_for_job(job_id, "completed")
        daemon_s = time.monotonic() - began_s
        answer_of(copy)
        command_s = time.monotonic() - began_s
    num_rows = pq.read_metadata(rig.folder / "out.parquet").num_rows
    assert pq.read_metadata(rig.folder / "copy.parquet").num_rows == num_rows
    yield window, {"rows": num_rows, "daemon_s": daemon_s, "command_s": command_s}


def kill_daemon(rig: GatewayRig) -> float:
    """`kill -9` of the daemon; the instant, of CLOCK_MONOTONIC."""
    os.kill(rig.daemon_pid, signal.SIGKILL)
    killed_s = time.monotonic()
    time.sleep(SETTLE_S)
    return killed_s


class _PeakMemory:
    """By how much a process's resident memory has grown at most since this was made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = psutil.Process(pid).memory_info().rss

    def growth_bytes(self) -> int:
        text = Path(f"/proc/{self._pid}/status").read_text()
        (peak,) = (line for line in text.splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024 - self._before


def _lines() -> list[bytes]:
    """The file, a line each: `FILE_LINES` good lines of `FILE_BYTES` in all."""
    line_bytes = FILE_BYTES // FILE_LINES
    made = []
    for index in range(FILE_LINES):
        messages = [{"role": "user", "content": f"question {index} ".ljust(line_bytes - 300, "q")}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8}
        line = {"custom_id": f"row-{index}", "method": "POST", "url": CHAT, "body": body}
        made.append(json.dumps(line).encode().ljust(line_bytes - 1) + b"\n")
    made[-1] = made[-1][:-1].ljust(line_bytes - 1 + FILE_BYTES % FILE_LINES) + b"\n"
    return made


def _upload(port: int, lines: list[bytes]) -> tuple[str, str]:
    """The file's id and hash."""
    content = b"".join(lines)
    disposition = "Content-Disposition: form-data; name="
    head = (
        f'--{BOUNDARY}\r\n{disposition}"purpose"\r\n\r\nbatch\r\n'
        f'--{BOUNDARY}\r\n{disposition}"file"; filename="large.jsonl"\r\n\r\n'
    )
    body = b"".join([head.encode(), content, f"\r\n--{BOUNDARY}--\r\n".encode()])
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    document = _ask(port, "POST", "/v1/files", body, headers)
    assert document["bytes"] == FILE_BYTES, document
    return str(document["id"]), hashlib.sha256(content).hexdigest()


def _download(port: int, file_id: str) -> str:
    digest = hashlib.sha256()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("GET", f"/v1/files/{file_id}/content")
        response = connection.getresponse()
        while piece := response.read(MIB):
            digest.update(piece)
    return digest.hexdigest()


def _create_batch(port: int, file_id: str) -> str:
    wanted = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    headers = {"Content-Type": "application/json"}
    return str(_ask(port, "POST", "/v1/batches", json.dumps(wanted).encode(), headers)["id"])


def _wait_for_batch(port: int, batch_id: str, status: str) -> None:
    while (seen := _ask(port, "GET", f"/v1/batches/{batch_id}")["status"]) != status:
        if seen in {"failed", "expired", "completed"}:
            raise RuntimeError(f"{batch_id} is {seen}")
        time.sleep(0.02)


def _ask(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Record:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        document: Record = json.loads(reply.read())
    if reply.status != 200:
        raise RuntimeError(f"{method} {path} was answered with {reply.status}: {document}")
    return document
