"""The multipart form of an upload, however its bytes come in."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from batchrun.server.api.errors import ApiError
from batchrun.server.api.files import Download
from batchrun.server.api.upload import (
    KEY_PART,
    MAX_FIELD_BYTES,
    MAX_FILE_BYTES,
    MAX_FORM_BYTES,
    MAX_UPLOAD_BYTES,
    MAX_UPLOADS,
    Transfers,
    UploadForm,
    size_told,
)
from batchrun.store.files import FileRecord

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
    file = FileRecord(1, "file-1", "key_1", "a", "batch", 3, "0" * 64, 1.0, None)

    class Inner(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            sent.append(transfers.count("key_1"))
            with pytest.raises(ApiError, match="1 downloads are on their way") as refused:
                await Download(Response(), transfers, file, "key_2")(scope, receive, send)
            assert refused.value.status_code == 503

    async def receive() -> Message:
        return {}

    async def send(_message: Message) -> None:
        return

    await Download(Inner(), transfers, file, "key_1")({}, receive, send)
    assert (sent, transfers.count("key_1")) == ([1], 0)
