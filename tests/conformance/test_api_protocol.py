"""Protocol: checks 57 to 60 of the API's specification."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import openai
import pytest
from batch_rig import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ENVELOPE,
    KIND_PARAMS,
    MODEL,
    RESPONSES,
    Caller,
    chat_line,
    check_error,
    connect,
)
from deployment_rig import DeploymentRig
from raw_http import FORM_END, FORM_HEADERS, RawHttp, Reply, file_head, form_field

JSON = {"Content-Type": "application/json"}
READS = [
    "/v1/files",
    "/v1/files/file-unknown",
    "/v1/files/file-unknown/content",
    "/v1/batches",
    "/v1/batches/batch_unknown",
    "/v1/batches/nope",
    "/v1/models",
    "/v1/models/unknown",
]
POSTS = [
    "/v1/files",
    "/v1/batches",
    "/v1/batches/batch_unknown/cancel",
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
]
ROUTES = [*((("GET"), path) for path in READS), *(("POST", path) for path in POSTS)]
UNKNOWN = [
    ("GET", "/v1/unknown"),
    ("GET", "/unknown"),
    ("DELETE", "/v1/batches/batch_unknown"),
    ("PUT", "/v1/files"),
    ("PATCH", "/v1/batches"),
    ("DELETE", "/v1/files/file-unknown"),
]
QUERIES = [
    "limit=abc",
    "limit=-1",
    "limit=1.5",
    "limit=",
    "limit=9999999999999999999999",
    "order=up",
    "order=",
    "after=",
    "after=%00",
    "after=%ff",
    "purpose=unknown",
    "limit=1&limit=2",
    "unknown=1",
]
VALUES: list[object] = [
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    10**30,
    "",
    "24h",
    "\x00",
    "\ud800",
    "x" * 10_000,
    [],
    ["a"],
    {},
    {"a": {"b": []}},
]
FIELDS = [
    "input_file_id",
    "endpoint",
    "completion_window",
    "metadata",
    "output_expires_after",
    "model",
    "messages",
    "prompt",
    "input",
    "max_tokens",
]
BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"1",
    b"\xff\xfe",
    b'{"input_file_id": NaN}',
    b"[" * 100_000,
    b'{"a":' * 10_000,
]


def check_reply(reply: Reply) -> None:
    """A reply of any route: no fault of ours, and every error in the envelope."""
    assert "x-request-id" in reply.headers
    assert reply.status < 500 and reply.status != 422, reply.body
    if reply.status >= 400:
        check_envelope(reply)


def check_envelope(reply: Reply) -> None:
    """The body is OpenAI's, with a code that is a string or null."""
    assert set(reply.json) == {"error"}, reply.body
    error = reply.json["error"]
    assert set(error) == ENVELOPE, reply.body
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str)
    assert all(isinstance(error[key], str | None) for key in ("param", "code"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KIND_PARAMS)
def test_57_a_key_is_needed(rig: DeploymentRig, kind: str) -> None:
    """No or wrong key: AuthenticationError with the envelope, also on unknown routes."""
    rig.use_fake_engine(f"--model={MODEL}")
    key = str(rig.ask("keys", "create", "mine")["key"])
    rig.ask("up", "-d")
    with connect(rig.port, kind, api_key=key) as caller:
        assert [model.id for model in caller.models.list()] == [MODEL]
    with connect(rig.port, kind, api_key="wrong") as caller:
        for ask in (caller.models.list, caller.files.list, caller.batches.list):
            with pytest.raises(openai.AuthenticationError) as refused:
                ask()
            check_error(refused.value, code="invalid_api_key")
    raw = RawHttp(rig.port)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for method, path in [*ROUTES, *UNKNOWN]:
            reply = raw.call(method, path, headers=headers)
            assert reply.status == 401, path
            check_envelope(reply)
            expected = "invalid_api_key" if headers else None
            assert reply.json["error"]["code"] == expected


@pytest.mark.parametrize(("method", "path"), [*ROUTES, *UNKNOWN, ("GET", "/healthz")])
def test_58_every_response_has_a_request_id(raw: RawHttp, method: str, path: str) -> None:
    """Every response has `x-request-id`."""
    ids = {raw.call(method, path).headers.get("x-request-id") for _ in range(2)}
    assert None not in ids and "" not in ids
    assert len(ids) == 2


def test_58_the_client_shows_the_request_id(caller: Caller) -> None:
    """Every response has `x-request-id`; `err.request_id` is not None."""
    file = caller.upload([chat_line("a")])
    answers = [
        file,
        caller.files.retrieve(file.id),
        caller.files.list(),
        caller.create(file.id),
        caller.batches.list(),
        caller.models.retrieve(MODEL),
        caller.files.delete(file.id),
    ]
    assert all(answer._request_id for answer in answers)
    with pytest.raises(openai.NotFoundError) as missing:
        caller.files.retrieve(file.id)
    assert missing.value.request_id
    assert missing.value.request_id != file._request_id


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/models"])
def test_59_odd_queries_are_refused_well(raw: RawHttp, path: str) -> None:
    """No reachable error has a `detail` top-level key without `error`, nor a 422 (fuzz every route
    with wrong types, raw): queries."""
    for query in QUERIES:
        check_reply(raw.get(f"{path}?{query}"))


@pytest.mark.parametrize(("method", "path"), [*ROUTES, *UNKNOWN])
def test_59_odd_bodies_are_refused_well(raw: RawHttp, method: str, path: str) -> None:
    """No reachable error has a `detail` top-level key without `error`, nor a 422 (fuzz every route
    with wrong types, raw): bodies, methods, ids."""
    for body in BODIES:
        check_reply(raw.call(method, path, body, JSON))
    for other in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS"):
        check_reply(raw.call(other, path, b"{}", JSON))
    for suffix in ("/", "/..", "/%2e%2e%2f", "/%00", "/%ff", "x" * 4_000, "%20"):
        check_reply(raw.call(method, path + suffix, b"{}", JSON))


@pytest.mark.parametrize("path", POSTS)
def test_59_wrong_types_are_refused_well(raw: RawHttp, path: str) -> None:
    """No reachable error has a `detail` top-level key without `error`, nor a 422 (fuzz every route
    with wrong types, raw): fields."""
    rng = random.Random(59)
    good = {"input_file_id": "file-unknown", "endpoint": CHAT, "completion_window": "24h"}
    for field in FIELDS:
        for value in VALUES:
            check_reply(raw.post(path, {**good, "model": MODEL, field: value}))
    for _ in range(100):
        fields = rng.sample(FIELDS, rng.randrange(len(FIELDS)))
        check_reply(raw.post(path, {field: rng.choice(VALUES) for field in fields}))


def odd_forms() -> Iterator[tuple[bytes, str]]:
    """Uploads that no client sends, with their content type."""
    whole = form_field("purpose", "batch") + file_head() + b"{}\r\n" + FORM_END
    form = FORM_HEADERS["Content-Type"]
    yield whole[:-20], form
    yield whole, "multipart/form-data"
    yield whole, "multipart/form-data; boundary="
    yield whole, "multipart/form-data; boundary=another"
    yield whole, "text/plain"
    yield json.dumps({"purpose": "batch", "file": "{}"}).encode(), "application/json"
    yield b"purpose=batch&file=%7B%7D", "application/x-www-form-urlencoded"
    yield form_field("purpose", "batch") * 2 + file_head() + b"{}\r\n" + FORM_END, form
    yield form_field("purpose", "batch") + form_field("file", "{}") + FORM_END, form
    yield form_field("purpose", "batch") + (file_head() + b"{}\r\n") * 2 + FORM_END, form
    yield file_head() + b"{}\r\n" + form_field("purpose", "x" * 100_000) + FORM_END, form
    yield b"".join(form_field(f"field-{i}", "x") for i in range(2_000)) + FORM_END, form
    for name in ("../../etc/passwd", "a/b\\c", "\x01", "x" * 5_000, "%00", 'a"; x="b'):
        yield form_field("purpose", "batch") + file_head(name) + b"{}\r\n" + FORM_END, form
    for anchor, seconds in (
        ("created_at", "abc"),
        ("created_at", ""),
        ("", "3600"),
        ("x", "1e9"),
        ("created_at", "--5"),
    ):
        expiry = form_field("expires_after[anchor]", anchor)
        expiry += form_field("expires_after[seconds]", seconds)
        yield expiry + whole, form
    yield form_field("expires_after[seconds]", "3600") + whole, form
    yield form_field("expires_after", "3600") + whole, form


def test_59_odd_forms_are_refused_well(raw: RawHttp) -> None:
    """No reachable error has a `detail` top-level key without `error`, nor a 422 (fuzz every route
    with wrong types, raw): forms."""
    for body, kind in odd_forms():
        check_reply(raw.call("POST", "/v1/files", body, {"Content-Type": kind}))


def test_60_models_are_listed_and_found(caller: Caller) -> None:
    """`models.list()` works; `models.retrieve("org/name")` works for a name with a slash."""
    (listed,) = caller.models.list()
    found = caller.models.retrieve("org/name")

    assert listed.id == found.id == "org/name"
    assert listed.object == found.object == "model"
    assert type(found.created) is int
    assert isinstance(found.owned_by, str)
    with pytest.raises(openai.NotFoundError) as missing:
        caller.models.retrieve("org/unknown")
    assert missing.value.code == "model_not_found"
