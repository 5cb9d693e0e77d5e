"""Files of OpenAI's API, lists and errors, seen by the ordinary client and by raw HTTP."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from batch_client import (
    BATCH_PART,
    BatchClient,
    ask,
    chat_line,
    chat_lines,
    deployment_client,
    error_of,
)
from batch_rig import CHAT, ENVELOPE
from deployment_rig import DeploymentRig
from openai import BadRequestError, NotFoundError
from openai.types import FileObject
from postgres_server import PostgresServer

from batchrun.home import Home


@pytest.fixture(scope="module")
def shared_rig(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[DeploymentRig]:
    """One deployment for the tests of this module that do not disturb it."""
    made = DeploymentRig(tmp_path_factory.mktemp("shared"))
    if request.config.getoption("--store") == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        made.store_url = server.new_database()
    made.use_fake_engine()
    made.ask("up", "-d")
    yield made
    made.close()


@pytest.fixture
def client(shared_rig: DeploymentRig) -> Iterator[BatchClient]:
    with deployment_client(shared_rig, max_retries=0) as made:
        yield made


CONTENT = b'{"a": "\xc3\xbc\xe2\x80\xa8"}\r\n\r\n{"b": 1}'


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (CONTENT, "upload"),
        (io.BytesIO(CONTENT), "upload"),
        (("grün \u2028.jsonl", CONTENT), "grün \u2028.jsonl"),
        (("../../etc/passwd.jsonl", CONTENT), "../../etc/passwd.jsonl"),
    ],
)
def test_a_file_comes_back_as_it_was_sent(
    shared_rig: DeploymentRig, client: BatchClient, file: Any, name: str
) -> None:
    made = client.openai.files.create(file=file, purpose="batch")

    assert (made.bytes, made.filename, made.status) == (len(CONTENT), name, "processed")
    assert made.expires_at == made.created_at + 2_592_000
    assert client.openai.files.content(made.id).content == CONTENT
    assert client.openai.files.wait_for_processing(made.id) == made
    raw = ask(shared_rig, "GET", f"/files/{made.id}").json()
    assert raw.keys() >= {"status_details", "object", "purpose"}
    assert re.fullmatch(r"file-[A-Za-z0-9]{22,24}", made.id)
    assert (shared_rig.home / "files" / made.id).read_bytes() == CONTENT


def test_a_deleted_file_is_unknown_everywhere(
    shared_rig: DeploymentRig, client: BatchClient
) -> None:
    made = client.openai.files.create(file=b"{}", purpose="batch")
    assert client.openai.files.delete(made.id).deleted

    for call in (client.openai.files.retrieve, client.openai.files.delete):
        with pytest.raises(NotFoundError) as unknown:
            call(made.id)
        assert (unknown.value.param, unknown.value.code) == ("id", None)
    with pytest.raises(NotFoundError, match=f"No such File object: {made.id}"):
        client.openai.files.content(made.id)
    with pytest.raises(NotFoundError, match="No such File object: a/b c"):
        client.openai.files.retrieve("a/b c")
    assert not (shared_rig.home / "files" / made.id).exists()


def test_a_file_that_is_not_for_batches_stays_and_is_not_given_back(client: BatchClient) -> None:
    made = client.openai.files.create(file=b"anything", purpose="user_data")
    assert made.expires_at is None

    with pytest.raises(BadRequestError, match="download files of purpose: user_data"):
        client.openai.files.content(made.id)

    batch = client.openai.batches.create(
        input_file_id=made.id, endpoint=CHAT, completion_window="24h"
    )
    failed = client.wait_until_ended(batch.id)
    assert failed.errors is not None and failed.errors.data is not None
    assert [error.param for error in failed.errors.data] == ["file_id"]


def test_an_expiry_is_honoured_within_its_bounds(client: BatchClient) -> None:
    def create(seconds: int) -> FileObject:
        return client.openai.files.create(
            file=b"{}",
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": seconds},
        )

    for seconds in (3_600, 2_592_000):
        made = create(seconds)
        assert made.expires_at == made.created_at + seconds
    for seconds in (3_599, 2_592_001):
        with pytest.raises(BadRequestError) as refusal:
            create(seconds)
        assert refusal.value.param == "expires_after.seconds"


NOT_JSONL = "Invalid file format for Batch API. Must be .jsonl"


@pytest.mark.parametrize(
    ("options", "status", "param", "message"),
    [
        ({"files": BATCH_PART}, 400, "file", "Missing required parameter: 'file'."),
        ({"files": {"file": ("a.jsonl", b"{}")}}, 400, "purpose", "Missing required"),
        ({"data": {"purpose": "batch"}}, 400, "file", "Missing required"),
        ({"json": {"purpose": "batch"}}, 400, "file", "Missing required"),
        (
            {"files": {"purpose": (None, "x"), "file": ("a", b"{}")}},
            400,
            "purpose",
            "Invalid value",
        ),
        ({"files": {**BATCH_PART, "file": ("a.jsonl", b"")}}, 400, None, NOT_JSONL),
        ({"files": {**BATCH_PART, "file": ("a.jsonl", b" \n ")}}, 400, None, NOT_JSONL),
        ({"files": {**BATCH_PART, "file": ("a.jsonl", b"one\n{}")}}, 400, None, NOT_JSONL),
        ({"files": {**BATCH_PART, "file": ("a.txt", b"{}")}}, 400, None, NOT_JSONL),
        ({"content": b"x", "headers": {"Content-Encoding": "gzip"}}, 415, None, "Content-Encoding"),
    ],
)
def test_an_upload_that_is_refused_leaves_nothing(
    shared_rig: DeploymentRig, options: dict[str, Any], status: int, param: str, message: str
) -> None:
    before = sorted((shared_rig.home / "files").iterdir())

    reply = ask(shared_rig, "POST", "/files", **options)

    error = error_of(reply)
    assert (reply.status_code, error["param"]) == (status, param)
    assert message in error["message"]
    assert sorted((shared_rig.home / "files").iterdir()) == before


def test_pages_hold_every_file_once(shared_rig: DeploymentRig, client: BatchClient) -> None:
    made = [client.openai.files.create(file=b"x", purpose="evals").id for _ in range(5)]

    found = [file.id for file in client.openai.files.list(purpose="evals", limit=2)]
    upward = [file.id for file in client.openai.files.list(purpose="evals", order="asc")]
    last = client.openai.files.list(purpose="evals", limit=2, after=found[2])

    assert found == upward[::-1] == made[::-1]
    assert (last.has_more, [file.id for file in last.data]) == (False, found[3:])
    raw = ask(shared_rig, "GET", "/files?purpose=evals&limit=2").json()
    assert (raw["first_id"], raw["last_id"], raw["has_more"]) == (made[4], made[3], True)
    none = ask(shared_rig, "GET", "/files?purpose=vision").json()
    assert (none["data"], none["first_id"], none["has_more"]) == ([], None, False)


def test_pages_hold_every_batch_once_newest_first(
    shared_rig: DeploymentRig, client: BatchClient
) -> None:
    made = [client.create(chat_lines(1)).id for _ in range(3)]

    found = [batch.id for batch in client.openai.batches.list(limit=1)]

    assert found[:3] == made[::-1]
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("method", "path", "status", "param", "code"),
    [
        ("GET", "/files?limit=0", 400, None, None),
        ("GET", "/files?limit=10001", 400, None, None),
        ("GET", "/files?limit=abc", 400, None, None),
        ("GET", "/files?order=up", 400, "order", "invalid_value"),
        ("GET", "/files?after=file-x", 404, "after", None),
        ("GET", "/batches?limit=0", 400, "limit", "integer_below_min_value"),
        ("GET", "/batches?limit=101", 400, "limit", "integer_above_max_value"),
        ("GET", "/batches?limit=abc", 400, "limit", "invalid_type"),
        ("GET", "/batches?after=batch_x", 404, "after", None),
        ("GET", "/batches/nope", 400, "batch_id", "invalid_value"),
        ("GET", "/batches/batch_x", 404, None, None),
        ("POST", "/batches/batch_x/cancel", 404, None, None),
        ("GET", "/batches/a%2Fb", 400, "batch_id", "invalid_value"),
        ("GET", "/batches/batch_%00%ff", 404, None, None),
        ("GET", "/files/%00%ff", 404, "id", None),
        ("DELETE", "/batches/batch_x", 405, None, None),
        ("PATCH", "/files", 405, None, None),
        ("GET", "/batches/../batchrun/v1/status", 400, "batch_id", "invalid_value"),
        ("GET", "/filesystem", 404, None, None),
    ],
)
def test_what_cannot_be_answered_wears_the_envelope(
    shared_rig: DeploymentRig, method: str, path: str, status: int, param: str, code: str
) -> None:
    # httpx would tidy the path up.
    head = f"{method} /v1{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", shared_rig.port), timeout=30) as connection:
        connection.sendall(head.encode())
        reply = b"".join(iter(lambda: connection.recv(65_536), b""))

    header, _, body = reply.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert int(header.split()[1]) == status, body
    assert b"x-request-id: " in header.lower()
    assert (error.keys(), error["param"], error["code"]) == (ENVELOPE, param, code)


@pytest.mark.parametrize(
    "body", [b"", b"nope", b"[1]", b"null", b'{"a": NaN}', b'"\\ud800"', b"[" * 9_000, b"\xff"]
)
def test_a_body_that_is_no_json_object_is_refused(shared_rig: DeploymentRig, body: bytes) -> None:
    reply = ask(shared_rig, "POST", "/batches", content=body)

    assert reply.status_code == 400
    error_of(reply)


def test_text_in_every_alphabet_goes_through(client: BatchClient) -> None:
    custom_id = 'say "hi"\n\u2028\U0001f600\\' + "ü" * 500
    metadata = {"grün \u2028": "\U0001f600" * 512}

    made = client.create([chat_line(custom_id)], metadata=metadata)
    batch = client.wait_until_ended(made.id)

    assert (batch.status, batch.metadata) == ("completed", metadata)
    (line,) = client.lines(batch.output_file_id)
    assert line["custom_id"] == custom_id


def test_files_of_results_have_names_and_an_expiry(client: BatchClient) -> None:
    expiry = {"anchor": "created_at", "seconds": 3600}
    made = client.create(chat_lines(2), output_expires_after=expiry)
    batch = client.wait_until_ended(made.id)
    assert batch.output_file_id is not None

    file = client.openai.files.retrieve(batch.output_file_id)

    assert (file.filename, file.purpose) == (f"{batch.id}_output.jsonl", "batch_output")
    assert file.expires_at == file.created_at + 3600
    assert file.id in {listed.id for listed in client.openai.files.list(purpose="batch_output")}
    client.openai.files.delete(file.id)
    assert client.openai.batches.retrieve(batch.id).output_file_id == file.id


def test_the_daemon_answers_the_gateway_only(shared_rig: DeploymentRig) -> None:
    address = Home(shared_rig.home).read_daemon_address()
    assert address is not None
    for headers in ({}, {"Authorization": f"Bearer {address.token}"}, {"X-Batchrun-Gateway": "x"}):
        reply = httpx.get(f"{address.url}/v1/files", headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["message"] == "ask the gateway, not the daemon"

    through = ask(shared_rig, "GET", "/files", headers={"X-Batchrun-Gateway": "x"})

    assert through.status_code == 200
    assert address.token not in (shared_rig.home / "run" / "upstreams.json").read_text()


def test_a_flex_call_runs_below_online_calls_where_engines_have_priorities(
    shared_rig: DeploymentRig, client: BatchClient
) -> None:
    create = client.openai.chat.completions.create
    reply = create(model="fake", messages=[{"role": "user", "content": "a"}], service_tier="flex")

    assert reply.service_tier == "flex"
    upstreams = shared_rig.home / "run" / "upstreams.json"
    assert upstreams.stat().st_mode & 0o777 == 0o600


def test_a_large_upload_that_is_refused_early_hears_why(shared_rig: DeploymentRig) -> None:
    files = {"purpose": (None, "nonsense"), "file": ("a.jsonl", b"x" * 30_000_000)}

    reply = ask(shared_rig, "POST", "/files", files=files)

    assert (reply.status_code, error_of(reply)["param"]) == (400, "purpose")
