"""The multipart form of an upload, however its bytes come in."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from batchrun.server.api.errors import ApiError
from batchrun.server.api.upload import (
    KEY_PART,
    MAX_FIELD_BYTES,
    MAX_FILE_BYTES,
    MAX_UPLOAD_BYTES,
    MAX_UPLOADS,
    UploadForm,
    Uploads,
)

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


LENGTH = {"content-length": str(MAX_FILE_BYTES)}


def test_the_uploads_of_one_key_leave_room_for_others() -> None:
    uploads, exits = Uploads(), ExitStack()
    with exits:
        for _ in range(MAX_UPLOADS // KEY_PART):
            exits.enter_context(uploads.admitted("key_1", {"content-length": "10"}))
        with pytest.raises(ApiError, match="of this API key") as refused:
            exits.enter_context(uploads.admitted("key_1", {"content-length": "10"}))
        exits.enter_context(uploads.admitted("key_2", LENGTH))
    assert refused.value.status_code == 503
    with uploads.admitted("key_1", LENGTH):
        pass


@pytest.mark.parametrize("headers", [LENGTH, {}, {"content-length": "9" * 400}])
def test_the_bytes_of_uploads_are_bounded_by_key_and_in_all(headers: dict[str, str]) -> None:
    most = MAX_UPLOAD_BYTES // MAX_FILE_BYTES
    with ExitStack() as exits:
        uploads = Uploads()
        for owner in ("key_1", "key_2"):
            for _ in range(most // KEY_PART):
                exits.enter_context(uploads.admitted(owner, headers))
        with pytest.raises(ApiError, match=f"{most} uploads are on their way"):
            exits.enter_context(uploads.admitted("key_3", headers))
    with ExitStack() as exits:
        for _ in range(most):
            exits.enter_context(uploads.admitted(None, headers))
