"""Sizes at the bounds: checks 15 and 34 of the API's specification."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import openai
import pytest
from batch_rig import Caller, chat_line, chat_lines, counts, errors, offline_work_held
from deployment_rig import DeploymentRig
from raw_http import FORM_END, FORM_HEADERS, RawHttp, file_head, form_field

MIB = 2**20
UPLOAD_BYTES = 200 * MIB
MAX_GROWTH_BYTES = 60 * 10**6
MAX_REQUESTS = 50_000


class PeakMemory:
    """The most memory that the processes of a deployment ever had, since this was made."""

    def __init__(self, rig: DeploymentRig) -> None:
        self._pids = [rig.pid_of(part) for part in ("daemon", "gateway")]
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = [_peak_bytes(pid) for pid in self._pids]

    def growth_bytes(self) -> list[int]:
        """By how much each has grown: daemon, gateway."""
        pairs = zip(self._pids, self._before, strict=True)
        return [_peak_bytes(pid) - before for pid, before in pairs]


def _peak_bytes(pid: int) -> int:
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


def pieces_of_a_file() -> Iterator[bytes]:
    """`UPLOAD_BYTES` of JSON lines, a MiB at a time."""
    text = json.dumps(chat_line("", "x" * (MIB - 200)))
    for number in range(UPLOAD_BYTES // MIB):
        line = text.replace('"custom_id": ""', f'"custom_id": "row-{number}"')
        yield line.encode().ljust(MIB - 1) + b"\n"


def upload_in_pieces(raw: RawHttp, digest: hashlib._Hash) -> str:
    """Upload that file without ever holding it; its id."""
    head, tail = form_field("purpose", "batch") + file_head(), b"\r\n" + FORM_END

    def pieces() -> Iterator[bytes]:
        yield head
        for piece in pieces_of_a_file():
            digest.update(piece)
            yield piece
        yield tail

    length = len(head) + UPLOAD_BYTES + len(tail)
    headers = {**FORM_HEADERS, "Content-Length": str(length)}
    reply = raw.call("POST", "/v1/files", pieces(), headers)
    assert reply.status == 200, reply.body
    assert reply.json["bytes"] == UPLOAD_BYTES
    return str(reply.json["id"])


def hash_of_content(port: int, file_id: str) -> str:
    """The hash of a file's content, read in pieces."""
    digest = hashlib.sha256()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with closing(connection):
        connection.request("GET", f"/v1/files/{file_id}/content")
        response = connection.getresponse()
        while piece := response.read(MIB):
            digest.update(piece)
    return digest.hexdigest()


@pytest.mark.slow
def test_15_a_large_file_is_never_held_in_memory(
    caller: Caller, raw: RawHttp, batch_rig: DeploymentRig
) -> None:
    """A 200 MiB upload does not raise server memory by a multiple of its size (raw, slow)."""
    peak, digest = PeakMemory(batch_rig), hashlib.sha256()

    file_id = upload_in_pieces(raw, digest)
    uploaded = peak.growth_bytes()
    assert hash_of_content(batch_rig.port, file_id) == digest.hexdigest()
    downloaded = peak.growth_bytes()
    with offline_work_held(batch_rig):
        batch = caller.wait_for_status(caller.create(file_id).id, "in_progress")
        validated = peak.growth_bytes()
        caller.cancel(batch.id)
    caller.files.delete(file_id)

    growths = [*uploaded, *downloaded, *validated]
    assert max(growths) < MAX_GROWTH_BYTES, growths


@pytest.mark.nightly
def test_15_a_batch_input_over_200_mib_never_runs(caller: Caller) -> None:
    """A batch input over 209715200 bytes is refused, at the upload (413) or as a failed batch."""
    content = b"".join(pieces_of_a_file()) + json.dumps(chat_line("one too many")).encode()

    try:
        file_id = caller.upload(content).id
    except openai.APIStatusError as error:
        assert (error.status_code, error.param) == (413, "file")
    else:
        assert errors(caller.run(file_id)) == [("file_too_large", None, None)]


@pytest.mark.nightly
def test_34_fifty_thousand_lines_pass(caller: Caller) -> None:
    """50,000 lines pass."""
    created = caller.create(chat_lines(MAX_REQUESTS))

    batch = caller.wait_for_status(created.id, "in_progress", "finalizing", "completed")

    assert counts(batch)[0] == MAX_REQUESTS
    caller.batches.cancel(batch.id)
    assert counts(caller.wait_until_ended(batch.id))[0] == MAX_REQUESTS


def test_34_one_line_more_fails(caller: Caller) -> None:
    """50,001 fail."""
    failed = caller.run(chat_lines(MAX_REQUESTS + 1))

    assert failed.status == "failed"
    assert errors(failed) == [("too_many_tasks", None, None)]
    assert counts(failed) == (0, 0, 0)
