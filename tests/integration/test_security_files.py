"""Names and paths that would lead out of the folder of files, or into headers: none does."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from batch_rig import ENVELOPE, Caller, chat_line, connect, errors
from deployment_rig import DeploymentRig
from raw_http import BOUNDARY, FORM_END, FORM_HEADERS, RawHttp, Reply, exchange, form_field

CONTENT = b'{"a": 1}'


def upload(raw: RawHttp, disposition: bytes) -> Reply:
    """A batch file whose part has this Content-Disposition."""
    head = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name=".encode() + b'"file"; '
    body = form_field("purpose", "batch") + head + disposition + b"\r\n\r\n" + CONTENT
    return raw.call("POST", "/v1/files", body + b"\r\n" + FORM_END, FORM_HEADERS)


@pytest.fixture(scope="module")
def kept(batch_rig: DeploymentRig) -> Iterator[str]:
    """A good file."""
    raw = RawHttp(batch_rig.port)
    file_id = str(upload(raw, b'filename="good.jsonl"').json["id"])
    yield file_id
    assert raw.get(f"/v1/files/{file_id}/content").body == CONTENT
    raw.call("DELETE", f"/v1/files/{file_id}")


@pytest.mark.parametrize(
    ("name", "saved_as"),
    [
        (b"../../etc/passwd", b'"passwd"'),
        (b"/etc/passwd", b'"passwd"'),
        (b"a/../../b.jsonl", b'"b.jsonl"'),
        (b"..\\..\\b.jsonl", b'"b.jsonl"'),
        (b"..", None),
        (b"...", b'"..."'),
        (b"", None),
        (b"/", None),
        (b"%2e%2e%2fa.jsonl", b"utf-8''%252e%252e%252fa.jsonl"),
        (b"a\nX-Injected: 1.jsonl", b"utf-8''a%0AX-Injected%3A%201.jsonl"),
        ("\u202egpj.jsonl".encode(), b"utf-8''%E2%80%AEgpj.jsonl"),
        (b"\xed\xa0\x80.jsonl", b"utf-8''%EF%BF%BD%EF%BF%BD%EF%BF%BD.jsonl"),
        (b'a\\"; x=\\"b.jsonl', b"utf-8''a%22%3B%20x%3D%22b.jsonl"),
        (b"x" * 4_000, b'"' + b"x" * 512 + b'"'),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_name_is_only_a_name(
    batch_rig: DeploymentRig, raw: RawHttp, name: bytes, saved_as: bytes | None
) -> None:
    made = upload(raw, b'filename="' + name + b'"')
    assert made.status == 200, made.body
    file_id = made.json["id"]

    assert (batch_rig.home / "files" / file_id).read_bytes() == CONTENT
    request = (
        f"GET /v1/files/{file_id}/content HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    head, _, body = exchange(batch_rig.port, request.encode()).partition(b"\r\n\r\n")
    (disposition,) = (line for line in head.split(b"\r\n") if b"attachment" in line)
    assert disposition.endswith(b"=" + (saved_as or f'"{file_id}"'.encode())), disposition
    assert not any(line.lower().startswith(b"x-injected") for line in head.splitlines())
    assert body == CONTENT
    assert raw.call("DELETE", f"/v1/files/{file_id}").json["deleted"]
    assert not (batch_rig.home / "files" / file_id).exists()


@pytest.mark.parametrize(
    "disposition",
    [
        b'filename="' + b"x" * 100_000 + b'"',
        b'filename="a\rX-Injected: 1"',
        b"filename*=utf-8''%2e%2e%2fa.jsonl",
        b'filename="a.jsonl"\r\nX-A: ' + b"x" * 100_000,
        b'filename="a.jsonl' + b"\r\nX-A: b" * 20_000,
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_part_with_an_odd_head_is_refused_and_leaves_nothing(
    batch_rig: DeploymentRig, raw: RawHttp, disposition: bytes
) -> None:
    before = sorted((batch_rig.home / "files").iterdir())

    reply = upload(raw, disposition)

    assert (reply.status, set(reply.json["error"])) == (400, ENVELOPE)
    assert sorted((batch_rig.home / "files").iterdir()) == before


@pytest.mark.parametrize(
    "file_id",
    [
        "..",
        "%2e%2e",
        "%2e%2e%2fstore.db",
        "..%2f..%2fetc%2fpasswd",
        "%252e%252e%252fstore.db",
        "..%5cstore.db",
        "../store.db",
        "%2fetc%2fpasswd",
        "{kept}%00",
        "{kept}%00.jsonl",
        "%00{kept}",
        "./{kept}",
        "../files/{kept}",
        "%2e%2e%2ffiles%2f{kept}",
        "{kept}%20",
        "{kept}%0d%0aX-Injected:%201",
        "%c0%ae%c0%ae%c0%afstore.db",
        "%uff0e%uff0e",
        ".{kept}.part",
    ],
)
@pytest.mark.parametrize("form", ["GET {}/content", "GET {}", "DELETE {}"])
def test_an_id_is_no_path(batch_rig: DeploymentRig, kept: str, file_id: str, form: str) -> None:
    method, target = form.format(f"/v1/files/{file_id.format(kept=kept)}").split()

    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    header, _, body = exchange(batch_rig.port, head.encode()).partition(b"\r\n\r\n")

    assert int(header.split()[1]) in {404, 405}, body
    assert set(json.loads(body)["error"]) == ENVELOPE
    assert b"\r\nX-Injected" not in header
    assert (batch_rig.home / "files" / kept).read_bytes() == CONTENT


def test_lines_that_are_traps_fail_their_batch(batch_rig: DeploymentRig) -> None:
    deep = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": '
    half = json.dumps(chat_line("\ud800")).encode()
    with connect(batch_rig.port, "sync") as caller:
        for trap in (deep + b"[" * 1_000_000, deep + b'{"a":' * 100_000, half):
            failed = caller.run([chat_line("good"), trap])
            assert errors(failed) == [("invalid_json_line", None, 2)]


def test_an_input_that_is_a_path_is_an_unknown_file(caller: Caller) -> None:
    for path in ("../store.db", "/etc/passwd", "file-x/../../store.db"):
        failed = caller.wait_until_ended(caller.create(path).id)
        assert errors(failed) == [("invalid_request", "file_id", None)]


def test_an_id_with_odd_characters_comes_back(caller: Caller) -> None:
    custom_id = "../../a\0b\r\nX-Injected: 1\u202e\U0001f600"
    done = caller.run([chat_line(custom_id)])
    assert [line["custom_id"] for line in caller.lines(done.output_file_id)] == [custom_id]
