"""Requests that nobody sends in good faith: each is refused with the envelope and changes nothing.

What callers send slowly is in `test_security_slow.py`, files are in `test_security_files.py`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator
from socket import gethostname

import pytest
from batch_rig import CHAT, ENVELOPE, MODEL
from deployment_rig import JOB_FILE, DeploymentRig
from gateway_rig import running_engine
from raw_http import RawHttp, exchange

JSON = {"Content-Type": "application/json"}
JSON_LINE = "Content-Type: application/json\r\n"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BODY_ROUTES = [
    CHAT,
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/files",
    "/v1/batches",
    "/v1/batches/batch_x/cancel",
]
LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module", autouse=True)
def all_stays_as_it_was(batch_rig: DeploymentRig) -> Iterator[None]:
    """Daemon and gateway live on, and neither a row nor a file is left by these tests."""
    before = {what: batch_rig.pid_of(what) for what in ("daemon", "gateway", "engine")}
    files, executions = _files(batch_rig), len(batch_rig.executions())
    yield
    assert {what: batch_rig.pid_of(what) for what in before} == before
    raw = RawHttp(batch_rig.port)
    assert [raw.get(path).status for path in ("/healthz", "/readyz", "/v1/files")] == [200] * 3
    assert _files(batch_rig) == files
    began = batch_rig.executions()[executions:]
    assert all("smuggled" not in json.dumps(execution) for execution in began)


def _files(rig: DeploymentRig) -> list[str]:
    return sorted(path.name for path in (rig.home / "files").iterdir())


def check_refused(answer: bytes, *statuses: int) -> None:
    """One answer and no second: what stood behind the refused request was not taken for one."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.count(b"HTTP/1.") == 1, answer
    assert int(head.split()[1]) in (statuses or (400,)), answer
    assert b"\r\nx-request-id: " in head.lower()
    assert set(json.loads(body)["error"]) == ENVELOPE


FRAMINGS = [
    b"Content-Length: 5\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    b"Content-Length: 5\r\nContent-Length: 5",
    b"Content-Length: 5\r\nContent-Length: 70",
    b"Content-Length: 5, 5",
    b"Content-Length: +5",
    b"Content-Length: -5",
    b"Content-Length: 0x5",
    b"Content-Length: 5_0",
    b"Content-Length: \xd9\xa5",
    b"Content-Length:",
    b"Content-Length: 99999999999999999999999",
    b"Content-Length : 5",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: \x0bchunked",
    b'Transfer-Encoding: "chunked"',
    b"Transfer-Encoding:",
    b"Transfer-Encoding:\r\n chunked",
    b"X-A: b\r\n Transfer-Encoding: chunked\r\nContent-Length: 5",
    b"X-A: b\r\n\tContent-Length: 70\r\nContent-Length: 5",
    b"X-A: b\nTransfer-Encoding: chunked\nContent-Length: 5",
    b"X-A: b\rTransfer-Encoding: chunked\r\nContent-Length: 5",
    b"X-A: a\0b\r\nContent-Length: 5",
    b"X A: b\r\nContent-Length: 5",
    b"X-\xff: b\r\nContent-Length: 5",
    b": b\r\nContent-Length: 5",
    b"no colon\r\nContent-Length: 5",
]


@pytest.mark.parametrize("path", [CHAT, "/v1/files", "/v1/batches"])
def test_where_a_body_ends_is_never_in_doubt(batch_rig: DeploymentRig, path: str) -> None:
    hidden = json.dumps(HELLO | {"user": "smuggled"}).encode()
    behind = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(hidden)}\r\n\r\n".encode()
    )
    for framing in FRAMINGS:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{JSON_LINE}".encode()
        request = head + framing + b"\r\n\r\n0\r\n\r\n" + behind + hidden
        check_refused(exchange(batch_rig.port, request + LAST))


@pytest.mark.parametrize(
    "chunks",
    [
        b"-1\r\n{}\r\n0\r\n\r\n",
        b"0x2\r\n{}\r\n0\r\n\r\n",
        b"2\n{}\n0\n\n",
        b"2 \r\n{}\r\n0\r\n\r\n",
        b"2\r\n{}x\r\n0\r\n\r\n",
        b"ffffffffffffffffff\r\n{}",
        b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/files", "/v1/batches"])
def test_chunks_that_are_none_are_refused(
    batch_rig: DeploymentRig, path: str, chunks: bytes
) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    check_refused(exchange(batch_rig.port, head.encode() + chunks))


def test_an_odd_spelling_of_a_good_framing_is_understood(batch_rig: DeploymentRig) -> None:
    body = json.dumps(HELLO).encode()
    chunked = f"{len(body):X};a=b\r\n".encode() + body + b"\r\n0\r\nX-Vllm-Priority: -1\r\n\r\n"
    for framing in ("Transfer-Encoding:\tchunked", "transfer-encoding: ChUnKeD"):
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{JSON_LINE}{framing}"
        answer = exchange(batch_rig.port, head.encode() + b"\r\n\r\n" + chunked + LAST)
        assert answer.count(b"HTTP/1.1 200 OK") == 2, answer


@pytest.mark.parametrize(
    "start",
    [
        b"GET healthz HTTP/1.1",
        b"GET /v1/files/a\0b HTTP/1.1",
        b"GET /v1/files/\xff HTTP/1.1",
        b"GET /v1/files/a b HTTP/1.1",
        b"GET http://[::1 HTTP/1.1",
        b"GET http://x:99999/healthz HTTP/1.1",
        b"GET /healthz HTTP/9.9",
        b"PRI * HTTP/2.0",
        b"FOO /healthz HTTP/1.1",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1",
        b"GET /healthz HTTP/1.1\r\nHost: y",
        b"GET /healthz HTTP/1.1\r\nX-A: " + b"a" * 20_000,
        b"GET /healthz HTTP/1.1\r\nX-A: " + b"a" * 9_000_000,
        b"GET /healthz HTTP/1.1" + b"\r\nX-A: a" * 500,
    ],
    ids=lambda start: str(start[:32]),
)
def test_a_head_that_is_none_is_refused(batch_rig: DeploymentRig, start: bytes) -> None:
    check_refused(exchange(batch_rig.port, start + b"\r\nHost: localhost\r\n\r\n" + LAST))


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://127.0.0.1:1/v1/models", 200),
        ("http://user:word@elsewhere/v1/models", 200),
        ("//127.0.0.1:1/v1/models", 404),
        ("/v1/../batchrun/v1/status", 404),
        ("/v1/files/../../batchrun/v1/status", 404),
        ("/v1/files/%2e%2e/%2e%2e/batchrun/v1/status", 404),
        ("/batchrun/v1/status", 404),
        ("/v1/chat%2fcompletions", 404),
        ("/v1/files@elsewhere/", 404),
        ("*", 400),
    ],
)
def test_a_target_leads_nowhere_else(batch_rig: DeploymentRig, target: str, status: int) -> None:
    request = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = exchange(batch_rig.port, request.encode())
    assert int(answer.split()[1]) == status, answer
    assert status == 200 or set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == ENVELOPE


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:8000"},
        {"Host": "localhost.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_without_keys_pages_of_other_sites_get_nothing(
    raw: RawHttp, headers: dict[str, str]
) -> None:
    for path in BODY_ROUTES:
        reply = raw.call("POST", path, json.dumps(HELLO | {"user": "smuggled"}).encode(), headers)
        assert (reply.status, set(reply.json["error"])) == (403, ENVELOPE)
    if "Host" in headers:
        assert raw.call("GET", "/v1/files", None, headers).status == 403
        assert raw.call("GET", "/healthz", None, headers).status == 200


@pytest.mark.parametrize(
    "host", ["localhost:1", "LOCALHOST.", "a.localhost", "192.0.2.7:80", "[::1]:1", gethostname()]
)
def test_without_keys_this_machine_is_called_by_its_names_and_any_address(
    raw: RawHttp, host: str
) -> None:
    headers = {"Host": host, "Origin": f"http://{host}"}
    assert raw.call("GET", "/v1/models", None, headers).status == 200
    assert raw.call("POST", CHAT, json.dumps(HELLO).encode(), headers | JSON).status == 200


BOMB = b" " * 20_000_000
RAW_DEFLATE = zlib.compressobj(9, zlib.DEFLATED, -15)
BOMBS = [
    ("gzip", gzip.compress(BOMB)),
    ("GZIP", gzip.compress(BOMB)),
    ("x-gzip", gzip.compress(BOMB)),
    ("gzip, gzip", gzip.compress(gzip.compress(BOMB))),
    ("identity, gzip", gzip.compress(BOMB)),
    ("deflate", zlib.compress(BOMB)),
    ("deflate", RAW_DEFLATE.compress(BOMB) + RAW_DEFLATE.flush()),
    ("br", b"\x1b\xff\xff\x7f"),
    ("zstd", b"\x28\xb5\x2f\xfd"),
    ("", b"{}"),
]


@pytest.mark.parametrize("path", BODY_ROUTES)
def test_compressed_bodies_are_refused_unopened(batch_rig: DeploymentRig, path: str) -> None:
    raw = RawHttp(batch_rig.port)
    for coding, body in BOMBS:
        reply = raw.call("POST", path, body, {**JSON, "Content-Encoding": coding})
        assert (reply.status, set(reply.json["error"])) == (415, ENVELOPE), coding
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    packed = gzip.compress(json.dumps(HELLO | {"user": "smuggled"}).encode())
    for codings in (
        f"Content-Encoding: identity\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}",
        f"Content-Encoding: gzip\r\nContent-Encoding: identity\r\nContent-Length: {len(packed)}",
        "Transfer-Encoding: gzip, chunked",
    ):
        chunk = f"{len(packed):x}\r\n".encode() + packed + b"\r\n0\r\n\r\n"
        body = chunk if "chunked" in codings else packed
        request = f"{head}{codings}\r\nConnection: close\r\n\r\n".encode() + body
        check_refused(exchange(batch_rig.port, request), 415)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_its_cap_is_refused(raw: RawHttp, *, is_chunked: bool) -> None:
    """The batch's own; that of online calls is in `test_gateway_passing.py`."""
    document = json.dumps({"metadata": {"a": "x" * (2 << 20)}}).encode()
    body = iter([document[:1000], document[1000:]]) if is_chunked else document

    reply = raw.call("POST", "/v1/batches", body, JSON)

    assert (reply.status, set(reply.json["error"])) == (413, ENVELOPE)


@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
def test_a_length_over_the_cap_is_refused_before_the_body(raw: RawHttp, path: str) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=x", "Content-Length": "9" * 15}

    reply = raw.call("POST", path, b"--x", headers)

    assert (reply.status, set(reply.json["error"])) == (413, ENVELOPE)


@pytest.mark.parametrize("path", BODY_ROUTES)
def test_deep_nesting_is_refused(raw: RawHttp, path: str) -> None:
    for opening in (b'{"priority":', b'{"metadata":', b'{"vllm_xargs":', b"["):
        reply = raw.call("POST", path, opening + b"[" * 1_000_000, JSON)
        assert 400 <= reply.status < 500, reply.body
        assert set(reply.json["error"]) == ENVELOPE


def test_metadata_and_ids_hold_no_half_characters(raw: RawHttp) -> None:
    good = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
    for document in (
        good | {"metadata": {"a": "\ud800"}},
        good | {"metadata": {"\udfff": "a"}},
        good | {"input_file_id": "file-\0"},
        good | {"input_file_id": "file-\ud800"},
    ):
        reply = raw.post("/v1/batches", document, **{"Idempotency-Key": "a"})
        assert (reply.status, set(reply.json["error"])) == (400, ENVELOPE), document


@pytest.mark.slow
async def test_a_row_has_no_priority_of_its_own(rig: DeploymentRig) -> None:
    """Not even at an engine that batchrun is not to send priorities to."""
    job = JOB_FILE.replace("temperature: 0", "temperature: 0, priority: -9")
    async with running_engine() as engine:
        rig.configure({"attach": engine.url})
        job_id = await asyncio.to_thread(rig.submit_rows, "a", "b", job=job)
        view = await asyncio.to_thread(rig.wait_until_ended, job_id)
        bodies = [seen.json for seen in engine.seen if seen.body]

    assert (view["state"], view["num_completed"]) == ("completed", 2)
    assert len(bodies) == 2 and not any("priority" in body for body in bodies)
