"""The multipart form of an upload, however its bytes come in, and how many come at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from batchrun.errors import StateError, StoreError
from batchrun.home import Home
from batchrun.server.api import upload
from batchrun.server.api.errors import ApiError, Caller
from batchrun.server.api.upload import (
    KEY_PART,
    MAX_FIELD_BYTES,
    MAX_FILE_BYTES,
    MAX_FORM_BYTES,
    MAX_UPLOAD_BYTES,
    MAX_UPLOADS,
    Download,
    Transfers,
    UploadForm,
    receive_file,
    size_told,
)
from batchrun.server.web.uploads import MAX_DRAFTS, Desk

KIND = "multipart/form-data; boundary=xyz"
FILE = b'name="file"; filename="gr\xc3\xbcn.jsonl"'
Part = tuple[bytes, bytes]


def form(*parts: Part, end: bytes = b"--xyz--\r\n") -> bytes:
    """A body of (disposition, content)."""
    head = b"--xyz\r\nContent-Disposition: form-data; "
    return b"".join(head + name + b"\r\n\r\n" + text + b"\r\n" for name, text in parts) + end


def read(body: bytes, *, step: int = 1 << 16) -> tuple[UploadForm, bytes]:
    """The form and its file, from pieces of `step` bytes."""
    made = UploadForm(KIND)
    pieces = [
        piece
        for start in range(0, len(body), step)
        for piece in made.feed(body[start : start + step])
    ]
    made.finish()
    return made, b"".join(pieces)


@pytest.mark.parametrize("step", [1, 2, 7, 64, 4096])
def test_the_file_is_what_was_sent_in_pieces_of_any_size(step: int) -> None:
    content = b"\r\n--xy\r\n--xyz\n\x00\xff" * 50
    expiry = (b'name="expires_after[anchor]"', b"created_at")

    made, found = read(form((b'name="purpose"', b"batch"), expiry, (FILE, content)), step=step)

    assert found == content
    assert made.filename == "grün.jsonl"
    assert made.fields == {"purpose": "batch", "expires_after[anchor]": "created_at"}


async def test_a_disk_that_takes_no_upload_is_no_fault_of_its_caller(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("no folder")
    headers = [(b"content-type", KIND.encode())]

    with pytest.raises(StoreError):
        await receive_file(Request({"type": "http", "headers": headers}), tmp_path / "files", None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (form((FILE, b"x"), end=b""), "breaks off"),
        (b"nothing of the kind", "not a valid multipart form"),
        (form((FILE, b"x"), (FILE, b"y")), "'file' is given twice"),
        (form((b'name="purpose"', b"a"), (b'name="purpose"', b"b")), "'purpose' is given twice"),
        (form((b'name="file"', b"x")), "must be a file"),
        (form((b'name="other"', b"x")), "Unknown parameter: 'other'"),
        (form((b"", b"x")), "Unknown parameter: ''"),
        (form((b'name="purpose"', b"x" * (MAX_FIELD_BYTES + 1))), "'purpose' is too long"),
        (form((b'name="purpose"; x="' + b"y" * 65_536 + b'"', b"")), "not a valid"),
    ],
)
def test_what_is_no_upload_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refusal:
        read(body)

    assert refusal.value.status_code == 400


@pytest.mark.parametrize(
    "kind", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=xyz"]
)
def test_only_a_multipart_form_is_one(kind: str) -> None:
    with pytest.raises(ApiError, match="Missing required parameter: 'file'"):
        UploadForm(kind)


def test_the_uploads_of_one_key_leave_room_for_others() -> None:
    uploads, exits = Transfers("uploads", MAX_UPLOADS, MAX_UPLOAD_BYTES), ExitStack()
    with exits:
        for _ in range(MAX_UPLOADS // KEY_PART):
            exits.enter_context(uploads.admitted("key_1", 10))
        with pytest.raises(ApiError, match="of this API key") as refused:
            exits.enter_context(uploads.admitted("key_1", 10))
        exits.enter_context(uploads.admitted("key_2", MAX_FILE_BYTES))
        assert (uploads.count("key_1"), uploads.count("key_2")) == (MAX_UPLOADS // KEY_PART, 1)
    assert (refused.value.status_code, uploads.count("key_1")) == (503, 0)
    with uploads.admitted("key_1", MAX_FILE_BYTES):
        pass


def test_the_bytes_of_uploads_are_bounded_by_key_and_in_all() -> None:
    most = MAX_UPLOAD_BYTES // MAX_FILE_BYTES
    with ExitStack() as exits:
        uploads = Transfers("uploads", MAX_UPLOADS, MAX_UPLOAD_BYTES)
        for owner in ("key_1", "key_2"):
            for _ in range(most // KEY_PART):
                exits.enter_context(uploads.admitted(owner, MAX_FILE_BYTES))
        with pytest.raises(ApiError, match=f"{most} uploads are on their way"):
            exits.enter_context(uploads.admitted("key_3", MAX_FILE_BYTES))
    with ExitStack() as exits:
        for _ in range(most):
            exits.enter_context(uploads.admitted(None, MAX_FILE_BYTES))


@pytest.mark.parametrize(
    ("told", "size_bytes"), [(str(MAX_FILE_BYTES), MAX_FILE_BYTES - MAX_FORM_BYTES), ("1", 0)]
)
def test_an_upload_says_how_large_it_is(told: str, size_bytes: int) -> None:
    assert size_told({"content-length": told}) == size_bytes


@pytest.mark.parametrize("headers", [{}, {"content-length": "9" * 400}, {"content-length": "-1"}])
def test_an_upload_that_does_not_say_may_be_of_any_size(headers: dict[str, str]) -> None:
    assert size_told(headers) is None


async def test_downloads_are_bounded_until_they_are_over() -> None:
    transfers, sent = Transfers("downloads", 1), list[int]()

    class Inner(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            sent.append(transfers.count("key_1"))
            with pytest.raises(ApiError, match="1 downloads are on their way") as refused:
                await Download(Response(), transfers, "key_2")(scope, receive, send)
            assert refused.value.status_code == 503

    async def receive() -> Message:
        return {}

    async def send(_message: Message) -> None:
        return

    await Download(Inner(), transfers, "key_1")({}, receive, send)
    assert (sent, transfers.count("key_1")) == ([1], 0)


async def test_a_download_that_is_hardly_read_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "FIRST_WAIT_S", 0.2)
    monkeypatch.setattr(upload, "MAX_WAIT_S", 0.2)
    transfers, taken = Transfers("downloads", 1), list[Message]()

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x"

    async def receive() -> Message:
        return await asyncio.Future()

    async def send(message: Message) -> None:
        taken.append(message)
        if len(taken) == 4:
            await asyncio.Future()

    async with asyncio.timeout(30):
        reply = StreamingResponse(pieces())
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await Download(reply, transfers, "key_1")(scope, receive, send)
    assert (len(taken), transfers.count("key_1")) == (4, 0)


def request_of(owner: str, receive: Receive, size_bytes: int = 100) -> Request:
    """An upload on the page, by this key."""
    headers = [(b"content-type", KIND.encode()), (b"content-length", str(size_bytes).encode())]
    request = Request({"type": "http", "headers": headers, "state": {}}, receive)
    request.state.caller = Caller(owner=owner)
    return request


def num_parts(folder: Path) -> int:
    """How many files are being written."""
    return len(list(folder.rglob("*.part")))


async def test_uploads_on_the_page_are_bounded_as_those_of_the_api(tmp_path: Path) -> None:
    """Also such as are on their way, of which none has shown a draft yet."""

    async def wait() -> Message:
        await asyncio.Event().wait()
        return {}

    transfers = Transfers("uploads", 4 * MAX_DRAFTS, MAX_UPLOAD_BYTES)
    desk = Desk(Home(tmp_path), None, "model", transfers)
    with ExitStack() as others:
        while transfers.count("key_1") < 2 * MAX_DRAFTS:
            others.enter_context(transfers.admitted("key_1"))
        with pytest.raises(ApiError, match="of this API key are on their way"):
            await desk.receive(request_of("key_1", wait))
    coming = [
        asyncio.create_task(desk.receive(request_of("key_2", wait))) for _ in range(MAX_DRAFTS)
    ]
    while await asyncio.to_thread(num_parts, tmp_path) < MAX_DRAFTS:
        await asyncio.sleep(0.01)
    assert transfers.count("key_2") == MAX_DRAFTS
    with pytest.raises(StateError, match="uploads come or are looked at"):
        await desk.receive(request_of("key_1", wait))

    for task in coming:
        task.cancel()
    await asyncio.wait(coming)
    assert transfers.count("key_2") == 0 and list(Home(tmp_path).uploads.iterdir()) == []


@pytest.mark.parametrize("size_bytes", [MAX_FILE_BYTES + MAX_FORM_BYTES + 1, 10**18, 10**4_000])
async def test_no_larger_file_comes_by_the_page(tmp_path: Path, size_bytes: int) -> None:
    async def receive() -> Message:
        raise AssertionError("it is refused before its body comes")

    desk = Desk(Home(tmp_path), None, "model", Transfers("uploads", 1))
    with pytest.raises(ApiError, match="submit it in a shell"):
        await desk.receive(request_of("key_1", receive, size_bytes))
