"""`POST /v1/files`: the body goes to the disk as it comes, and counts once it is there whole.

A multipart form with one file is parsed as it comes in: bounded fields, and the file in pieces.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from batchrun.errors import InputError, OverloadedError, StoreError
from batchrun.files import PRIVATE_MODE, HashedFile, atomic_file, max_open_files
from batchrun.jobs.batch import MAX_INPUT_BYTES
from batchrun.jobs.inputs.rows import BOM, find_lines
from batchrun.jobs.objects import in_thread
from batchrun.server.api.errors import ApiError, check_choice, check_expiry, missing_parameter
from batchrun.store.files import NewFile, new_file_id
from batchrun.strict import LARGE_JSON_BYTES, parse_json

log = logging.getLogger(__name__)

FILE_FIELD = "file"
TEXT_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
MAX_FIELD_BYTES = 4_096


class UploadForm:
    """Takes the body of `POST /v1/files` in pieces and gives those of its file back.

    `fields` and `filename` are known once their parts have come; a field is one of `text_fields`,
    of at most `max_field_bytes`. Methods raise ApiError.
    """

    def __init__(
        self,
        content_type: str,
        text_fields: frozenset[str] = TEXT_FIELDS,
        max_field_bytes: int = MAX_FIELD_BYTES,
    ) -> None:
        self._text_fields = text_fields
        self._max_field_bytes = max_field_bytes
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 256:
            message = f"Missing required parameter: '{FILE_FIELD}' (send multipart/form-data)."
            raise ApiError(400, message, code="missing_required_parameter", param=FILE_FIELD)
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._name: str | None = None
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._text = bytearray()
        self._pieces: list[bytes] = []
        self._is_file = False
        self._has_ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take a piece of the body; returns the pieces of the file in it."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise ApiError(400, "The body is not a valid multipart form.") from error
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """The body is over; refuse one that breaks off."""
        if not self._has_ended:
            raise ApiError(400, "The multipart form breaks off before its end.")

    def _on_part_begin(self) -> None:
        self._name, self._is_file, self._disposition = None, False, b""
        self._text.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options and self._name == FILE_FIELD
        if not self._is_file and self._name not in self._text_fields:
            if self._name == FILE_FIELD:
                raise ApiError(
                    400,
                    f"'{FILE_FIELD}' must be a file: its part needs a filename.",
                    code="missing_required_parameter",
                    param=FILE_FIELD,
                )
            message = f"Unknown parameter: '{self._name[:64]}'."
            raise ApiError(400, message, code="unknown_parameter", param=self._name[:64])
        if self.filename is not None if self._is_file else self._name in self.fields:
            raise ApiError(400, f"'{self._name}' is given twice.", param=self._name)
        if self._is_file:
            self.filename = options[b"filename"].decode("utf-8", "replace")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > self._max_field_bytes:
            raise ApiError(400, f"'{self._name}' is too long.", param=self._name)

    def _on_part_end(self) -> None:
        if not self._is_file and self._name is not None:
            self.fields[self._name] = self._text.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._has_ended = True


PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
BATCH_PURPOSE = "batch"
BATCH_EXPIRY_S = 2_592_000
"""Of files for batches, and of all files of an API key: none of them stays for ever."""
MAX_FILE_BYTES = 512 << 20
MAX_FORM_BYTES = 65_536
"""What a form may hold besides its file."""
MAX_FILENAME_CHARS = 512
WRITE_BYTES = 1 << 20
MAX_UPLOADS = 64
"""On their way at once. Each holds a connection and a file open for as long as its caller likes."""
MAX_UPLOAD_BYTES = 8 << 30
"""Of all uploads on their way, as they announce themselves; one alone is never too large for it."""
MAX_DOWNLOADS = 128
KEY_PART = 2
"""The uploads or downloads of one API key take half of their bounds at most."""
OPEN_FILES_PER_TRANSFER = 8
"""Where a process may have few files open, uploads take a quarter of them, at two each, and
downloads another."""


class Transfers:
    """The uploads on their way, or the downloads (`what`), by the key that they belong to (None:
    nobody's): `most` at once, of `max_bytes` together; None: of any size."""

    def __init__(self, what: str, most: int, max_bytes: int | None = None) -> None:
        self._what = what
        self._most = most
        self._max_bytes = max_bytes
        self._sizes_bytes: dict[str | None, list[int]] = {}

    def count(self, owner: str | None) -> int:
        """How many of a key are on their way."""
        return len(self._sizes_bytes.get(owner, ()))

    @contextmanager
    def admitted(self, owner: str | None, size_bytes: int = 0) -> Iterator[None]:
        """Within, one more is on its way. Raises ApiError where that would be too much: fewer may
        be where few files may be open."""
        most = max(1, min(self._most, max_open_files() // OPEN_FILES_PER_TRANSFER))
        of_all = [size for sizes in self._sizes_bytes.values() for size in sizes]
        own = self._sizes_bytes.get(owner, [])
        self._refuse_too_many(of_all, size_bytes, most, 1, f"{self._what} are")
        if owner is not None:
            whose = f"{self._what} of this API key are"
            self._refuse_too_many(own, size_bytes, -(-most // KEY_PART), KEY_PART, whose)
        self._sizes_bytes.setdefault(owner, []).append(size_bytes)
        try:
            yield
        finally:
            self._sizes_bytes[owner].remove(size_bytes)
            if not self._sizes_bytes[owner]:
                del self._sizes_bytes[owner]

    def _refuse_too_many(
        self, sizes_bytes: Sequence[int], size_bytes: int, most: int, part: int, whose: str
    ) -> None:
        max_bytes = math.inf if self._max_bytes is None else self._max_bytes // part
        is_large = bool(sizes_bytes) and sum(sizes_bytes) + size_bytes > max_bytes
        if len(sizes_bytes) >= most or is_large:
            raise ApiError(503, f"{len(sizes_bytes)} {whose} on their way; try again shortly")


@dataclass(frozen=True, slots=True)
class Traffic:
    """All files on their way to and from callers, of the API and the page alike."""

    uploads: Transfers = field(
        default_factory=lambda: Transfers("uploads", MAX_UPLOADS, MAX_UPLOAD_BYTES)
    )
    downloads: Transfers = field(default_factory=lambda: Transfers("downloads", MAX_DOWNLOADS))


MIN_READ_BYTES_PER_S = 1_024
FIRST_WAIT_S, MAX_WAIT_S = 30.0, 1_800.0
"""What a connection holds by itself may go a long way without a byte more of ours."""


class _Reader:
    """Hands on what is sent, as long as its reader takes so many bytes a second; only the time that
    is spent waiting for him counts."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._left_s = FIRST_WAIT_S
        self.is_too_slow = False

    async def send(self, message: Message) -> None:
        """Raises TimeoutError once he is behind."""
        loop = asyncio.get_running_loop()
        left_s = self._left_s + len(message.get("body", b"")) / MIN_READ_BYTES_PER_S
        began_s = loop.time()
        try:
            async with asyncio.timeout(left_s) as limit:
                await self._send(message)
        except TimeoutError:
            self.is_too_slow = limit.expired()
            raise
        self._left_s = min(MAX_WAIT_S, left_s - loop.time() + began_s)


class Download(Response):
    """A file on its way to its caller: one of as many as `transfers` admits, until it is over or
    breaks off because its caller hardly reads."""

    def __init__(self, inner: Response, transfers: Transfers, owner: str | None) -> None:
        super().__init__()
        self._inner = inner
        self._transfers = transfers
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError before anything was sent."""
        reader = _Reader(send)
        with self._transfers.admitted(self._owner):
            try:
                await self._inner(scope, receive, reader.send)
            except Exception:
                if not reader.is_too_slow:
                    raise
                log.warning("a download broke off: its caller hardly reads")


def size_told(headers: Mapping[str, str]) -> int | None:
    """How many bytes an upload says it has, but for its form; None where it does not say."""
    length = headers.get("content-length", "")
    is_told = length.isascii() and length.isdecimal() and len(length) < 19
    return max(int(length) - MAX_FORM_BYTES, 0) if is_told else None


@contextmanager
def _spooled(path: Path) -> Iterator[BinaryIO]:
    """As `atomic_file`, but a disk that takes nothing is no fault of who uploads."""
    refused: InputError | None = None
    try:
        with atomic_file(path, mode=PRIVATE_MODE) as file:
            try:
                yield file
            except InputError as error:
                refused = error
                raise
    except InputError as error:
        if error is refused:
            raise
        raise StoreError(str(error)) from None


class Spool:
    """A file that is to be: written in threads, under its final name only when it is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._exits = ExitStack()
        self._file = HashedFile(self._exits.enter_context(_spooled(path)))
        self._waiting = bytearray()

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes + len(self._waiting)

    @property
    def sha256(self) -> str:
        return self._file.sha256

    async def write(self, piece: bytes) -> None:
        self._waiting += piece
        if len(self._waiting) >= WRITE_BYTES:
            await self._flush()

    async def keep(self) -> None:
        """Sync it and give it its name. Raises StoreError."""
        await self._flush()
        await in_thread(self._exits.close)

    def drop(self) -> None:
        """Called while an exception is handled: nothing is left of it."""
        self._exits.__exit__(*sys.exc_info())
        self.path.unlink(missing_ok=True)

    async def _flush(self) -> None:
        waiting, self._waiting = bytes(self._waiting), bytearray()
        await in_thread(self._file.write, waiting)


async def receive_file(request: Request, folder: Path, owner: str | None) -> NewFile:
    """Write the file of a form into `folder`, under its new id; `owner` is the API key's id.

    When this returns, the file is on the disk, whole and synced; when it raises, nothing is left of
    it. Raises ApiError, StoreError and OverloadedError.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "Content-Encoding is not supported; send the file as it is")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_FILE_BYTES + MAX_FORM_BYTES:
        raise _too_large(MAX_FILE_BYTES)
    form = UploadForm(request.headers.get("content-type", ""))
    file_id = new_file_id()
    spool = await in_thread(Spool, folder / file_id)
    try:
        await _receive(request.stream(), form, spool)
        _check_fields(form, is_over=True)
        expires_after_s = _expiry(form, owner)
        await spool.keep()
        if form.fields["purpose"] == BATCH_PURPOSE:
            await in_thread(check_batch_file, spool.path, form.filename or "")
    except BaseException:
        spool.drop()
        raise
    return NewFile(
        filename=(form.filename or "")[:MAX_FILENAME_CHARS],
        purpose=form.fields["purpose"],
        size_bytes=spool.size_bytes,
        sha256=spool.sha256,
        expires_after_s=expires_after_s,
        owner=owner,
        id=file_id,
    )


async def _receive(body: AsyncIterator[bytes], form: UploadForm, spool: Spool) -> None:
    num_bytes = 0
    async for chunk in body:
        num_bytes += len(chunk)
        for piece in form.feed(chunk):
            await spool.write(piece)
        _check_fields(form)
        is_batch = form.fields.get("purpose") == BATCH_PURPOSE
        limit = MAX_INPUT_BYTES if is_batch else MAX_FILE_BYTES
        if spool.size_bytes > limit:
            raise _too_large(limit)
        if num_bytes - spool.size_bytes > MAX_FORM_BYTES:
            raise ApiError(400, "The multipart form holds too much besides its file.")
    form.finish()


def _check_fields(form: UploadForm, *, is_over: bool = False) -> None:
    """What can be said of the fields so far, so that no caller sends a large file for nothing."""
    purpose = form.fields.get("purpose")
    if purpose is not None:
        check_choice("purpose", purpose, PURPOSES)
    if is_over and form.filename is None:
        raise missing_parameter(FILE_FIELD)
    if is_over and purpose is None:
        raise missing_parameter("purpose")


def _expiry(form: UploadForm, owner: str | None) -> int | None:
    anchor = form.fields.get("expires_after[anchor]")
    seconds = form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        may_stay = owner is None and form.fields["purpose"] != BATCH_PURPOSE
        return None if may_stay else BATCH_EXPIRY_S
    is_number = seconds is not None and seconds.isascii() and seconds.removeprefix("-").isdigit()
    given = int(seconds) if seconds and is_number and len(seconds) < 19 else seconds
    return check_expiry("expires_after", anchor, given)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The file is larger than the maximum of {limit} bytes.", param=FILE_FIELD)


def check_batch_file(path: Path, filename: str) -> None:
    """Whether the name and the first line look like JSON Lines. The rest is for the batch, as is
    all of a line that is too long to be looked at while others wait."""
    suffix = Path(filename.replace("\0", "")).suffix
    try:
        line = _first_line(path)
    except OSError as failure:
        problem = f"{path}: cannot be read now: {failure.strerror}; try again"
        raise OverloadedError(problem) from None
    refusal = ApiError(400, "Invalid file format for Batch API. Must be .jsonl")
    try:
        if len(line) <= LARGE_JSON_BYTES:
            parse_json(line.removeprefix(BOM))
        elif not line.removeprefix(BOM).lstrip().startswith(b"{"):
            raise refusal
    except ValueError:
        raise refusal from None
    if suffix.lower() not in {"", ".jsonl"}:
        raise refusal


def _first_line(path: Path) -> bytes:
    """The start of the first line that is not blank; nothing where there is none."""
    with path.open("rb") as file:
        for lines in find_lines(file.fileno()):
            for start, end in zip(lines.starts[:1].tolist(), lines.ends[:1].tolist(), strict=True):
                return os.pread(file.fileno(), min(end - start, LARGE_JSON_BYTES + 1), start)
    return b""
