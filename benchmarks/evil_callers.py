"""Callers in bad faith, each with the promise that it tests; beside them others are served."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import requests

from benchmarks.deployment import wait_until
from benchmarks.evil_scene import CHAT, HELLO, Api, Scene, jsonl, line_of

REFUSED = range(400, 500)
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BadCaller:
    """`act` raises AssertionError when the promise is broken."""

    name: str
    promise: str
    act: Callable[[Scene], None]


def _refused(make: Callable[[Api], requests.Response], *statuses: int) -> Callable[[Scene], None]:
    """The call that is made must be refused."""

    def act(scene: Scene) -> None:
        reply = make(scene.bad)
        assert reply.status_code in (statuses or REFUSED), f"{reply.status_code} {reply.text[:300]}"

    return act


def _batch_fails(*lines: object) -> Callable[[Scene], None]:
    """A batch of these lines must fail with errors, or the upload be refused."""

    def act(scene: Scene) -> None:
        made = scene.bad.upload(jsonl(*lines))
        if made.status_code in REFUSED:
            return
        batch = scene.bad.ended(str(scene.bad.create(made.json()["id"]).json()["id"]))
        assert batch["status"] == "failed" and batch["errors"]["data"], batch["status"]

    return act


def _batch_ends(num_failed: int, *lines: object) -> Callable[[Scene], None]:
    """A batch of these lines must end, with so many failed rows."""

    def act(scene: Scene) -> None:
        batch = scene.bad.ended(scene.bad.started(jsonl(*lines)))
        counts = batch["request_counts"]
        assert (batch["status"], counts["failed"]) == ("completed", num_failed), batch

    return act


def _answered_once(content: bytes | Callable[[Scene], bytes]) -> Callable[[Scene], None]:
    """Raw bytes must get one refusal at most, and be taken for no call behind it."""

    def act(scene: Scene) -> None:
        answer = scene.raw(content if isinstance(content, bytes) else content(scene))
        statuses = [int(part[1:].split()[1]) for part in answer.split(b"HTTP/1")[1:]]
        assert all(status in REFUSED for status in statuses) and len(statuses) <= 1, answer[:500]

    return act


def _begin_and_leave(
    *headers: str, body: bytes = b"", path: str = "/v1/files"
) -> Callable[[Scene], None]:
    """Many calls that are begun and left without an end."""

    def act(scene: Scene) -> None:
        for _ in range(30):
            scene.raw(scene.head(path, *headers) + body, then=lambda connection: connection.close())
        assert not [
            each for each in scene.rig.home.files.iterdir() if each.suffix == ".part"
        ] or _gone(scene)

    return act


def _gone(scene: Scene) -> bool:
    wait_until(lambda: not list(scene.rig.home.files.glob(".*.part")), "half uploads to go")
    return True


def _at_once(num_calls: int, work: Callable[[int], requests.Response], *statuses: int) -> None:
    with ThreadPoolExecutor(32) as pool:
        found = {reply.status_code for reply in pool.map(work, range(num_calls))}
    assert found <= set(statuses), found


def _flood_batches(scene: Scene) -> None:
    file = scene.bad.upload(jsonl(line_of("a"))).json()["id"]
    _at_once(100, lambda _: scene.bad.create(file), 200, 429, 503)


def _flood_one_key(scene: Scene) -> None:
    file = scene.bad.upload(jsonl(line_of("a"))).json()["id"]
    # Until there is room for one more: others of this key have just been made.
    wait_until(lambda: scene.bad.create(file).status_code == 200, "a batch to be taken")
    make = partial(scene.bad.create, file, headers={"Idempotency-Key": "one"})
    with ThreadPoolExecutor(32) as pool:
        replies = [*pool.map(lambda _: make(), range(40))]
    made = {reply.json()["id"] for reply in replies if reply.status_code == 200}
    refused = {reply.status_code for reply in replies} - {200}
    assert len(made) == 1 and refused <= {429, 503}, (made, refused)


def _flood_cancels(scene: Scene) -> None:
    batch = scene.bad.started(jsonl(*(line_of(str(row)) for row in range(200))))
    path = f"/v1/batches/{batch}/cancel"
    _at_once(60, lambda _: scene.bad.call("POST", path), 200, 409, 503)
    counts = scene.bad.ended(batch)["request_counts"]
    assert counts["completed"] + counts["failed"] <= counts["total"] <= 200, counts


def _flood_files(scene: Scene) -> None:
    _at_once(300, lambda _: scene.bad.upload(jsonl(line_of("a"))), 200, 503)


def _flood_wrong_keys(scene: Scene) -> None:
    wrong = Api(scene.bad.url, "sk-br-wrong")
    _at_once(200, lambda _: wrong.call("GET", "/v1/files"), 401)


def _upload_slowly(scene: Scene) -> None:
    """Many uploads that never end, and one that does."""
    with ExitStack() as exits:
        head = scene.head(
            "/v1/files",
            "Content-Type: multipart/form-data; boundary=x",
            "Transfer-Encoding: chunked",
        )
        for _ in range(100):
            connection = socket.create_connection(("127.0.0.1", scene.rig.port), timeout=5)
            exits.callback(connection.close)
            connection.sendall(head + b"4\r\n--x\r\n\r\n"[:7])
        scene.check_others()


def _read_slowly(scene: Scene) -> None:
    """Downloads and streams that are never read."""
    file = scene.good.upload(
        jsonl(*(line_of(str(row), "x" * 1_000) for row in range(20_000)))
    ).json()["id"]
    with ExitStack() as exits:
        for number in range(40):
            connection = socket.create_connection(("127.0.0.1", scene.rig.port), timeout=5)
            exits.callback(connection.close)
            body = json.dumps({**HELLO, "stream": True}).encode()
            length = f"Content-Length: {len(body)}"
            stream = scene.head(CHAT, "Content-Type: application/json", length) + body
            content = scene.head(f"/v1/files/{file}/content", method="GET")
            connection.sendall(
                stream
                if number % 2
                else content.replace(scene.bad.key.encode(), scene.good.key.encode())
            )
        scene.check_others()


def _hang_up_in_streams(scene: Scene) -> None:
    body = json.dumps({**HELLO, "stream": True, "max_tokens": 1_000, "ignore_eos": True}).encode()
    head = scene.head(CHAT, "Content-Type: application/json", f"Content-Length: {len(body)}")
    for _ in range(30):
        scene.raw(head + body, then=lambda connection: connection.recv(10))


def _long_line(scene: Scene) -> None:
    """A line of 48 MiB of small objects: others are answered while it is looked at."""
    content = b'{"custom_id":"a","x":[' + b"{}," * (16 * MIB) + b"{}]}\n"
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(scene.bad.upload(content).status_code))
    thread.start()
    while thread.is_alive():
        scene.check_others()
        time.sleep(0.2)
    assert found and (found[0] in REFUSED or found[0] in {200, 503}), found


def _steal(scene: Scene) -> None:
    """Nothing of another is seen, taken, deleted or run."""
    found = [
        scene.bad.call("GET", f"/v1/files/{scene.file}").status_code,
        scene.bad.call("GET", f"/v1/files/{scene.file}/content").status_code,
        scene.bad.call("DELETE", f"/v1/files/{scene.file}").status_code,
        scene.bad.call("GET", f"/v1/files?after={scene.file}").status_code,
    ]
    assert set(found) <= {400, 404}, found
    batch = scene.bad.create(scene.file).json()["id"]
    assert scene.bad.ended(batch)["status"] == "failed"


def _delete_in_use(scene: Scene) -> None:
    """The input of a batch that runs is deleted: the batch ends with every answer."""
    file = scene.bad.upload(jsonl(*(line_of(str(row)) for row in range(100)))).json()["id"]
    batch = scene.bad.create(file).json()["id"]
    wait_until(lambda: scene.bad.batch(batch)["status"] != "validating", "a batch to run")
    assert scene.bad.call("DELETE", f"/v1/files/{file}").status_code == 200
    assert scene.bad.ended(batch)["request_counts"]["completed"] == 100


def _deep(opening: bytes) -> Callable[[Api], requests.Response]:
    content = opening * 200_000
    return lambda api: api.call(
        "POST", CHAT, data=content, headers={"Content-Type": "application/json"}
    )


def _chat(**more: object) -> Callable[[Api], requests.Response]:
    return lambda api: api.call("POST", CHAT, json={**HELLO, **more})


def _batch_with(**more: object) -> Callable[[Api], requests.Response]:
    """A batch that is made with odd fields."""
    return lambda api: api.create(api.upload(jsonl(line_of("a"))).json()["id"], **more)


def _extension(**fields: object) -> Callable[[Api], requests.Response]:
    return _batch_with(batchrun=fields)


def _as_gateway(api: Api) -> requests.Response:
    headers = {"X-Batchrun-Key": "key_x", "X-Batchrun-Gateway": "x"}
    return api.call("GET", "/v1/files", headers=headers)


def _packed(api: Api) -> requests.Response:
    bomb = gzip.compress(b" " * (64 * MIB))
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    return api.call("POST", CHAT, data=bomb, headers=headers)


def _hidden_call(scene: Scene) -> bytes:
    """A call behind the end that one reader sees and another does not."""
    behind = scene.head(CHAT, "Content-Length: 2") + b"{}"
    return (
        scene.head(CHAT, "Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n" + behind
    )


JSON = "Content-Type: application/json"
FORM = "Content-Type: multipart/form-data; boundary=x"
BAD_CALLERS = (
    BadCaller("uploads that never end", "others upload and call", _upload_slowly),
    BadCaller("uploads that are left", "nothing stays of them",
        _begin_and_leave(FORM, "Content-Length: 999999", body=b"--x\r\n")),
    BadCaller("calls that are left", "engine and gateway let go",
        _begin_and_leave(JSON, "Content-Length: 9", body=b"{", path=CHAT)),
    BadCaller("continue, and no body", "the connection is freed",
        _begin_and_leave(FORM, "Content-Length: 99", "Expect: 100-continue")),
    BadCaller("downloads nobody reads", "others are served", _read_slowly),
    BadCaller("streams that are left", "others are served", _hang_up_in_streams),
    BadCaller("a line of 48 MiB", "others are served meanwhile", _long_line),
    BadCaller("100 batches at once", "made, or refused with 429 or 503", _flood_batches),
    BadCaller("40 batches under one key", "one is made", _flood_one_key),
    BadCaller("60 cancellations at once", "the counts add up", _flood_cancels),
    BadCaller("300 files at once", "taken, or refused with 503", _flood_files),
    BadCaller("200 wrong keys", "all are refused", _flood_wrong_keys),
    BadCaller("files of another", "404, and nothing is run", _steal),
    BadCaller("an input deleted in use", "the batch ends with its answers", _delete_in_use),
    BadCaller("weight of a million", "refused", _refused(_extension(weight=1e6))),
    BadCaller("weight of nearly nothing", "refused", _refused(_extension(weight=5e-324))),
    BadCaller("deadline of a second", "refused", _refused(_extension(deadline="1s"))),
    BadCaller("deadline of a number", "refused", _refused(_extension(deadline=-1e308))),
    BadCaller("unknown extension", "refused", _refused(_extension(priority=-9))),
    BadCaller("metadata of half characters", "refused",
        _refused(_batch_with(metadata={"a": "\ud800"}))),
    BadCaller("metadata without end", "refused",
        _refused(_batch_with(metadata={str(i): "x" for i in range(10_000)}))),
    BadCaller("another window", "refused",
        _refused(_batch_with(completion_window="9" * 400 + "d"))),
    BadCaller("another endpoint", "refused", _refused(_batch_with(endpoint="/batchrun/v1/status"))),
    BadCaller("an id that is a path", "refused",
        _refused(lambda api: api.call("GET", "/v1/files/..%2f..%2fstore.db/content"))),
    BadCaller("an id of NUL", "refused",
        _refused(lambda api: api.call("DELETE", "/v1/files/a%00"))),
    BadCaller("a name that is a path", "it is only a name", lambda scene: _check_name(scene)),
    BadCaller("a bomb of 64 MiB", "refused unopened", _refused(_packed, 415)),
    BadCaller("a form of 5,000 parts", "refused",
        _refused(lambda api: api.call("POST", "/v1/files", files=[("x", ("a", b"a"))] * 5_000))),
    BadCaller("a body of brackets", "refused", _refused(_deep(b"["))),
    BadCaller("a body of objects", "refused", _refused(_deep(b'{"a":'))),
    BadCaller("a model of a megabyte", "refused", _refused(_chat(model="x" * MIB))),
    BadCaller("as many tokens as there are", "refused, or answered",
        _refused(_chat(max_tokens=10**18), 200, *REFUSED)),
    BadCaller("vLLM's own fields", "answered without them",
        _refused(_chat(priority=-9, vllm_xargs={"a": 1}, request_id="batchrun-1"), 200, *REFUSED)),
    BadCaller("control routes", "not there",
        _refused(lambda api: api.call("GET", "/batchrun/v1/status"), 404)),
    BadCaller("metrics", "not for this key",
        _refused(lambda api: api.call("GET", "/metrics"), 403)),
    BadCaller("the daemon's header", "it opens nothing",
        _refused(_as_gateway, 200)),
    BadCaller("a hidden call", "one answer, and no second call", _answered_once(_hidden_call)),
    BadCaller("a head of a megabyte", "refused",
        _answered_once(b"GET / HTTP/1.1\r\nX: " + b"x" * MIB + b"\r\n\r\n")),
    BadCaller("no HTTP", "refused", _answered_once(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")),
    BadCaller("a batch of white lines", "fails", _batch_fails(b" " * 99, b"\t", b"", b"\r")),
    BadCaller("white lines behind good ones", "every row ends",
        _batch_ends(0, *(line_of(str(i)) for i in range(1_001)), b" " * 6, line_of("z"))),
    BadCaller("a batch of 50,001 lines", "fails",
        _batch_fails(*(line_of(str(i)) for i in range(50_001)))),
    BadCaller("one id twice", "fails", _batch_fails(line_of("a"), line_of("a"))),
    BadCaller("ids that are no text", "fails",
        _batch_fails(line_of(1), line_of(None), line_of(["a"]))),
    BadCaller("lines that are no JSON", "fails",
        _batch_fails(line_of("a"), b"{", b"\xff\xfe", b"NaN")),
    BadCaller("half characters", "fails", _batch_fails(line_of("a", "\ud800"))),
    BadCaller("a deep line", "fails", _batch_fails(b'{"custom_id":"a","body":' + b"[" * 100_000)),
    BadCaller("ids that a terminal obeys", "every row ends",
        _batch_ends(0, line_of("\x1b]0;x\7"), line_of("\u202e"), line_of("a" * 1_024))),
    BadCaller("an id of 100,000 characters", "fails", _batch_fails(line_of("a" * 100_000))),
    BadCaller("a line of another model", "fails",
        _batch_fails(line_of("a"), line_of("b", model="gpt-4"))),
    BadCaller("rows that an engine refuses", "each ends with its own error",
        _batch_ends(3, line_of("a"), line_of("b"), line_of("x", max_tokens=-1),
                    line_of("y", n="many"), line_of("z", 7))),
)  # fmt: skip


def _check_name(scene: Scene) -> None:
    made = scene.bad.upload(jsonl(line_of("a")), name="../../../tmp/evil.jsonl")
    assert made.status_code == 200, made.text
    assert (scene.rig.home.files / made.json()["id"]).is_file()
